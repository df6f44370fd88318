"""Warn about, or stop, a run whose steps are all skipped, and say why."""

from __future__ import annotations

from typing import Any

from tfscale.callbacks import diagnosis
from tfscale.callbacks.record_reader import RecordReader, is_count
from tfscale.diagnostics.nonfinite import find_nonfinite
from tfscale.optimizer import LossScaleOptimizer
from tfscale.policies import scale_text
from tfscale.record import Record
from tfscale.warnings import warn

ACTIONS = ("warn", "stop", "raise")


class StallGuard(RecordReader):
    """Warns about, or stops, a run whose steps are all skipped, and says why.

    A run is stalled when `patience` steps were skipped in a row, or when overflows continue with
    the scale at its floor, from one read of the record to the next, until there are `patience` of
    them. The message distinguishes

    - data that is not finite,
    - a forward pass that overflows float16,
    - a learning rate that is too high: weights that have grown far too large,

    and a few rarer causes. It names the variables or the layer and says what to do. Without `data`
    it uses only the counters and the weights, which cannot distinguish the first two. If a model
    has several optimizers, each is guarded, and named by the attribute that holds it.

    The guard reads the optimizer's record as rarely as it can: every `patience` batches while all
    is well, and at the end of an epoch.

    Args:
        patience: number of skips in a row that count as a stall, at least 1. A scale that starts at
            2**15 may need 15 skips to find its value.
        action: "warn" warns once for each stall; "stop" warns and ends `fit` after the next batch;
            "raise" raises.
        data: a batch, `(x, y)` or `(x, y, sample_weight)`, on which `tfscale.find_nonfinite`
            searches for the layer in a stall. It also runs once when `fit` begins, so that a batch
            that does not fit the model raises then. Its activations have to fit into memory.
        optimizer: the optimizer to guard, if the model does not hold it as an attribute.

    Raises:
        ValueError: an argument is out of range.
        TypeError: `data` is not a batch; when `fit` begins, the model's optimizer is not tfscale's.
        RuntimeError: in a stall, with action "raise".

    Example:
        >>> import numpy as np, keras, tfscale
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> _ = tfscale.compile(model, "sgd", loss="mse")
        >>> guard = tfscale.StallGuard(patience=2, action="raise")
        >>> x = np.full((8, 3), np.nan)
        >>> try:
        ...     _ = model.fit(x, np.ones((8, 1)), batch_size=2, verbose=0, callbacks=[guard])
        ... except RuntimeError as error:
        ...     print(str(error)[:55])
        No step was applied for 2 steps in a row; loss scale 1.
    """

    def __init__(
        self,
        patience: int = 20,
        action: str = "warn",
        *,
        data: Any = None,
        optimizer: LossScaleOptimizer | None = None,
    ) -> None:
        super().__init__(optimizer, data)
        if not is_count(patience):
            raise ValueError(
                f"`patience` must be a number of steps of at least 1. Received: {patience!r}"
            )
        if action not in ACTIONS:
            raise ValueError(f"`action` must be one of {ACTIONS}. Received: action={action!r}")
        self.patience = int(patience)
        self.action = action

    def _start(self, records: dict[str, Record]) -> float:
        if self.data is not None:
            find_nonfinite(self.model, self.data)
        self._first = self._last = records
        # Counts before the current series of overflows at the floor.
        self._at_floor = {name: record.at_floor for name, record in records.items()}
        self._reported = dict.fromkeys(records, False)
        return self.patience

    def _process(self, records: dict[str, Record]) -> float:
        waits = [self._process_one(name, record) for name, record in records.items()]
        self._last = records
        return min(waits)

    def _process_one(self, name: str, record: Record) -> int:
        # Skips of an earlier `fit` do not count: their cause may have been removed.
        run = min(record.skipped_in_a_row, record.steps - self._first[name].steps)
        if not record.is_at_floor or record.at_floor == self._last[name].at_floor:
            self._at_floor[name] = record.at_floor
        overflows = record.at_floor - self._at_floor[name]
        stalled = max(run, overflows) >= self.patience
        if stalled and not self._reported[name]:
            self._report(name, run, overflows, record)
        self._reported[name] = stalled
        return self.patience if stalled else self.patience - run

    def _report(self, name: str, run: int, overflows: int, record: Record) -> None:
        scale = scale_text(record.scale)
        if run >= self.patience:
            what = f"No step was applied for {run:,} steps in a row; loss scale {scale}."
        else:
            what = f"{overflows:,} overflows with the loss scale at its floor, {scale}."
        why = diagnosis.explain(self.model, self._last[name], record, self.data)
        text = f"{name}{': ' if name else ''}{what} {why}"
        if self.action == "raise":
            raise RuntimeError(text)
        warn(text)
        if self.action == "stop":
            self.model.stop_training = True
