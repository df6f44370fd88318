"""State that `scale_loss` and `unscale` pass to the update.

The gradients alone decide whether a step is applied. This state only says what each gradient must
still be divided by, and whether an overflow may lower the scale:

`scale`: what the last loss was multiplied by, -1 if it was not scaled.
    Written by `scale_loss`. Read by `unscale` and the update, for gradients of another function.
    Never cleared. Never stale: gradients of another function come from the last loss.
`unscaled`: the number of gradients that were unscaled and not applied yet.
    Written by `unscale`. Read by the update, for gradients of another function. Cleared by
    `scale_loss` and the update. Never stale, because each loss clears it.
`waiting`: the number of gradients that were unscaled since the last update.
    Written by `unscale`. Read by the update, for gradients of another function. Cleared by the
    update, and by a loss that contains such gradients. If another loss came after them, gradients
    of another function may be scaled or unscaled, and the update raises.
`losses`: the sum of the losses, which is not finite if one of them is not.
    Written by `scale_loss`. Read on an overflow, and for the record. Cleared by the update, and by
    `unscale` with an overflow. If it is stale, one overflow does not lower the scale.
`overflow`: `unscale` found an overflow and lowered the scale.
    Written by `unscale`. Read by the update, on an overflow, and cleared by it. If it is stale, one
    overflow is not counted.

Loss and update may be in one `tf.function`, in two, or in eager code, on one device or on replicas,
each of which has its own variables. Within one function, its branches and its loops, the graph
itself shows what each gradient is computed from, so no variable is read. A nested `tf.function` is
another function, because it may be called again with other tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfscale import _compat, eager_log, gradients, misuse, trace_log
from tfscale.carried import Carried, all_unscaled, bypassed, seen_in_graph
from tfscale.scaling import Scaling
from tfscale.trace_log import ScaledLoss
from tfscale.warnings import warn

_NO_SCALE = -1.0


class Handoff(tf.Module):
    """See the module. One for each optimizer."""

    def __init__(self) -> None:
        super().__init__(name="handoff")
        # Not while a function is traced: TensorFlow would trace it a second time.
        self._scale = _variable(_NO_SCALE, tf.float32, "scale")
        # int64, because TensorFlow keeps int32 variables on the host.
        self._unscaled = _variable(0, tf.int64, "unscaled")
        self._waiting = _variable(0, tf.int64, "waiting")
        self._losses = _variable(0.0, tf.float32, "losses")
        self._overflow = _variable(False, tf.bool, "overflow")
        self.has_loss = False  # `scale_loss` was called
        self._loss_was_scaled = False  # by a scale, not returned unchanged
        self.unscale_was_called = False
        self._log = eager_log.EagerLog()
        self._has_warned = False
        self._before_clipping: Any = None  # in eager code
        self._overflow_sum: Any = None  # of the gradients of an overflow, in eager code

    # Called by `scale_loss` and `unscale`.

    def common_scale(self, scale: Any) -> Any:
        """The scale for another loss of a step: `scale`, or if that is None, that of the first.

        Raises:
            ValueError: an earlier loss of the step was not scaled, but this one needs it.
        """
        earlier = [scaled.scale for scaled in self._scaled_here() if not scaled.applied]
        if scale is None:
            return earlier[0] if earlier else None
        if any(other is None for other in earlier):
            raise ValueError(misuse.SCALED_UNLIKE)
        return scale

    def loss_scaled(self, losses: list[Any], scaled: list[Any], scale: Any) -> None:
        """Records a loss.

        Args:
            losses: list of tensors, before scaling.
            scaled: list of tensors, multiplied by `scale`.
            scale: scalar float32 tensor, or None for losses that need no scaling.
        """
        if tf.executing_eagerly():
            contains_gradients = self.unscale_was_called  # unknown: it may contain some
            # Only if the same tape records both, so not for a loss of the next step.
            found = self._overflow_sum
            contains_overflow = found is not None and _compat.is_recorded(found)
            if scale is not None:
                self._log.loss_scaled(scaled)
        else:
            contains_gradients = trace_log.current().loss_scaled(self, losses, scale)
            contains_overflow = contains_gradients
        self.has_loss = True
        self._loss_was_scaled |= scale is not None
        parts = [_as_float32(loss) for loss in losses]
        total = parts[0] if len(parts) == 1 else tf.add_n(parts)
        if contains_overflow:
            # `unscale` has counted this as an overflow; the loss is not its cause.
            total = tf.where(self._overflow.read_value(), 0.0, total)
        if contains_gradients:
            self._waiting.assign(0)
        self._losses.assign_add(total)
        self._scale.assign(_NO_SCALE if scale is None else scale)
        self._unscaled.assign(0)

    def gradients_unscaled(self, given: list[Any], returned: list[Any], check: Any) -> None:
        """Records what `unscale` returned.

        Args:
            given: list of gradients and None.
            returned: list of the unscaled gradients, as long as `given`.
            check: `gradients.FiniteCheck` of `given`, or None if they were not checked.
        """
        pairs = [(a, b) for a, b in zip(given, returned, strict=True) if a is not None]
        seen = None if check is None else (check, len(given))
        if not tf.executing_eagerly():
            trace_log.current().unscaled(self, pairs, seen)
        else:
            if pairs:
                self._log.unscaled(pairs)
            # If they are finite, the check is not needed, and it would keep them in memory.
            self._before_clipping = None if check is None or check.finite else seen
            if self._before_clipping:
                sums = [_as_float32(gradients.values(b)) for _, b in pairs]
                self._overflow_sum = tf.add_n(sums)  # a scalar that the same tapes record
        self.unscale_was_called = True
        self._unscaled.assign_add(len(pairs))
        self._waiting.assign_add(len(pairs))

    def overflow_is_new(self) -> Any:
        """Scalar bool tensor: no overflow was counted yet for the loss of the current gradients.

        Call it before `gradients_unscaled`.
        """
        return (self._unscaled.read_value() <= 0) | ~self._overflow.read_value()

    def overflow_counted(self, now: Any) -> None:
        """Records that an overflow was counted, where the scalar bool tensor `now` is True."""
        self._overflow.assign(tf.logical_or(self._overflow.read_value(), now))
        # A non-finite loss explains this overflow, but not the next one.
        self._losses.assign(tf.where(now, 0.0, self._losses.read_value()))

    # Called by the update.

    def loss_finite(self) -> Any:
        """Scalar bool tensor: every loss since the last update was finite."""
        return tf.math.is_finite(self._losses.read_value())

    def is_counted(self, carried: Carried) -> Any:
        """Scalar bool tensor: `unscale` has counted the overflow of these gradients."""
        return self._overflow.read_value() if self._may_be_counted(carried) else tf.constant(False)

    def reset(self, carried: Carried) -> None:
        """Clears the state after an update."""
        self._losses.assign(0.0)
        if self._may_be_counted(carried):
            self._overflow.assign(False)
            self._waiting.assign(0)

    def _may_be_counted(self, carried: Carried) -> bool:
        return self.unscale_was_called or carried.from_elsewhere

    def applied(self, taken: Any) -> None:
        """Records how many of the unscaled gradients are applied now."""
        if not (isinstance(taken, int) and taken == 0):
            self._unscaled.assign(tf.maximum(self._unscaled.read_value() - taken, 0))
        for scaled in self._scaled_here():
            scaled.applied = True

    def before_clipping(self) -> Any:
        """The `FiniteCheck` of `unscale` and its number of gradients, or None."""
        if not tf.executing_eagerly():
            return trace_log.current().take_before_clipping(self)
        found, self._before_clipping = self._before_clipping, None
        return found

    def carried(
        self,
        grads: list[Any],
        scaling: Scaling,
        *,
        assume_scaled: bool,
        unscaled: bool | None = None,
        to_unscale: bool = False,
    ) -> Carried:
        """What gradients were multiplied by, and which of them are still scaled.

        Args:
            grads: list of gradients and None.
            scaling: the loss scale of the optimizer.
            assume_scaled: whether gradients count as scaled if `scale_loss` was not called.
            unscaled: as in `LossScaleOptimizer.apply_gradients`.
            to_unscale: whether they are for `unscale`, which takes only scaled gradients.

        Raises:
            ValueError: it is unknown which of them are unscaled.
        """
        eager = tf.executing_eagerly()
        if eager:
            may_be_scaled = self._loss_was_scaled or assume_scaled
        else:
            here = self._scaled_here()
            may_be_scaled = not here or any(scaled.scale is not None for scaled in here)
        if not (scaling.policy.is_scaling and may_be_scaled):
            return Carried([None] * len(grads), scale=None, was_scaled=False, taken=0)

        def last_scale() -> tuple[Any, Any]:
            # 1 if the last loss was not scaled; and whether it was scaled.
            scale = self._scale.read_value()
            was_scaled = scale > 0
            if assume_scaled:
                return tf.where(was_scaled, scale, scaling.current()), True
            return tf.abs(scale), bool(was_scaled) if eager else was_scaled

        if not eager:
            return self._carried_in_graph(grads, last_scale, unscaled, to_unscale)
        scale, was_scaled = last_scale()
        present = [g for g in grads if g is not None]
        if to_unscale and any(map(eager_log.is_unscaled, present)):
            raise ValueError(misuse.TWICE_UNSCALED)
        are_unscaled = [bool(unscaled)] * len(present)
        if unscaled is None and not to_unscale:
            pending = int(self._unscaled.read_value()) if self.unscale_was_called else 0
            are_unscaled = self._log.are_unscaled(present, pending)
        found = iter(are_unscaled)
        divisors = [None if g is None or next(found) else scale for g in grads]
        return Carried(divisors, scale, was_scaled, sum(are_unscaled))

    def _carried_in_graph(
        self,
        grads: list[Any],
        last_scale: Callable[[], tuple[Any, Any]],
        unscaled: bool | None,
        to_unscale: bool,
    ) -> Carried:
        divisors, elsewhere, taken = seen_in_graph(
            self, grads, unscaled=unscaled, to_unscale=to_unscale
        )
        here = self._scaled_here()
        if here and not elsewhere:
            return Carried(divisors, here[-1].scale, True, taken)
        scale, was_scaled = last_scale()
        was_scaled = bool(here) or was_scaled
        if not elsewhere:
            return Carried(divisors, scale, was_scaled, taken)
        if bypassed(self, grads):
            self.warn_once(misuse.BYPASSED)
        checks: list[Any] = []
        is_known = None
        divisor = scale
        if unscaled is None and not to_unscale:
            left = self._unscaled.read_value() - taken
            count = tf.constant(len(elsewhere), tf.int64)
            are_unscaled = left >= count
            divisor = tf.where(are_unscaled, 1.0, scale)
            # `waiting` also counts those unscaled before the last loss: a variable may hold them.
            are_scaled = tf.logical_and(left <= 0, self._waiting.read_value() <= taken)
            fit = tf.logical_or(are_scaled, are_unscaled)
            # XLA cannot raise, and an Assert costs time, so the step is skipped instead.
            if _compat.in_xla_context() or not self.unscale_was_called:
                is_known = fit
            else:
                checks.append(tf.debugging.Assert(fit, [misuse.AMBIGUOUS, left]))
            taken += tf.where(are_unscaled, count, tf.zeros_like(count))
        for place in elsewhere:
            divisors[place] = divisor
        return Carried(divisors, scale, was_scaled, taken, checks, is_known, True)

    # Warnings of misuse: at most one for each optimizer.

    def lacks_loss(self, grads: list[Any]) -> bool:
        """Whether apparently no loss was scaled for these gradients."""
        if self.has_loss or self._has_warned:
            return False
        if self.unscale_was_called:  # with gradients of an unscaled loss
            return True
        present = [g for g in grads if g is not None]
        if tf.executing_eagerly():
            return not all(map(eager_log.may_be_unscaled, present))
        return not all_unscaled(self, present)

    def warn_once(self, text: str) -> None:
        """Warns of a misuse, unless this optimizer has already warned."""
        if not self._has_warned:
            self._has_warned = True
            warn(text)

    def _scaled_here(self) -> list[ScaledLoss]:
        return trace_log.current().losses_of(self)


def _variable(value: Any, dtype: Any, name: str) -> tf.Variable:
    return tf.Variable(
        value,
        trainable=False,
        dtype=dtype,
        name=name,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )


def _as_float32(loss: Any) -> Any:
    """A scalar that is finite if and only if the loss is."""
    if loss.dtype.is_complex:
        loss = tf.math.real(loss) + tf.math.imag(loss)
    loss = tf.cast(loss, tf.float32)
    return loss if loss.shape.rank == 0 else tf.reduce_sum(loss)
