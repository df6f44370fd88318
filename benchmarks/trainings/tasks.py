"""What is trained: model, loss, optimizer, and the batches that a seed gives.

Each shows another kind of gradient: many layers and a global norm (`lm`), BatchNorm and SGD
(`images`), a mean over pixels and a last layer that starts at zero (`denoiser`).
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.trainings import data
from benchmarks.trainings.layers import AddPositions, attention_block, noise_block, residual_block

layers = keras.layers


class Task(abc.ABC):
    """One training; its attributes are the full sizes, those in `tiny` suit a test.

    Attributes:
        name: name on the command line.
        batch, steps: samples a step, and steps.
        every: steps between two validations.
        valid_batches: batches of a validation, the same each time.
        peak_rate, warm_up: highest learning rate, and steps until it is reached.
        tiny: other values of attributes.
    """

    name = ""
    batch = steps = every = valid_batches = 0
    peak_rate = 1e-3
    warm_up = 100
    tiny: dict[str, Any] = {"batch": 4, "steps": 8, "every": 4, "valid_batches": 2, "warm_up": 2}

    def __init__(self, folder: Path, tiny: bool = False, **sizes: Any) -> None:
        """Reads the data.

        Args:
            folder: where the data is.
            tiny: whether to take the sizes in `tiny`.
            **sizes: other values of attributes.
        """
        for key, value in {**(self.tiny if tiny else {}), **sizes}.items():
            setattr(self, key, value)
        self.read(folder)

    @abc.abstractmethod
    def read(self, folder: Path) -> None:
        """Reads the data."""

    @abc.abstractmethod
    def build(self) -> keras.Model:
        """A new model, in the dtype policy of Keras."""

    @abc.abstractmethod
    def optimizer(self) -> keras.optimizers.Optimizer:
        """A new optimizer, not wrapped."""

    @abc.abstractmethod
    def losses(self) -> dict[str, Any]:
        """The arguments `loss` and `metrics` of `compile`."""

    @abc.abstractmethod
    def sample(self, part: str, rows: Any, seed: Any) -> tuple[Any, tf.Tensor]:
        """The batch `(x, y)` of these samples.

        Args:
            part: "train" or "valid".
            rows: int64 tensor of shape `[batch]`, each below `size(part)`.
            seed: int64 tensor of shape `[2]` for what else is random.
        """

    @abc.abstractmethod
    def size(self, part: str) -> int:
        """How many samples there are."""

    def rate(self) -> keras.optimizers.schedules.LearningRateSchedule:
        """Linear warm-up, then a cosine down to a tenth."""
        return keras.optimizers.schedules.CosineDecay(
            0.0,
            max(1, self.steps - self.warm_up),
            alpha=0.1,
            warmup_target=self.peak_rate,
            warmup_steps=self.warm_up,
        )

    def batches(self, seed: int) -> tf.data.Dataset:
        """Batches without end, the same for all that train with this seed."""
        high = self.size("train")

        def draw(step: tf.Tensor) -> tuple[Any, tf.Tensor]:
            both = tf.stack([tf.constant(seed, tf.int64), step])
            rows = tf.random.stateless_uniform([self.batch], both, 0, high, tf.int64)
            return self.sample("train", rows, both)

        return _prefetched(tf.data.Dataset.counter(), draw)

    def validation(self) -> tf.data.Dataset:
        """The batches of a validation, spread evenly over the samples."""
        count = self.valid_batches * self.batch
        rows = np.linspace(0, self.size("valid") - 1, count).astype(np.int64)
        # Each batch gets a bit of everything.
        rows = tf.constant(rows.reshape(self.batch, self.valid_batches).T.copy())

        def draw(step: tf.Tensor) -> tuple[Any, tf.Tensor]:
            both = tf.stack([tf.constant(-1, tf.int64), step])
            return self.sample("valid", rows[step], both)

        return _prefetched(tf.data.Dataset.range(self.valid_batches), draw)


def _on_host(arrays: data.Arrays) -> dict[str, tf.Tensor]:
    # As tensors, which the functions of a data set capture: an array would go into their graphs.
    with tf.device("CPU"):
        return {name: tf.constant(array) for name, array in arrays.items()}


def _prefetched(counter: tf.data.Dataset, draw: Callable[..., Any]) -> tf.data.Dataset:
    options = tf.data.Options()
    options.threading.private_threadpool_size = 2  # several trainings share the machine
    return counter.map(draw, num_parallel_calls=2).prefetch(8).with_options(options)


class LanguageModel(Task):
    """A causal transformer over bytes; Adam with warm-up and clipping by the global norm."""

    name = "lm"
    batch, steps, every, valid_batches = 64, 1500, 50, 8
    sequence, depth, width, heads = 256, 6, 384, 6
    tiny = {**Task.tiny, "sequence": 8, "depth": 1, "width": 8, "heads": 2}

    def read(self, folder: Path) -> None:
        """See `Task`."""
        self.text = _on_host(data.load(folder, data.TEXT))

    def build(self) -> keras.Model:
        """See `Task`."""
        inputs = keras.Input((self.sequence,), dtype="int64")
        x = AddPositions()(layers.Embedding(256, self.width)(inputs))
        for _ in range(self.depth):
            x = attention_block(x, self.heads)
        x = layers.LayerNormalization()(x)
        return keras.Model(inputs, layers.Dense(256, dtype="float32")(x), name=self.name)

    def optimizer(self) -> keras.optimizers.Optimizer:
        """See `Task`."""
        return keras.optimizers.Adam(self.rate(), global_clipnorm=1.0)

    def losses(self) -> dict[str, Any]:
        """See `Task`."""
        return {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}

    def size(self, part: str) -> int:
        """See `Task`."""
        return len(self.text[part]) - self.sequence

    def sample(self, part: str, rows: Any, seed: Any) -> tuple[Any, tf.Tensor]:
        """Texts from these starts on; the target is the next byte."""
        window = rows[:, None] + tf.range(self.sequence + 1, dtype=tf.int64)
        text = tf.cast(tf.gather(self.text[part], window), tf.int64)
        return text[:, :-1], text[:, 1:]


class Images(Task):
    """A residual network with BatchNorm; SGD with momentum and weight decay."""

    name = "images"
    batch, steps, every, valid_batches = 256, 2000, 100, 39
    peak_rate = 0.1
    filters, blocks = 32, 2
    tiny = {**Task.tiny, "filters": 2, "blocks": 1}

    def read(self, folder: Path) -> None:
        """See `Task`."""
        self.images = _on_host(data.load(folder, data.IMAGES))

    def build(self) -> keras.Model:
        """See `Task`."""
        inputs = keras.Input((28, 28, 1))
        x = layers.Conv2D(self.filters, 3, padding="same", use_bias=False)(inputs)
        x = layers.ReLU()(layers.BatchNormalization()(x))
        for stage in range(3):
            for block in range(self.blocks):
                strides = 2 if stage and not block else 1
                x = residual_block(x, self.filters << stage, strides)
        x = layers.GlobalAveragePooling2D()(x)
        return keras.Model(inputs, layers.Dense(10, dtype="float32")(x), name=self.name)

    def optimizer(self) -> keras.optimizers.Optimizer:
        """See `Task`."""
        return keras.optimizers.SGD(self.rate(), momentum=0.9, nesterov=True, weight_decay=5e-4)

    def losses(self) -> dict[str, Any]:
        """See `Task`."""
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return {"loss": loss, "metrics": ["accuracy"]}

    def size(self, part: str) -> int:
        """See `Task`."""
        return len(self.images[f"{part}_y"])

    def pixels(self, part: str, rows: Any) -> tf.Tensor:
        """These images, float32 of shape `[batch, 28, 28, 1]`, from -1 to 1."""
        x = tf.gather(self.images[f"{part}_x"], rows)[..., None]
        return tf.cast(x, tf.float32) / 127.5 - 1.0

    def sample(self, part: str, rows: Any, seed: Any) -> tuple[Any, tf.Tensor]:
        """Images and their labels."""
        labels = tf.gather(self.images[f"{part}_y"], rows)
        return self.pixels(part, rows), tf.cast(labels, tf.int64)


class Denoiser(Images):
    """A diffusion model's U-Net that predicts the noise in an image; Adam, a mean over pixels."""

    name = "denoiser"
    batch, steps, every, valid_batches = 128, 2000, 100, 16
    peak_rate = 1e-3
    channels, groups, features = 48, 8, 32
    tiny = {**Task.tiny, "batch": 2, "channels": 2, "groups": 2, "features": 4}

    def build(self) -> keras.Model:
        """See `Task`."""
        noisy, level = keras.Input((28, 28, 1)), keras.Input((self.features,))
        time = layers.Dense(4 * self.channels, activation="silu")(level)
        wide, groups = 2 * self.channels, self.groups
        x = layers.Conv2D(self.channels, 3, padding="same")(noisy)
        x = high = noise_block(x, time, self.channels, groups)
        x = layers.Conv2D(wide, 3, strides=2, padding="same")(x)
        x = middle = noise_block(x, time, wide, groups)
        x = layers.Conv2D(wide, 3, strides=2, padding="same")(x)
        x = noise_block(noise_block(x, time, wide, groups), time, wide, groups)
        x = layers.Concatenate()([layers.UpSampling2D()(x), middle])
        x = noise_block(x, time, wide, groups)
        x = layers.Concatenate()([layers.UpSampling2D()(x), high])
        x = noise_block(x, time, self.channels, groups)
        x = layers.Activation("silu")(layers.GroupNormalization(groups)(x))
        # Zero at first, as in Ho et al., "Denoising Diffusion Probabilistic Models" (2020).
        last = layers.Conv2D(1, 3, padding="same", kernel_initializer="zeros", dtype="float32")
        return keras.Model([noisy, level], last(x), name=self.name)

    def optimizer(self) -> keras.optimizers.Optimizer:
        """See `Task`."""
        return keras.optimizers.Adam(self.rate())

    def losses(self) -> dict[str, Any]:
        """See `Task`."""
        return {"loss": "mse"}

    def sample(self, part: str, rows: Any, seed: Any) -> tuple[Any, tf.Tensor]:
        """Images with noise, how much of it as sines and cosines, and the noise."""
        x = self.pixels(part, rows)
        noise = tf.random.stateless_normal(tf.shape(x), seed)
        # Evenly spaced within the batch, from almost none to almost nothing else.
        level = (tf.range(self.batch, dtype=tf.float32) + 0.5) / self.batch
        angle = level[:, None, None, None] * (np.pi / 2)
        waves = level[:, None] * (np.pi * 2.0 ** np.arange(self.features // 2, dtype=np.float32))
        noisy = tf.cos(angle) * x + tf.sin(angle) * noise
        return (noisy, tf.concat([tf.sin(waves), tf.cos(waves)], -1)), noise


TASKS: dict[str, type[Task]] = {t.name: t for t in (LanguageModel, Images, Denoiser)}
