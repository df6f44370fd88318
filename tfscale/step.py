"""One call of `apply`: check, unscale, decide, update, move the scale."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from tfscale import gradients, policies, replicas, update


class Step:
    """See the module.

    Args:
        optimizer: the `LossScaleOptimizer`.
        grads: list of gradients of the scaled loss, with Nones.
        variables: list of as many variables.
        hear: function without arguments that returns the `handoff.Word` for this step; its `scale`
            is the one that the gradients carry, or None for unscaled ones.
        reduced: whether the caller has summed the gradients over the replicas.
        reduce_flag: how the caller sums a scalar over the replicas, or None.
    """

    policy: Any

    def __init__(self, optimizer, grads, variables, hear, *, reduced=False, reduce_flag=None):
        self.optimizer = optimizer
        self.grads = grads
        self.variables = variables
        self.hear = hear
        self.word: Any = None
        self.reduced = reduced
        self.reduce_flag = reduce_flag
        self.shared = replicas.active()  # whether the gradients become a sum over the replicas
        self.linked = False  # whether partners may make this step skip
        self.flags: tuple | None = None
        self.guilty: Any = None  # set by `check`, see `gradients.look`

    @property
    def meets(self) -> bool:
        """Whether something has to be agreed on with others before the check."""
        return bool(self.shared or self.reduced or self.reduce_flag)

    def prepare(self) -> None:
        """Before the check: hears of the loss; what has to be equal on all replicas is made so."""
        self.word, policy = self.hear(), self.optimizer.policy
        guard = policies.NoScaling(policy.skip_nonfinite)
        self.policy = guard if self.word.scale is None else policy
        if self.shared and not self.reduced:
            flags = self.word.loss_finite, self.word.gradients_finite
            self.grads, loss_finite, finite = replicas.total(self.grads, *flags)
            self.word = self.word._replace(loss_finite=loss_finite, gradients_finite=finite)
        if (self.reduced or self.reduce_flag) and self.policy.skip_nonfinite:
            finite, loss_finite, _ = self.check()
            finite, loss_finite = replicas.agree(finite, loss_finite, self.reduce_flag)
            self.flags = finite, loss_finite, tf.logical_and(finite, loss_finite)

    def check(self) -> tuple:
        """Scalar bools, equal on all replicas: the gradients were finite, the loss was, and both.

        The last one is no more than the other two, but need not wait for each by itself.
        """
        if self.flags is not None:
            return self.flags
        if not self.policy.skip_nonfinite:
            self.guilty = lambda: tf.zeros([len(self.grads)], tf.bool)  # nobody has looked
            return tf.constant(True), tf.constant(True), tf.constant(True)
        looked_at = self.grads
        if policies.amplifies(self.policy):
            looked_at = [self.divide(g) for g in looked_at]
        seen, word = gradients.look(looked_at, self.word.loss_finite), self.word
        self.guilty = seen.guilty
        finite = tf.logical_and(word.gradients_finite, seen.finite)
        return finite, word.loss_finite, tf.logical_and(word.gradients_finite, seen.well)

    def divide(self, gradient):
        if self.word.scale is None or self.word.unscaled is True:
            return gradient
        scale = self.word.scale
        if self.word.unscaled is not False:
            scale = tf.where(self.word.unscaled, 1.0, scale)
        return gradients.unscale(gradient, scale)

    def mode(self) -> str:
        """How this optimizer wants to skip: "cond", "select" or "compiled"."""
        optimizer = self.optimizer
        return update.resolve(
            optimizer._update_mode, optimizer.inner_optimizer, self.grads, self.variables
        )

    def decide(self, finite, loss_finite, well, partners_finite, run, mode="cond"):
        """Applies or skips, and moves the scale; returns whether the step was applied.

        Args:
            finite: scalar bool of this optimizer's gradients.
            loss_finite: scalar bool of its loss.
            well: scalar bool of both.
            partners_finite: scalar bool of the linked optimizers' gradients and losses.
            run: `run()` calls `apply()` of this step, on every replica.
            mode: "cond" or "select".
        """
        accept = tf.logical_and(well, partners_finite)
        blame = functools.partial(self.blame, accept)
        move = functools.partial(self.move, finite, loss_finite, partners_finite)
        if not (self.policy.skip_nonfinite or self.linked):
            run()
            move()
        elif mode == "select":
            # Keras' arithmetic of rows can fail on what is not finite, even if it is not kept.
            self.grads = [gradients.without_rows_unless(accept, g) for g in self.grads]
            optimizer = self.optimizer
            written = optimizer.written(self.variables)
            update.select(accept, run, blame, written, optimizer.inner_optimizer)
            move()
        else:
            # In the branches, because little is left of it where all is known to be well.
            update.cond(accept, [run, lambda: self.move(*_all_well())], [blame, move])
        return accept

    def blame(self, accept) -> None:
        """Counts the variables whose gradients were not finite, unless the step was applied."""
        # Clipping spreads one infinity over all gradients, so what came before it counts.
        clipped = self.word.before_clipping
        known = clipped is not None and clipped.number == len(self.grads) and not self.shared
        guilty = (clipped.guilty if known else self.guilty)()
        guilty = tf.logical_and(guilty, tf.logical_not(accept))
        self.optimizer.count_nonfinite(guilty, self.variables)

    def apply(self) -> None:
        grads_and_vars = zip(self.grads, self.variables, strict=True)
        pairs = [(self.for_variable(g, v), v) for g, v in grads_and_vars]
        self.optimizer.update_inner(pairs)

    def for_variable(self, gradient, variable):
        if not getattr(variable, "overwrite_with_gradient", False):
            return self.divide(gradient)
        # Not a gradient but the new value, which was never scaled: an own `unscale` is taken back.
        if gradient is None or self.word.scale is None or self.word.unscaled is False:
            return gradient
        scale = tf.where(self.word.unscaled, self.word.scale, 1.0)
        return gradient * tf.cast(scale, gradient.dtype)

    def move(self, finite, loss_finite, partners_finite) -> None:
        """The scale and the counters of the next step."""
        optimizer, policy = self.optimizer, self.policy
        before = policies.ScaleState(
            tf.convert_to_tensor(optimizer.dynamic_scale),
            tf.convert_to_tensor(optimizer.step_counter),
            tf.convert_to_tensor(optimizer._hysteresis_left),
        )
        # A loss that was not finite before it was scaled, or a partner's overflow, says nothing
        # about this scale.
        innocent = tf.logical_not(loss_finite)
        innocent |= tf.logical_and(finite, tf.logical_not(partners_finite))
        if self.word.scaled is not True:
            innocent |= tf.logical_not(self.word.scaled)
        after = policies.ScaleState(
            *(
                tf.where(innocent, old, new)
                for new, old in zip(policy.update(before, finite), before, strict=True)
            )
        )
        if policy.scales:
            optimizer.dynamic_scale.assign(after.scale)
            optimizer.step_counter.assign(after.good_steps)
            optimizer._hysteresis_left.assign(after.hysteresis_left)
        optimizer.count_step(
            finite=finite,
            loss_finite=loss_finite,
            partners_finite=partners_finite,
            before=policy.in_force(before.scale),
            after=policy.in_force(after.scale),
            floor=policy.floor,
        )


def take(steps: list[Step]):
    """Takes the steps of linked optimizers together: all of them are applied, or none.

    Args:
        steps: one `Step` for each optimizer; usually one.

    Returns:
        Scalar bool tensor, the same on every replica: whether the steps were applied.
    """
    for step in steps:
        step.linked = len(steps) > 1
    if any(step.meets for step in steps):
        _prepare(steps)  # replicas cannot meet inside of a cluster
    modes = {step.mode() for step in steps}
    mode = modes.pop() if len(modes) == 1 else "cond"
    if not replicas.can_run_alone(mode):
        mode = "cond"
    if mode == "compiled":
        return update.compiled(lambda: _take(steps, "select"))
    return _take(steps, mode)


def _all_well() -> tuple:
    # Made in the branch: there they are constants, which TensorFlow folds, and no inputs.
    return tf.constant(True), tf.constant(True), tf.constant(True)


def _prepare(steps) -> None:
    for step in steps:
        if step.word is None:
            step.prepare()


def _take(steps, mode):
    _prepare(steps)
    checked = [step.check() for step in steps]
    accept = tf.constant(True)
    for i, (step, flags) in enumerate(zip(steps, checked, strict=True)):
        partners = [well for j, (*_, well) in enumerate(checked) if j != i]
        flags = (*flags, tf.reduce_all(partners) if partners else tf.constant(True))
        accept = replicas.decide(step, flags, mode)
    return accept
