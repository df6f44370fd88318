"""Callbacks that show what loss scaling does while `fit` runs, and that end a run that stalls.

Both read the optimizer's record only when it is due, and then before a batch begins: between two
steps, so that what they read is exact and the steps in between run as if nobody looked.
"""

from __future__ import annotations

import logging
import math
import numbers
import os
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfscale import culprit, stall, summaries
from tfscale.optimizer import LossScaleOptimizer
from tfscale.policies import scale_text
from tfscale.profiling import profile
from tfscale.ranges import GradientRange, percent
from tfscale.record import Record
from tfscale.warning import warn

logger = logging.getLogger(__name__)

ACTIONS = ("warn", "stop", "raise")


class _Reader(keras.callbacks.Callback):
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


class LossScaleMonitor(_Reader):
    """Shows loss scale, skipped steps and underflow in progress bar, history, log and TensorBoard.

    For `model.compile(tfscale.wrap(optimizer))` as for `tfscale.compile`. At the end of each epoch,
    and every `freq` batches if that is a number, it reads the optimizer's record and puts

    - `loss_scale`, `skipped_steps` (batches left out so far) and, with `data`, `underflow_share`
      into the logs: that is into `history.history`, the progress bar, and all callbacks that come
      after this one in the list (`CSVLogger`, `EarlyStopping`, ...);
    - a line into the log `tfscale.callbacks` of Python's `logging`, at level INFO;
    - with `log_dir`, the scalars `tfscale/loss_scale`, `tfscale/skipped_steps` and
      `tfscale/underflow_share` and the histogram `tfscale/gradient_exponents` into an event file
      for TensorBoard, over the number of steps that the optimizer has seen.

    `underflow_share` is the share of the non-zero gradients, of variables and of activations, that
    float16 turns into zero at the scale in force: 0 where nothing is computed in float16, NaN where
    the gradients are all zero or not finite at any scale. The histogram counts the same gradients,
    the scale divided out, over e for [2**e, 2**(e+1)); float16 loses what is below 2**-25 / scale.

    A callback does not see the batches of `fit`. Share and histogram are therefore those of a batch
    that you give: `tfscale.profile` measures it at each look, at the weights of that moment, which
    costs a few eager passes of the model over that batch and leaves the model as it was. The
    weights are the same, bit for bit, with this callback and without it.

    Args:
        freq: "epoch", or the number of batches between two looks.
        data: a batch to measure gradients on, `(x, y)` or `(x, y, sample_weight)`, of the size that
            is trained with. None measures none.
        log_dir: folder for TensorBoard. None writes nothing.

    Raises:
        ValueError: an argument is out of range.
        TypeError: `data` is no batch; when `fit` begins: the model's optimizer is not tfscale's.

    Example:

    >>> import numpy as np, keras, tfscale
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    >>> model.compile(tfscale.wrap("sgd", "dynamic"), loss="mse")
    >>> x, y = np.ones((8, 3)), np.ones((8, 1))
    >>> monitor = tfscale.LossScaleMonitor(data=(x, y))
    >>> history = model.fit(x, y, verbose=0, callbacks=[monitor])
    >>> history.history["loss_scale"], history.history["underflow_share"]
    ([32768.0], [0.0])

    Source of the histogram: Micikevicius et al., "Mixed Precision Training", ICLR 2018, section
    3.2 (arXiv:1710.03740).
    """

    # What is done at the end of a batch needs no other thread: Keras may call it from one.
    async_safe = True

    def __init__(self, freq: int | str = "epoch", *, data: Any = None, log_dir: Any = None):
        super().__init__()
        if freq != "epoch" and not _is_count(freq):
            raise ValueError(
                '`freq` must be "epoch" or a number of batches of at least 1. Received: '
                f"freq={freq!r}"
            )
        if log_dir is not None and not isinstance(log_dir, str | os.PathLike):
            raise ValueError(
                f"`log_dir` must be the path of a folder, or None. Received: log_dir={log_dir!r}"
            )
        _check_batch(data)
        self.freq = freq
        self.data = data
        self.log_dir = log_dir
        self._values: dict[str, float] = {}
        self._writer: Any = None

    def _begin(self, record: Record) -> float:
        if self.log_dir is not None:
            self._writer = tf.summary.create_file_writer(os.fspath(self.log_dir))
        # Looked at now as well: a `data` that cannot be measured shall not raise in the middle.
        return self._look(record)

    def _look(self, record: Record) -> float:
        values = {"loss_scale": record.scale, "skipped_steps": float(record.skipped)}
        gradients = None
        if self.data is not None:
            values["underflow_share"], gradients = self._measure(record.scale)
        self._values = values
        share = values.get("underflow_share")
        logger.info(
            "step %d: loss scale %s, %d skipped%s",
            record.steps,
            scale_text(record.scale),
            record.skipped,
            "" if share is None else f", {percent(share)} of the gradients underflow",
        )
        if self._writer is not None:
            scalars = {f"tfscale/{name}": value for name, value in values.items()}
            histogram = gradients.histogram() if gradients else {}
            histograms = {"tfscale/gradient_exponents": histogram}
            summaries.write(self._writer, record.steps, scalars, histograms)
        return math.inf if self.freq == "epoch" else int(self.freq)

    def _measure(self, scale: float) -> tuple[float, GradientRange | None]:
        """The share of `data`'s gradients that float16 loses at this scale, and their range."""
        try:
            found = profile(self.model, iter([self.data]), steps=1)
        except ValueError:
            # No gradients to measure, or a model and data that do not fit together?
            if culprit.find_nonfinite(self.model, self.data).clean:
                raise
            return math.nan, None
        if not found.total.nonzero:
            return math.nan, found.total
        return found.total.lost(scale) if found.compute_dtype == "float16" else 0.0, found.total

    def on_train_batch_end(self, batch, logs=None):
        if self.freq != "epoch":
            self._show(logs)

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        self._show(logs)

    def on_train_end(self, logs=None):
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _show(self, logs) -> None:
        # The logs of tfscale.compile hold the figures of this very step already.
        for name, value in self._values.items() if logs is not None else ():
            logs.setdefault(name, value)


class StallGuard(_Reader):
    """Ends the silence of a run in which no step is applied any more, and says why.

    A run is stalled when `patience` steps were skipped in a row, or when overflows with the scale
    at its floor go on, look after look, until there are `patience` of them. The message tells apart

    - data that is not finite,
    - a forward pass that overflows float16,
    - a learning rate that is too high: weights that have grown beyond measure,

    and a few rarer causes, names the variables or the layer, and says what to do. Without `data` it
    rests on the counters and the weights alone, which cannot tell the first two apart.

    The optimizer's record is read when the run could be stalled at the earliest: every `patience`
    batches while all is well, and at the end of an epoch. Nothing is read in between.

    Args:
        patience: steps skipped in a row that are tolerated, at least 1. A scale that starts at
            2**15 may need 15 skips to find its place.
        action: "warn" warns once for each stall; "stop" warns and ends `fit` after the next batch;
            "raise" raises.
        data: a batch, `(x, y)` or `(x, y, sample_weight)`, on which `tfscale.find_nonfinite` looks
            for the layer in a stall; also run once when `fit` begins, so that one that does not
            fit the model raises then. Its activations have to fit into memory.

    Raises:
        ValueError: an argument is out of range.
        TypeError: `data` is no batch; when `fit` begins: the model's optimizer is not tfscale's.
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

    def __init__(self, patience: int = 20, action: str = "warn", *, data: Any = None):
        super().__init__()
        if not _is_count(patience):
            raise ValueError(
                f"`patience` must be a number of steps of at least 1. Received: {patience!r}"
            )
        if action not in ACTIONS:
            raise ValueError(f"`action` must be one of {ACTIONS}. Received: action={action!r}")
        _check_batch(data)
        self.patience = int(patience)
        self.action = action
        self.data = data

    def _begin(self, record: Record) -> float:
        if self.data is not None:
            culprit.find_nonfinite(self.model, self.data)
        self._first = self._last = record
        self._at_floor = record.at_floor  # at the last look that found none of a series
        self._told = False
        self._largest = stall.largest_weight(self.model)
        return self.patience

    def _look(self, record: Record) -> float:
        # Skips of an earlier `fit` are not counted: their cause may have been mended.
        run = min(record.skipped_in_a_row, record.steps - self._first.steps)
        if not record.is_at_floor or record.at_floor == self._last.at_floor:
            self._at_floor = record.at_floor
        overflows = record.at_floor - self._at_floor
        stalled = max(run, overflows) >= self.patience
        if stalled and not self._told:
            self._act(run, overflows, record)
        self._told, self._last = stalled, record
        return self.patience if stalled else self.patience - run

    def _act(self, run: int, overflows: int, record: Record) -> None:
        scale = scale_text(record.scale)
        if run >= self.patience:
            what = f"No step was applied for {run:,} steps in a row; loss scale {scale}."
        else:
            what = f"{overflows:,} overflows with the loss scale at its floor, {scale}."
        why = stall.explain(self.model, self._largest, self._last, record, self.data)
        text = f"{what} {why}"
        if self.action == "raise":
            raise RuntimeError(text)
        warn(text)
        if self.action == "stop":
            self.model.stop_training = True


def _is_count(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1


def _check_batch(data: Any) -> None:
    several = isinstance(data, tf.data.Dataset | keras.utils.PyDataset | Iterator)
    if several or (isinstance(data, tuple) and not 1 <= len(data) <= 3):
        raise TypeError(
            "`data` must be one batch, `(x, y)` or `(x, y, sample_weight)`, such as "
            f"next(iter(dataset)). Received: {type(data).__name__}"
        )
