"""The four training runs of the demo, and the gradients that each loses.

All runs start from the same weights and use the same batches; they differ only in the precision,
and in whether the loss is scaled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tfscale

HELD_OUT = 360

_CLASSES = 10
BATCH = 256
# A pixel with a larger grey value, from 0 to 1, is part of the stroke.
_STROKE = 0.25
# Share of the ones among the masks' elements.
_RARITY = 0.04
_LEARNING_RATE = 1e-2
_PROBES = 6

Digits: TypeAlias = tuple[np.ndarray, np.ndarray]


@dataclass
class Run:
    """One training run: how it computes, and its results.

    Attributes:
        name: its name in the table and the picture.
        dtype: Keras dtype policy of all layers except the last, which is float32.
        scaled: whether the optimizer is wrapped by `tfscale.wrap`.
        accuracy: share of the held-out stroke pixels given the right digit, after each epoch.
        lost: share of gradient elements that are zero in `dtype` but not in float32, at each probe.
        skipped: steps skipped; None without loss scaling.
        scale: loss scale at the end; None without loss scaling.
    """

    name: str
    dtype: str
    scaled: bool = False
    accuracy: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    skipped: int | None = None
    scale: float | None = None


def four_runs() -> list[Run]:
    """Return the runs that the demo compares, not yet trained."""
    return [
        Run("float32", "float32"),
        Run("float16, unscaled", "mixed_float16"),
        Run("float16, tfscale", "mixed_float16", scaled=True),
        Run("bfloat16", "mixed_bfloat16"),
    ]


def digits(seed: int) -> tuple[Digits, Digits]:
    """Split the digits of scikit-learn, which need no download, into training and held-out ones.

    Args:
        seed: seed of the split.

    Returns:
        Two pairs of float32 arrays: images (n, 8, 8, 1) of 0 to 1, and masks (n, 8, 8, 10) that
        are 1 where a pixel is part of the stroke of that class.
    """
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 16.0).astype("float32")
    of_class = labels[:, None, None, None] == np.arange(_CLASSES)
    masks = ((images > _STROKE) & of_class).astype("float32")
    x, x_held, y, y_held = train_test_split(
        images, masks, test_size=HELD_OUT, random_state=seed, stratify=labels
    )
    return (x, y), (x_held, y_held)


def build(dtype: str) -> keras.Model:
    """Build the model of about 10,000 weights.

    Args:
        dtype: Keras dtype policy of all layers but the last.

    Returns:
        A model from images (n, 8, 8, 1) to float32 logits (n, 8, 8, 10).
    """

    def conv(filters: int, size: int = 3, strides: int = 1) -> keras.Layer:
        return layers.Conv2D(
            filters,
            size,
            strides,
            padding="same",
            activation="relu",
            kernel_initializer="he_normal",
            dtype=dtype,
        )

    image = keras.Input((8, 8, 1))
    local = conv(12)(image)
    digit = conv(24)(conv(24, strides=2)(local))
    digit = layers.GlobalAveragePooling2D(keepdims=True, dtype=dtype)(digit)
    digit = layers.UpSampling2D(8, dtype=dtype)(digit)
    both = conv(12, 1)(layers.Concatenate(dtype=dtype)([digit, local]))
    # Rare classes start out improbable, as in Lin et al., "Focal Loss for Dense Object Detection",
    # ICCV 2017 (arXiv:1708.02002).
    bias = keras.initializers.Constant(math.log(_RARITY / (1 - _RARITY)))
    logits = layers.Conv2D(_CLASSES, 1, bias_initializer=bias, dtype=dtype)(both)
    return keras.Model(image, layers.Activation("linear", dtype="float32")(logits), name="demo")


def train(
    run: Run, data: tuple[Digits, Digits], seed: int, epochs: int, after_epoch: Callable[[], object]
) -> None:
    """Train one run and fill in its results.

    Args:
        run: one of `four_runs`.
        data: from `digits`.
        seed: of the initial weights and of the order of the digits.
        epochs: passes over the training digits.
        after_epoch: called without arguments when an epoch's results are in `run`.
    """
    (x, y), held_out = data
    keras.utils.set_random_seed(seed)
    model = build(run.dtype)
    optimizer = keras.optimizers.Adam(_LEARNING_RATE)
    if run.scaled:
        optimizer = tfscale.wrap(optimizer)
    # XLA may keep chains of float16 operations in float32 on a CPU, and so hide what float16 does.
    model.compile(
        optimizer, loss(), metrics=[_right_pixels], auto_scale_loss=False, jit_compile=False
    )
    twin = build("float32")

    def collect(epoch: int, logs: dict[str, float]) -> None:
        run.accuracy.append(float(logs["val__right_pixels"]))
        if epoch % math.ceil(epochs / _PROBES) == 0:
            twin.set_weights(model.get_weights())
            scale = float(optimizer.loss_scale) if run.scaled else 1.0
            zero = _zero_gradients(model, x[:BATCH], y[:BATCH], scale)
            zero_in_float32 = _zero_gradients(twin, x[:BATCH], y[:BATCH], 1.0)
            run.lost.append(float(zero[~zero_in_float32].mean()))
        after_epoch()

    model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=epochs,
        verbose=0,
        validation_data=held_out,
        # One batch: the share of all pixels is not the mean of the batches' shares.
        validation_batch_size=HELD_OUT,
        callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=collect)],
    )
    if run.scaled:
        run.skipped, run.scale = int(optimizer.skipped_steps), float(optimizer.loss_scale)


def loss() -> keras.losses.Loss:
    """Return the loss of all runs."""
    return keras.losses.BinaryFocalCrossentropy(apply_class_balancing=True, from_logits=True)


def _right_pixels(masks: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    stroke = tf.reduce_sum(masks, axis=-1)
    right = tf.cast(tf.argmax(masks, axis=-1) == tf.argmax(logits, axis=-1), tf.float32)
    return tf.reduce_sum(stroke * right) / tf.reduce_sum(stroke)


def _zero_gradients(model: keras.Model, x: np.ndarray, y: np.ndarray, scale: float) -> np.ndarray:
    """Whether each element is zero, of the gradients of all layers' outputs and all weights.

    Without the output of the last layer, which is in float32.
    """
    outputs = keras.Model(model.input, [layer.output for layer in model.layers[1:]])
    with tf.GradientTape() as tape:
        *hidden, logits = outputs(x, training=True)
        scaled = loss()(y, logits) * scale
    gradients = tape.gradient(scaled, [*hidden, *model.trainable_variables])
    return np.concatenate([np.ravel(gradient.numpy() == 0) for gradient in gradients])
