"""Faults on purpose: batches that make gradients infinite or NaN, at steps known beforehand."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.trainings.tasks import Task

HUGE = 1e9  # overflows at every scale that float16 gradients have


def schedule(fault: str, steps: int) -> np.ndarray:
    """Which steps have a bad batch (bool, one for each step); short trainings have them sooner."""
    unit = 100 if steps >= 400 else max(1, steps // 4)
    bad = np.zeros(steps, bool)
    if fault == "burst":
        bad[3 * unit : 3 * unit + min(12, unit)] = True
    else:
        every = {"nan": 2 * unit, "outlier": unit}[fault]
        bad[every - 1 :: every] = True
    return bad


def spoiled(task: Task, seed: int, fault: str) -> tf.data.Dataset:
    """The task's batches, weighted by sample, some of them bad.

    A NaN sample is an image of NaN, so that BatchNorm sees it; where inputs are integers, it has a
    weight of NaN.
    """
    steps = tf.constant(schedule(fault, task.steps))
    first = tf.one_hot(0, task.batch)

    def spoil(step: tf.Tensor, batch: tuple[Any, tf.Tensor]) -> tuple[Any, tf.Tensor, tf.Tensor]:
        x, y = batch
        weights = tf.ones([task.batch] + [1] * (y.shape.rank - 1))
        bad = steps[tf.minimum(step, task.steps - 1)]  # some batches are drawn ahead
        if fault != "nan":
            return x, y, tf.where(bad, HUGE, 1.0) * weights
        nan = tf.where(tf.logical_and(bad, first > 0), np.nan, 0.0)
        image, *rest = tf.nest.flatten(x)
        if not image.dtype.is_floating:
            return x, y, weights + tf.reshape(nan, weights.shape)
        image += tf.reshape(nan, [-1] + [1] * (image.shape.rank - 1))
        return tf.nest.pack_sequence_as(x, [image, *rest]), y, weights

    return task.batches(seed).enumerate().map(spoil).prefetch(8)
