"""What both callbacks share: they read the optimizers' records only when they are due.

They read between two steps, before a batch begins. So the records are exact, and the steps run as
they would without a callback.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfscale.model_optimizers import optimizers_of
from tfscale.optimizer import LossScaleOptimizer
from tfscale.record import Record
from tfscale.reporting import scaling_optimizers

Logs = dict[str, Any] | None


class RecordReader(keras.callbacks.Callback):
    """Reads the records when training begins, when they are due, and at the end of each epoch.

    Args:
        optimizer: the optimizer to read; None for all tfscale optimizers in the model's step.
        data: a batch, `(x, y)` or `(x, y, sample_weight)`, or None.
    """

    _due: float = math.inf  # index of the batch of this epoch before which to read again
    _wait: float = math.inf  # batches until the next read after that at the end of an epoch

    def __init__(self, optimizer: LossScaleOptimizer | None, data: Any) -> None:
        super().__init__()
        if optimizer is not None and not isinstance(optimizer, LossScaleOptimizer):
            raise TypeError(
                "`optimizer` must be a tfscale optimizer, as made by tfscale.wrap, or None to find "
                f"those of the model. Received: optimizer={optimizer!r}"
            )
        several = isinstance(data, tf.data.Dataset | keras.utils.PyDataset | Iterator)
        if several or (isinstance(data, tuple) and not 1 <= len(data) <= 3):
            raise TypeError(
                "`data` must be one batch, `(x, y)` or `(x, y, sample_weight)`, such as "
                f"next(iter(dataset)). Received: {type(data).__name__}"
            )
        self.optimizer = optimizer
        self.data = data

    def on_train_begin(self, logs: Logs = None) -> None:
        """Check the optimizers and read their records."""
        records = self._records()
        if not records:
            raise TypeError(
                f"{type(self).__name__} needs a model that is compiled with a tfscale optimizer: "
                "write tfscale.compile(model, optimizer, ...) or "
                "model.compile(optimizer=tfscale.wrap(optimizer), ...). If the model does not hold "
                f"it, pass `optimizer=`. Received: {optimizers_of(self.model) or None}"
            )
        self._wait = self._start(records)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Set the batch at which the records are due."""
        self._due = self._wait

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Read the records if they are due."""
        if batch >= self._due:
            self._due = batch + self._process(self._records())

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Read the records."""
        self._wait = self._process(self._records())

    def _records(self) -> dict[str, Record]:
        """The records by the optimizers' names; a single optimizer's name is empty."""
        given = self.optimizer
        optimizers = scaling_optimizers(self.model) if given is None else {"": given}
        return {name: optimizer.record() for name, optimizer in optimizers.items()}

    def _start(self, records: dict[str, Record]) -> float:
        """Process the records before the first step; return the batches until the next read."""
        raise NotImplementedError

    def _process(self, records: dict[str, Record]) -> float:
        """Process the records; return the batches until the next read."""
        raise NotImplementedError


def is_count(value: object) -> bool:
    """Whether `value` is a whole number of at least 1."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1
