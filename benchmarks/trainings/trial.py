"""One task in one variant: compiled once, trained from several seeds, watched at every step."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfscale
from benchmarks.trainings.names import TRAININGS
from benchmarks.trainings.tasks import Task
from benchmarks.trainings.variants import compile_model, precision


class Trial:
    """A compiled model that can start again."""

    def __init__(self, task: Task, variant: str) -> None:
        """Builds and compiles the model."""
        self.task, self.variant = task, variant
        with precision(variant):
            self.model = task.build()
            compile_model(variant, self.model, task.optimizer(), jit_compile=True, **task.losses())
        self.optimizer = self.model.optimizer
        self.optimizer.build(self.model.trainable_variables)
        self._at_start = [(v, v.numpy()) for v in self.optimizer.variables]

    def reset(self, seed: int) -> None:
        """Gives model and optimizer the values that a new run with this seed starts from."""
        keras.utils.set_random_seed(seed)
        with precision(self.variant):
            self.model.set_weights(self.task.build().get_weights())
        for variable, value in self._at_start:
            variable.assign(value)

    def scale(self) -> tf.Tensor:
        """The loss scale now, 1 where nothing is scaled (float32 scalar)."""
        if isinstance(self.optimizer, tfscale.LossScaleOptimizer):
            return tf.identity(self.optimizer.loss_scale)
        return tf.identity(getattr(self.optimizer, "dynamic_scale", 1.0))

    def train(self, seed: int, batches: tf.data.Dataset | None = None) -> dict[str, Any]:
        """Trains from the start.

        Args:
            seed: of the initial weights and the batches.
            batches: other batches than the task's.

        Returns:
            `seed`, `steps`, `every`; `curve`, for each entry of Keras' logs its value after every
            `task.every` steps; `scale`, the pairs of step and loss scale where it changed;
            `skipped`, the skipped steps; `final`, the last value of the metric;
            `statistics`, after every `task.every` steps the largest magnitude among BatchNorm's
            moving statistics. A value that is not finite is None.
        """
        self.reset(seed)
        task, watch = self.task, _Watch(self)
        history = self.model.fit(
            task.batches(seed) if batches is None else batches,
            steps_per_epoch=task.every,
            epochs=task.steps // task.every,
            validation_data=task.validation(),
            callbacks=[watch],
            shuffle=False,
            verbose=0,
        ).history
        ours = ("loss_scale", "skipped_steps")
        run = {
            "seed": seed,
            "steps": task.steps,
            "every": task.every,
            "final": finite(history[TRAININGS[task.name]][-1]),
            "curve": {k: [finite(v) for v in h] for k, h in history.items() if k not in ours},
            **watch.seen(),
        }
        if watch.statistics:
            run["statistics"] = watch.statistics
        return run

    def gradients_lost(self, scale: float) -> dict[str, float]:
        """The share of the gradients that float16 turns into zero now, by `tfscale.profile`.

        Args:
            scale: the loss scale that is used at present.

        Returns:
            Shares of the elements that are not zero: of the gradients of the variables, and of all
            gradients, those of activations included, at scale 1 and at `scale`.
        """
        x, y = next(iter(self.task.batches(10**6)))
        profile = tfscale.profile(self.model, x, y, batch_size=self.task.batch, steps=1)
        groups = {"variables": profile.all_variables, "all": profile.total}
        return {
            "scale": scale,
            **{f"{name}_at_1": float(g.lost()) for name, g in groups.items()},
            **{f"{name}_at_scale": float(g.lost(scale)) for name, g in groups.items()},
        }


class _Watch(keras.callbacks.Callback):
    """Notes scale and applied steps after each step without waiting for the device."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self.trial = trial
        self.scales = [trial.scale()]
        self.applied = [tf.identity(trial.optimizer.iterations)]
        self.statistics: list[float | None] = []
        self.moving = [v for v in trial.model.non_trainable_variables if "moving" in v.path]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.scales.append(self.trial.scale())
        self.applied.append(tf.identity(self.trial.optimizer.iterations))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.moving:
            largest = [float(np.max(np.abs(v.numpy()))) for v in self.moving]
            self.statistics.append(finite(max(largest)) if np.isfinite(largest).all() else None)

    def seen(self) -> dict[str, Any]:
        scales = np.array([float(s) for s in self.scales])
        changed = [0, *(np.flatnonzero(np.diff(scales)) + 1)]
        skipped = np.flatnonzero(np.diff([int(n) for n in self.applied]) == 0)
        return {
            "scale": [[int(step), scales[step]] for step in changed],
            "skipped": [int(step) for step in skipped],
        }


def finite(value: Any) -> float | None:
    """The number with five digits; None if it is not finite, which JSON cannot say."""
    return float(f"{float(value):.5g}") if math.isfinite(value) else None
