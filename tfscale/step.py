"""One step: checks and unscales the gradients, applies or skips them, moves the scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfscale import _compat, gradients, policies, replicas, update
from tfscale.carried import Carried
from tfscale.gradients import FiniteCheck, Gradient


class Step:
    """See the module.

    Args:
        optimizer: the `LossScaleOptimizer`; a step uses its parts but calls none of its methods.
        grads: list of gradients and None.
        variables: list of as many variables.
        carried: what the gradients were multiplied by.
        reduced: whether the caller has summed the gradients over the replicas.
        reduce_flag: function of the caller that sums a scalar over the replicas, or None.
    """

    def __init__(
        self,
        optimizer: Any,
        grads: Sequence[Gradient | None],
        variables: Sequence[Any],
        carried: Carried,
        *,
        reduced: bool = False,
        reduce_flag: Callable[[tf.Tensor], Any] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.grads = grads
        self.variables = variables
        self.carried = carried
        self.policy = optimizer.scaling.policy_for(carried)
        self.reduced = reduced
        self.reduce_flag = reduce_flag
        self.linked = False  # whether partners may make this step skip
        handoff = optimizer.handoff
        check, number = handoff.before_clipping() or (None, 0)
        # Clipping spreads one infinity over all gradients, so the check of `unscale` counts.
        self.before_clipping: FiniteCheck | None = check if number == len(grads) else None
        # A function, because only the branch of an overflow needs its value.
        self.is_counted: Callable[[], Any] = lambda: handoff.is_counted(carried)
        # Scalar bool tensors, equal on all replicas:
        self.loss_finite: Any = None  # every loss since the last update was finite
        self.finite: Any = None  # all gradients of this optimizer are finite
        self.should_apply: Any = None  # those of all linked optimizers are
        self.nonfinite_mask: Any = None  # set by `check`

    def synchronize(self) -> None:
        """Makes gradients and flags equal on all replicas."""
        several = replicas.active()
        if not (several or self.reduced or self.reduce_flag):
            return
        loss_finite, is_counted = self.optimizer.handoff.loss_finite(), self.is_counted()
        if several and not self.reduced:
            before, self.before_clipping = self.before_clipping, None
            # In eager code only a replica with an overflow has one, so replicas cannot sum it.
            if before is None or tf.executing_eagerly():
                self.grads, loss_finite = replicas.total(self.grads, loss_finite)
            else:
                ones = before.finite_ones(len(self.grads))
                self.grads, loss_finite, ones = replicas.total(self.grads, loss_finite, ones)
                self.before_clipping = before._replace(nonfinite_mask=lambda: ~ones)
        self.loss_finite, self.is_counted = loss_finite, lambda: is_counted
        if (self.reduced or self.reduce_flag) and self.policy.skip_nonfinite:
            flags = replicas.agree(self.check(), loss_finite, self.reduce_flag)
            self.finite, self.loss_finite = flags

    def check(self) -> tf.Tensor:
        """Scalar bool tensor: all gradients are finite."""
        if self.loss_finite is None:
            self.loss_finite = self.optimizer.handoff.loss_finite()
        if not self.policy.skip_nonfinite:
            self.nonfinite_mask = lambda: tf.zeros([len(self.grads)], tf.bool)  # not checked
            return tf.constant(True)
        grads = self.grads
        if policies.amplifies(self.policy):
            grads = list(map(gradients.unscale, grads, self.carried.divisors))
        check = gradients.check_finite(grads, self.loss_finite)
        self.nonfinite_mask, self.loss_finite = check.nonfinite_mask, check.loss_finite
        known = self.carried.is_known
        return check.finite if known is None else tf.logical_and(check.finite, known)

    def decide(self, run: Callable[[], None], mode: str) -> None:
        """Applies or skips the step and moves the scale.

        Args:
            run: function that calls `apply()` of this step on every replica.
            mode: "cond" or "select".
        """
        if not (self.policy.skip_nonfinite or self.linked):
            run()
        elif mode == "select":
            # Keras' updates of rows can fail on non-finite numbers, even if they are undone.
            self.grads = [gradients.without_rows_unless(self.should_apply, g) for g in self.grads]
            inner, masters = self.optimizer.inner_optimizer, self.optimizer.masters
            written = [*inner.variables, *masters.variables, *self.variables]
            update.select(self.should_apply, run, self.count_nonfinite, written, inner)
            self.update_scale()
            return
        else:
            update.cond(self.should_apply, [run], [self.count_nonfinite])
        self.count()

    def count_nonfinite(self) -> None:
        """Counts the variables with a non-finite gradient, unless the step was applied."""
        before = self.before_clipping
        mask = (before.nonfinite_mask if before else self.nonfinite_mask)()
        mask = tf.logical_and(mask, tf.logical_not(self.should_apply))
        self.optimizer.reports.count_nonfinite(mask, self.variables)

    def apply(self) -> None:
        """Unscales the gradients and runs the inner optimizer."""
        pairs = [(self.for_variable(i, v), v) for i, v in enumerate(self.variables)]
        self.optimizer.masters.update(self.optimizer.inner_optimizer, pairs)

    def for_variable(self, place: int, variable: Any) -> Any:
        """The gradient that the inner optimizer gets for `variable`."""
        gradient, divisor = self.grads[place], self.carried.divisors[place]
        if not getattr(variable, "overwrite_with_gradient", False):
            return gradients.unscale(gradient, divisor)
        # Not a gradient but the new value, which was never scaled: undo a call of `unscale`.
        scale = self.carried.scale
        if gradient is None or scale is None:
            return gradient
        factor = scale if divisor is None else scale / divisor
        return gradient * tf.cast(factor, gradient.dtype)

    def update_scale(self) -> None:
        """Moves the scale and counts the step."""
        update_scale(
            self.optimizer,
            self.carried,
            finite=self.finite,
            applied=self.should_apply,
            loss_finite=self.loss_finite,
            is_counted=self.is_counted(),
        )

    def count(self) -> None:
        """Moves the scale and counts the step, with less work where it surely does not move."""
        good_steps = self.optimizer.scaling.variables.good_steps
        quiet = policies.only_counts(self.policy, good_steps)
        if quiet is None or (self.policy.is_scaling and self.carried.was_scaled is not True):
            self.update_scale()
            return
        good = [self.optimizer.reports.count_applied]
        if self.policy.is_scaling:
            good.append(lambda: good_steps.assign_add(1))
        update.cond(self.should_apply & quiet & self.loss_finite, good, [self.update_scale])


def update_scale(
    optimizer: Any,
    carried: Carried,
    *,
    finite: tf.Tensor,
    applied: tf.Tensor,
    loss_finite: tf.Tensor,
    is_counted: tf.Tensor,
) -> None:
    """Sets the scale of the next step, and counts this one.

    Args:
        optimizer: the `LossScaleOptimizer`.
        carried: what the gradients were multiplied by.
        finite: scalar bool tensor, like the others: the gradients were finite.
        applied: so were those of the linked optimizers.
        loss_finite: every loss since the last update was finite.
        is_counted: `unscale` has already counted this overflow.
    """
    # An overflow says nothing about this scale if the unscaled loss was not finite, or if it is in
    # a linked optimizer.
    moves = applied | (~finite & loss_finite & ~is_counted)
    if carried.was_scaled is not True:
        moves &= carried.was_scaled
    policy = optimizer.scaling.policy_for(carried)
    before, after = optimizer.scaling.update(policy, finite, moves)
    optimizer.reports.count_step(
        finite=finite,
        applied=applied,
        loss_finite=loss_finite,
        is_counted=is_counted,
        before=before,
        after=after,
        floor=policy.min_scale,
    )


def count_overflow(optimizer: Any, carried: Carried, finite: tf.Tensor) -> None:
    """Lowers the scale if `unscale` finds an overflow, in case no `apply` follows."""
    if not replicas.can_agree():
        return  # `apply` finds the NaN and does it
    handoff = optimizer.handoff
    loss_finite = handoff.loss_finite()
    if replicas.active():
        finite, loss_finite = replicas.agree(finite, loss_finite)
    new = tf.logical_and(tf.logical_not(finite), handoff.overflow_is_new())

    def count() -> None:
        update_scale(
            optimizer,
            carried,
            finite=tf.constant(False),
            applied=tf.constant(False),
            loss_finite=loss_finite,
            is_counted=tf.logical_not(new),
        )

    if _compat.in_xla_context() or replicas.active():
        replicas.call_once(count)
    else:
        update.cond(tf.logical_not(new), [], [count])
    handoff.overflow_counted(new)


def apply_steps(steps: list[Step]) -> tf.Tensor:
    """Applies the steps of linked optimizers, or skips them all.

    Args:
        steps: one `Step` for each optimizer; usually one.

    Returns:
        Scalar bool tensor, the same on every replica: whether the steps were applied.
    """
    for step in steps:
        step.linked = len(steps) > 1
        step.synchronize()  # here, because replicas cannot meet in a compiled cluster
    modes = {
        update.resolve(s.optimizer.update_mode, s.optimizer.inner_optimizer, s.grads, s.variables)
        for s in steps
    }
    mode = modes.pop() if len(modes) == 1 else "cond"
    if not replicas.can_run_alone(mode):
        mode = "cond"
    if mode == "compiled":  # one XLA cluster of the graph being traced
        return tf.function(lambda: _apply(steps, "select"), autograph=False, jit_compile=True)()
    return _apply(steps, mode)


def _apply(steps: list[Step], mode: str) -> tf.Tensor:
    for step in steps:
        if step.finite is None:
            step.finite = step.check()
    should_apply = steps[0].finite if len(steps) == 1 else tf.reduce_all([s.finite for s in steps])
    for step in steps:
        step.should_apply = should_apply
        replicas.decide(step, mode)
        step.optimizer.handoff.reset(step.carried)
    return should_apply
