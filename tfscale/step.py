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
        scaling = scale is not None
        guard = policies.NoScaling(optimizer.policy.skip_nonfinite)
        self.policy = optimizer.policy if scaling else guard

    def run(self, mode: str) -> None:
        """The whole step outside of a strategy, in the given `update` mode."""
        inner = self.optimizer.inner_optimizer
        mode = update.resolve(mode, inner, self.grads, self.variables)
        if mode == "compiled":
            update.compiled(lambda: self.run("select"))
            return
        finite = self.finite(self.grads)
        self.decide(finite, self.word.loss_finite, lambda apply: apply(self.grads), mode)

    def distributed(self) -> None:
        """The whole step in one replica's context."""
        grads, loss_finite = replicas.total(self.grads, self.word.loss_finite)
        replicas.decide(self.decide, grads, self.finite(grads), loss_finite)

    def finite(self, grads):
        if not self.policy.skip_nonfinite:
            return tf.constant(True)
        divided = [self.divide(g) for g in grads] if self.policy.floor < 1 else grads
        return tf.logical_and(gradients.all_finite(divided), self.word.gradients_finite)

    def divide(self, gradient):
        if self.scale is None or self.word.unscaled is True:
            return gradient
        scale = self.scale
        if self.word.unscaled is not False:
            scale = tf.where(self.word.unscaled, 1.0, scale)
        return gradients.unscale(gradient, scale)

    def decide(self, finite, loss_finite, run, mode="cond") -> None:
        """Applies or skips; with no guard, `finite` and `loss_finite` were never asked."""
        if not self.policy.skip_nonfinite:
            run(self.apply)
            loss_finite = tf.constant(True)
        else:
            accept = tf.logical_and(finite, loss_finite)
            written = [*self.optimizer.inner_optimizer.variables, *self.variables]
            update.run(mode, accept, lambda: run(self.apply), written)
        self.move(finite, loss_finite)

    def apply(self, grads) -> None:
        grads = [self.for_variable(g, v) for g, v in zip(grads, self.variables, strict=True)]
        self.optimizer.inner_optimizer.apply_gradients(
            list(zip(grads, self.variables, strict=True))
        )

    def for_variable(self, gradient, variable):
        if getattr(variable, "overwrite_with_gradient", False):
            return gradient
        return gradients.cast(self.divide(gradient), tf.as_dtype(variable.dtype))

    def move(self, finite, loss_finite) -> None:
        """The scale and the counters of the next step."""
        optimizer, policy = self.optimizer, self.policy
        before = policies.ScaleState(
            tf.convert_to_tensor(optimizer.dynamic_scale),
            tf.convert_to_tensor(optimizer.step_counter),
            tf.convert_to_tensor(optimizer._hysteresis_left),
        )
        after = policy.update(before, finite)
        # A loss that was not finite before it was scaled says nothing about the scale.
        after = policies.ScaleState(
            *(tf.where(loss_finite, new, old) for new, old in zip(after, before, strict=True))
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
                before=policy.in_force(before.scale),
                after=policy.in_force(after.scale),
                floor=policy.floor,
            )
        )
