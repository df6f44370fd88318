"""What both callbacks share: they read the optimizer's record only when it is due.

They read it between two steps, before a batch begins. So what they read is exact, and the steps in
between run as they would without a callback.
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

Logs = dict[str, Any] | None


class RecordReader(keras.callbacks.Callback):
    """Reads the record when training begins, when it is due, and at the end of each epoch."""

    _due: float = math.inf  # index of the batch of this epoch before which to read again
    _wait: float = math.inf  # batches until the next read after that at the end of an epoch

    def on_train_begin(self, logs: Logs = None) -> None:
        """Check the optimizer and read its record."""
        optimizer = getattr(self.model, "optimizer", None)
        if not isinstance(optimizer, LossScaleOptimizer):
            raise TypeError(
                f"{type(self).__name__} needs a model that is compiled with a tfscale optimizer: "
                "write tfscale.compile(model, optimizer, ...) or "
                "model.compile(optimizer=tfscale.wrap(optimizer), ...). Received: optimizer="
                f"{optimizer!r}"
            )
        self._wait = self._start(optimizer.record())

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Set the batch at which the record is due."""
        self._due = self._wait

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Read the record if it is due."""
        if batch >= self._due:
            self._due = batch + self._process(self.model.optimizer.record())

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Read the record."""
        self._wait = self._process(self.model.optimizer.record())

    def _start(self, record: Record) -> float:
        """Process the record before the first step; return the batches until the next one."""
        raise NotImplementedError

    def _process(self, record: Record) -> float:
        """Process a record; return the batches until the next one."""
        raise NotImplementedError


def is_count(value: object) -> bool:
    """Whether `value` is a whole number of at least 1."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1


def check_batch(data: Any) -> None:
    """Raise a TypeError if `data` holds several batches, or is a tuple of a wrong length."""
    several = isinstance(data, tf.data.Dataset | keras.utils.PyDataset | Iterator)
    if several or (isinstance(data, tuple) and not 1 <= len(data) <= 3):
        raise TypeError(
            "`data` must be one batch, `(x, y)` or `(x, y, sample_weight)`, such as "
            f"next(iter(dataset)). Received: {type(data).__name__}"
        )
