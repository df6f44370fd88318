"""Counts an optimizer's applied and skipped steps, and reports them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale import _compat, counters
from tfscale.model_optimizers import optimizers_of
from tfscale.record import Record
from tfscale.scaling import Scaling
from tfscale.skips import REPLACE_STATE, Skips
from tfscale.warnings import warn

logger = logging.getLogger("tfscale")

# A weight that grew by more than this factor, from at least 1, did not grow normally.
GROWN = 10.0
# `fit` checks for a stall after this many steps and at the end of each epoch, until a step is
# applied.
FIRST_LOOK = 50


class Reports:
    """The counters of one optimizer, and what follows from them.

    Args:
        add_variable: the method of the optimizer, which owns the variables that are made here.
        scaling: the loss scale of the optimizer.
    """

    def __init__(self, add_variable: Callable[..., Any], scaling: Scaling) -> None:
        self._scaling = scaling
        self._counters = add_variable((counters.SIZE,), "zeros", "int64", name="counters")
        self._variables: list[Any] = []
        # For each of them, the skipped steps in which its gradient was not finite.
        self._nonfinite: Any = None
        self._nonfinite_losses: Any = None
        self._warned: Record | None = None  # at the last call of `warn_skips`
        self._may_stall = True  # since then no step is known to be applied
        self._warned_of_stall = False
        self._largest_at_first = 0.0

    def build(self, variables: list[Any], add_variable: Callable[..., Any]) -> None:
        """Creates the counters for each trainable variable."""
        self._variables = variables
        self._nonfinite = add_variable((len(variables),), "zeros", "int64", name="nonfinite")
        self._nonfinite_losses = add_variable((), "zeros", "int64", name="nonfinite_losses")
        self._largest_at_first = _largest_weight(variables)[1]

    def copy_from(self, other: Reports) -> None:
        """Takes the counts of `other`; both are built, or `other` is not."""
        self._counters.assign(other._counters)
        self._warned = other._warned
        if other._nonfinite is not None:
            self._nonfinite.assign(other._nonfinite)
            self._nonfinite_losses.assign(other._nonfinite_losses)

    # What a step calls.

    def count_step(
        self, *, is_counted: Any, finite: Any, applied: Any, loss_finite: Any, **scale: Any
    ) -> None:
        """Counts a step, unless `is_counted`: `unscale` has counted its overflow already.

        For the other arguments see `counters.advance`.
        """
        _compat.add_to_fit(self, _FitWatch)
        before = tf.convert_to_tensor(self._counters)
        flags = {"finite": finite, "applied": applied, "loss_finite": loss_finite}
        after = counters.advance(before, **flags, **scale)
        skip = tf.logical_and(is_counted, tf.logical_not(finite))
        self._counters.assign(tf.where(skip, before, after))
        if self._nonfinite_losses is None:
            return  # `unscale` before the first update, which counts skips only
        bad_loss = tf.logical_and(applied, tf.logical_not(loss_finite))
        self._nonfinite_losses.assign_add(tf.cast(bad_loss, tf.int64))

    def count_applied(self) -> None:
        """Counts a step that was applied and does not change the scale."""
        self._counters.assign_add(counters.APPLIED)

    def count_nonfinite(self, mask: Any, variables: Sequence[Any]) -> None:
        """Counts the variables of a skipped step whose gradients were not finite.

        Args:
            mask: bool tensor of shape `[len(variables)]`, True where the gradient is not finite.
            variables: list of variables.
        """
        place = {id(v): i for i, v in enumerate(variables)}
        order = [place.get(id(v), len(variables)) for v in self._variables]
        if order != list(range(len(variables))):
            mask = tf.gather(tf.concat([mask, [False]], 0), order)
        self._nonfinite.assign_add(tf.cast(mask, tf.int64))

    def count_retry(self) -> None:
        """Counts that the batch of the skipped step runs again, and so is not skipped."""
        self._counters.assign_add(counters.RETRY)

    # What is read out.

    def skipped_steps(self) -> Any:
        """Scalar int64 tensor: see `LossScaleOptimizer.skipped_steps`."""
        self.warn_if_stalled()
        return counters.skipped(tf.convert_to_tensor(self._counters))

    def never_scaled(self, good_steps: int) -> bool:
        """Whether steps were applied, but none that moved or counted towards a loss scale."""
        now = self._counters.numpy()
        applied = counters.batches(now) > counters.skipped(now)
        moved = now[counters.GROWTHS] or now[counters.BACKOFFS]
        return bool(applied and not (moved or good_steps))

    def record(self) -> Record:
        """See `LossScaleOptimizer.record`."""
        self.warn_if_stalled()
        record = self._record()
        return dataclasses.replace(record, grown=self._with_cause(record.skips()).grown)

    def _record(self) -> Record:
        times = [] if self._nonfinite is None else self._nonfinite.numpy()
        paths = [getattr(v, "path", v.name) for v in self._variables]
        return Record.of(
            self._counters.numpy(),
            nonfinite=zip(paths, times, strict=True),
            nonfinite_losses=int(self._nonfinite_losses.numpy()) if self._variables else 0,
            **self._scaling.facts(),
        )

    def grown(self) -> str:
        """The weight that has grown far too large since the first step; empty if there is none."""
        path, now = _largest_weight(self._variables)
        if not GROWN * max(self._largest_at_first, 1.0) < now < np.inf:
            return ""
        return (
            f"the largest weight, in {path}, is {now:.3g} and no weight was larger than "
            f"{self._largest_at_first:.3g} before the first step"
        )

    def _with_cause(self, skips: Skips) -> Skips:
        # Reading all weights takes time: only where something is wrong.
        wrong = skips.in_a_row > 1 and skips.what_is_wrong()
        return dataclasses.replace(skips, grown=self.grown()) if wrong else skips

    def ignore_earlier_skips(self) -> None:
        """Makes `warn_skips` ignore what was counted until now."""
        self._warned = self._record()
        self._may_stall, self._warned_of_stall = True, False

    def warn_if_stalled(self, name: str = "", epoch_ends: bool = False) -> None:
        """Warns once if every step since the last `warn_skips` was skipped and the next will be.

        It works only in eager code. It waits for the device until a step was applied.

        Args:
            name: of the optimizer, if there are several.
            epoch_ends: whether an epoch has ended; otherwise it takes more skips.
        """
        if not self._may_stall or not tf.executing_eagerly():
            return
        skips = self._record().skips(self._warned)
        self._may_stall = skips.skips == skips.steps
        if self._may_stall and skips.is_stall(epoch_ends):
            self._may_stall, self._warned_of_stall = False, True
            warn(self._with_cause(skips).advice(name))

    def warn_skips(self, name: str = "") -> None:
        """Warns about the steps skipped since the last call, and about state that is not finite.

        If the skips are normal, the log `tfscale` has a line at level INFO instead.

        Args:
            name: of the optimizer, if there are several.
        """
        skips, was_warned = self._record().skips(self._warned), self._warned_of_stall
        self.ignore_earlier_skips()
        if skips.steps <= 0 or skips.skips <= 0:
            return
        skips = self._with_cause(skips)
        if skips.what_is_wrong() is None:
            logger.info(skips.advice(name))
        elif not (was_warned and skips.skips == skips.steps):
            warn(skips.advice(name))
        paths = _nonfinite_state_paths(self._variables)
        if paths:
            warn(
                f"Not finite after skipped steps: {', '.join(paths)}. So evaluate() and predict() "
                f"will not be finite either. {REPLACE_STATE}"
            )


def scaling_optimizers(model: keras.Model) -> dict[str, Any]:
    """The tfscale optimizers that a model's step uses, by name; a single one has an empty name."""
    optimizers = optimizers_of(model).items()
    found = {n: o for n, o in optimizers if isinstance(getattr(o, "reports", None), Reports)}
    return found if len(found) > 1 else dict(zip([""], found.values(), strict=False))


class _FitWatch(keras.callbacks.Callback):
    """Warns while `fit` runs if every step is skipped, and about skips when it ends."""

    def __init__(self, watched: Reports) -> None:
        super().__init__()
        self.watched = watched
        self._looked = False

    # Not at its end, which another thread may signal.
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch >= FIRST_LOOK and not self._looked:
            self._looked = True
            self.watched.warn_if_stalled(self._name())

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.watched.warn_if_stalled(self._name(), epoch_ends=True)

    def on_train_end(self, logs: Any = None) -> None:
        self.watched.warn_skips(self._name())

    def _name(self) -> str:
        optimizers = scaling_optimizers(self.model).items()
        return next((name for name, o in optimizers if o.reports is self.watched), "")


def _largest_weight(variables: Iterable[Any]) -> tuple[str, float]:
    """Path and magnitude of the largest of floating `variables`, with one read from the device."""
    weights = [v for v in variables if tf.as_dtype(v.dtype).is_floating]
    if not weights:
        return "", 0.0
    tensors = [tf.convert_to_tensor(v) for v in weights]
    # `abs` would copy every table.
    extremes = [tf.maximum(tf.reduce_max(t), -tf.reduce_min(t)) for t in tensors]
    magnitudes = tf.stack([tf.cast(e, tf.float32) for e in extremes]).numpy()
    i = int(np.argmax(magnitudes))
    return getattr(weights[i], "path", weights[i].name), float(magnitudes[i])


def nonfinite_paths(variables: Iterable[Any]) -> list[str]:
    """Paths of those floating `variables` that hold an infinity or a NaN, on any replica."""

    def is_finite(variable: Any) -> bool:
        # Statistics of BatchNorm differ: each replica sees its own part of the batch.
        copies = getattr(_compat.tf_variable(variable), "values", [variable])
        tensors = map(tf.convert_to_tensor, copies)
        return all(bool(tf.reduce_all(tf.math.is_finite(t))) for t in tensors)

    floating = [v for v in variables if tf.as_dtype(v.dtype).is_floating]
    return [v.path for v in floating if not is_finite(v)]


def _nonfinite_state_paths(variables: Iterable[Any]) -> list[str]:
    """Sorted paths of non-finite state that an optimizer of `variables` does not guard.

    That is untrained floating variables, such as the moving statistics of BatchNorm, in the layers
    and models that own `variables`.
    """
    wanted = {id(_compat.tf_variable(v)) for v in variables}
    state: dict[int, Any] = {}
    for layer in _compat.live_layers():
        own = _compat.own_variables(layer, deep=True)
        if any(id(_compat.tf_variable(v)) in wanted for v in own):
            state.update({id(v): v for v in _compat.state_variables(layer)})
    return sorted(nonfinite_paths(state.values()))
