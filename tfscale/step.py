"""One call of `apply`: check, unscale, decide, update, move the scale."""

from __future__ import annotations

import tensorflow as tf

from tfscale import gradients, policies, recorder, replicas, update


class Step:
    """See the module.

    Args:
        optimizer: the `LossScaleOptimizer`.
        grads: list of gradients of the scaled loss, with Nones.
        variables: list of as many variables.
        word: `handoff.Word`.
        scale: scalar float32 tensor that the gradients carry, or None for unscaled ones.
    """

    def __init__(self, optimizer, grads, variables, word, scale):
        self.optimizer = optimizer
        self.grads = grads
        self.variables = variables
        self.word = word
        self.scale = scale
        guard = policies.NoScaling(optimizer.policy.skip_nonfinite)
        self.policy = optimizer.policy if scale is not None else guard

    def check(self, distributed: bool) -> tuple:
        """The gradients to apply and two scalar bools, equal on all replicas.

        Returns:
            `(grads, finite, loss_finite)`: the gradients, summed over the replicas of a strategy,
            whether they and the loss were finite.
        """
        loss_finite = self.word.loss_finite
        grads, finite = self.grads, self.word.gradients_finite
        if distributed:
            grads, loss_finite, finite = replicas.total(grads, loss_finite, finite)
        if not self.policy.skip_nonfinite:
            return grads, tf.constant(True), tf.constant(True)
        # Divided by a scale below 1 a finite gradient can overflow; by any other it cannot.
        looked_at = [self.divide(g) for g in grads] if self.policy.floor < 1 else grads
        return grads, tf.logical_and(finite, gradients.all_finite(looked_at)), loss_finite

    def divide(self, gradient):
        if self.scale is None or self.word.unscaled is True:
            return gradient
        scale = self.scale
        if self.word.unscaled is not False:
            scale = tf.where(self.word.unscaled, 1.0, scale)
        return gradients.unscale(gradient, scale)

    def decide(self, finite, loss_finite, partners_finite, run, mode="cond"):
        """Applies or skips, and moves the scale; returns whether the step was applied.

        Args:
            finite: scalar bool of this optimizer's gradients.
            loss_finite: scalar bool of its loss.
            partners_finite: scalar bool of the linked optimizers' gradients and losses.
            run: `run(update)` calls `update(grads)`, on every replica.
            mode: "cond" or "select".
        """
        accept = tf.logical_and(tf.logical_and(finite, loss_finite), partners_finite)
        if self.policy.skip_nonfinite:
            update.run(
                mode, accept, lambda: run(self.apply), self.optimizer.written(self.variables)
            )
        else:
            run(self.apply)
        self.move(finite, loss_finite, partners_finite)
        return accept

    def apply(self, grads) -> None:
        pairs = [(self.for_variable(g, v), v) for g, v in zip(grads, self.variables, strict=True)]
        self.optimizer.update_inner(pairs)

    def for_variable(self, gradient, variable):
        if getattr(variable, "overwrite_with_gradient", False):
            return gradient
        return self.divide(gradient)

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
        optimizer._counters.assign(
            recorder.advance(
                tf.convert_to_tensor(optimizer._counters),
                finite=finite,
                loss_finite=loss_finite,
                partners_finite=partners_finite,
                before=policy.in_force(before.scale),
                after=policy.in_force(after.scale),
                floor=policy.floor,
            )
        )


def take(steps: list[Step], mode: str):
    """Takes the steps of linked optimizers together: all of them are applied, or none.

    Args:
        steps: one `Step` for each optimizer; usually one.
        mode: how to skip, one of `update.MODES`.

    Returns:
        Scalar bool tensor, the same on every replica: whether the steps were applied.
    """
    distributed = replicas.active()
    if not distributed:
        modes = {
            update.resolve(mode, s.optimizer.inner_optimizer, s.grads, s.variables) for s in steps
        }
        mode = next(iter(modes)) if len(modes) == 1 else "cond"
        if mode == "compiled":
            return update.compiled(lambda: take(steps, "select"))
    checked = [step.check(distributed) for step in steps]
    good = [tf.logical_and(finite, loss_finite) for _, finite, loss_finite in checked]
    accept = tf.constant(True)
    for i, (step, (grads, finite, loss_finite)) in enumerate(zip(steps, checked, strict=True)):
        partners = [g for j, g in enumerate(good) if j != i]
        flags = (finite, loss_finite, tf.reduce_all(partners) if partners else tf.constant(True))
        if distributed:
            accept = replicas.decide(step.decide, grads, flags)
        else:
            accept = step.decide(*flags, lambda apply, grads=grads: apply(grads), mode)
    return accept
