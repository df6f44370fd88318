"""What both callbacks share: they read the optimizer's record only when it is due.

They read it before a batch begins: between two steps, so that what they read is exact and the steps
in between run as if nobody looked.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfscale.optimizer import LossScaleOptimizer
from tfscale.record import Record


class RecordReader(keras.callbacks.Callback):
    """Reads the record at the begin, when it is due, and at the end of each epoch."""

    _due: float = math.inf  # index of the batch of this epoch before which to look again
    _wait: float = math.inf  # batches until the look after that of the end of an epoch

    def on_train_begin(self, logs=None):
        optimizer = getattr(self.model, "optimizer", None)
        if not isinstance(optimizer, LossScaleOptimizer):
            raise TypeError(
                f"{type(self).__name__} needs a model that is compiled with a tfscale optimizer: "
                "write tfscale.compile(model, optimizer, ...) or "
                "model.compile(optimizer=tfscale.wrap(optimizer), ...). Received: optimizer="
                f"{optimizer!r}"
            )
        self._wait = self._begin(optimizer.record())

    def on_epoch_begin(self, epoch, logs=None):
        self._due = self._wait

    def on_train_batch_begin(self, batch, logs=None):
        if batch >= self._due:
            self._due = batch + self._look(self.model.optimizer.record())

    def on_epoch_end(self, epoch, logs=None):
        self._wait = self._look(self.model.optimizer.record())

    def _begin(self, record: Record) -> float:
        """Takes the record before the first step; returns the batches to wait for the next one."""
        raise NotImplementedError

    def _look(self, record: Record) -> float:
        """Takes a record; returns the batches to wait for the next one."""
        raise NotImplementedError


def is_count(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1


def check_batch(data: Any) -> None:
    several = isinstance(data, tf.data.Dataset | keras.utils.PyDataset | Iterator)
    if several or (isinstance(data, tuple) and not 1 <= len(data) <= 3):
        raise TypeError(
            "`data` must be one batch, `(x, y)` or `(x, y, sample_weight)`, such as "
            f"next(iter(dataset)). Received: {type(data).__name__}"
        )
