"""Show what loss scaling does while `fit` runs."""

from __future__ import annotations

import logging
import math
import os
from typing import Any

import tensorflow as tf

from tfscale.callbacks import tensorboard
from tfscale.callbacks.record_reader import Logs, RecordReader, is_count
from tfscale.diagnostics.nonfinite import find_nonfinite
from tfscale.diagnostics.profiling import profile
from tfscale.diagnostics.ranges import GradientRange, percent
from tfscale.optimizer import LossScaleOptimizer
from tfscale.policies import scale_text
from tfscale.record import Record

logger = logging.getLogger("tfscale.callbacks")  # the documented name


class LossScaleMonitor(RecordReader):
    """Shows loss scale, skipped steps and underflow in progress bar, history, log and TensorBoard.

    It works with `model.compile(tfscale.wrap(optimizer))` and with `tfscale.compile`. At the end of
    each epoch, and every `freq` batches if `freq` is a number, it reads the optimizer's record and
    writes

    - `loss_scale`, `skipped_steps` (batches skipped so far) and, with `data`, `underflow_share`
      into the logs: into `history.history`, the progress bar, and all callbacks that follow this
      one in the list (`CSVLogger`, `EarlyStopping`, ...);
    - a line into the log `tfscale.callbacks` of Python's `logging`, at level INFO;
    - with `log_dir`, the scalars `tfscale/loss_scale`, `tfscale/skipped_steps` and
      `tfscale/underflow_share` and the histogram `tfscale/gradient_exponents` into an event file
      for TensorBoard, over the number of steps that the optimizer has seen.

    If a model has several optimizers, each has its own figures, named by the attribute that holds
    it: `d_optimizer_loss_scale`, `d_optimizer_skipped_steps`.

    `underflow_share` is the share of the non-zero gradients, of variables and of activations, that
    float16 turns into zero at the current loss scale (the smallest of several). It is 0 if nothing
    is computed in float16, and NaN if the gradients are all zero or not finite at any scale. The
    histogram counts the same gradients, divided by the scale, over e for `[2**e, 2**(e+1))`;
    float16 loses what is below `2**-25 / scale`.

    A callback does not see the batches of `fit`. So you pass a batch for share and histogram, and
    `tfscale.profile` measures it with the current weights at each read. That costs a few eager
    passes and leaves the model as it was, so the callback never changes a weight.

    Args:
        freq: "epoch", or the number of batches between two reads of the record.
        data: a batch to measure gradients on, `(x, y)` or `(x, y, sample_weight)`, of the size of
            the training batches. None measures no gradients.
        log_dir: folder for TensorBoard. None writes no files.
        optimizer: the optimizer to show, if the model does not hold it as an attribute.

    Raises:
        ValueError: an argument is out of range.
        TypeError: `data` is not a batch; when `fit` begins, the model's optimizer is not tfscale's.

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

    # Keras may call the end of a batch from another thread, and this callback allows it.
    async_safe = True

    def __init__(
        self,
        freq: int | str = "epoch",
        *,
        data: Any = None,
        log_dir: str | os.PathLike[str] | None = None,
        optimizer: LossScaleOptimizer | None = None,
    ) -> None:
        super().__init__(optimizer, data)
        if freq != "epoch" and not is_count(freq):
            raise ValueError(
                '`freq` must be "epoch" or a number of batches of at least 1. Received: '
                f"freq={freq!r}"
            )
        if log_dir is not None and not isinstance(log_dir, str | os.PathLike):
            raise ValueError(
                f"`log_dir` must be the path of a folder, or None. Received: log_dir={log_dir!r}"
            )
        self.freq = freq
        self.log_dir = log_dir
        self._values: dict[str, float] = {}
        self._writer: tf.summary.SummaryWriter | None = None

    def _start(self, records: dict[str, Record]) -> float:
        if self.log_dir is not None:
            self._writer = tf.summary.create_file_writer(os.fspath(self.log_dir))
        # If `data` cannot be measured, this raises now, not in the middle of the training.
        return self._process(records)

    def _process(self, records: dict[str, Record]) -> float:
        self._values = {}
        for name, record in records.items():
            prefix = f"{name}_" if name else ""
            self._values[f"{prefix}loss_scale"] = record.scale
            self._values[f"{prefix}skipped_steps"] = float(record.skipped)
        text, gradients = "", None
        if self.data is not None:
            share, gradients = self._measure(min(record.scale for record in records.values()))
            self._values["underflow_share"] = share
            text = f", {percent(share)} of the gradients underflow"
        figures = "; ".join(
            f"{name}{': ' if name else ''}loss scale {scale_text(r.scale)}, {r.skipped} skipped"
            for name, r in records.items()
        )
        step = max(record.steps for record in records.values())
        logger.info("step %d: %s%s", step, figures, text)
        if self._writer is not None:
            scalars = {f"tfscale/{name}": value for name, value in self._values.items()}
            histogram = gradients.histogram() if gradients else {}
            tensorboard.write(
                self._writer, step, scalars, {"tfscale/gradient_exponents": histogram}
            )
        return math.inf if self.freq == "epoch" else int(self.freq)

    def _measure(self, scale: float) -> tuple[float, GradientRange | None]:
        """The share of `data`'s gradients that float16 loses at this scale, and their range."""
        try:
            profiled = profile(self.model, iter([self.data]), steps=1)
        except ValueError:
            # If everything is finite, `data` does not fit the model.
            if find_nonfinite(self.model, self.data).clean:
                raise
            return math.nan, None
        total = profiled.total
        if not total.nonzero:
            return math.nan, total
        return total.lost(scale) if profiled.compute_dtype == "float16" else 0.0, total

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Add the figures to the logs of the batch."""
        if self.freq != "epoch":
            self._add_to(logs)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Read the record and add the figures to the logs of the epoch."""
        super().on_epoch_end(epoch, logs)
        self._add_to(logs)

    def on_train_end(self, logs: Logs = None) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add_to(self, logs: Logs) -> None:
        # The logs of tfscale.compile already hold the figures of this step.
        if logs is not None:
            logs.update({**self._values, **logs})
