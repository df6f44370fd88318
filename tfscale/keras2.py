"""The names that Keras 2's LossScaleOptimizer had, for code that uses them."""

from __future__ import annotations

import tensorflow as tf

from tfscale import policies


class Keras2Names:
    """Mixin of `LossScaleOptimizer`; each name says what to write instead in new code."""

    def get_scaled_loss(self, loss):
        """Keras 2's name of `scale_loss`. A function of no arguments is scaled when it is called.

        Args:
            loss: tensor, nested structure of tensors, or a function that returns one.
        """
        if callable(loss):
            return lambda: self.scale_loss(loss())  # type: ignore[attr-defined]
        return self.scale_loss(loss)  # type: ignore[attr-defined]

    def get_unscaled_gradients(self, grads):
        """Keras 2's name of `unscale`."""
        return self.unscale(grads)  # type: ignore[attr-defined]

    def minimize(self, loss, var_list, tape=None):
        """Computes the gradients of `loss` and applies them.

        Args:
            loss: function that returns the unscaled loss, or, with `tape`, an unscaled loss tensor
                that was computed under it.
            var_list: list of variables, or a function that returns it.
            tape: the `tf.GradientTape` that recorded a `loss` tensor.

        Returns:
            The number of applied steps.
        """
        if callable(loss) == (tape is not None):
            raise ValueError(
                "minimize() needs either a function that returns the loss, or a loss tensor and "
                f"the tape that recorded it. Received: loss={loss}, tape={tape}"
            )
        if callable(loss):
            with tf.GradientTape() as tape:
                scaled = self.scale_loss(loss())  # type: ignore[attr-defined]
        else:
            with tape:
                scaled = self.scale_loss(loss)  # type: ignore[attr-defined]
        variables = list(var_list() if callable(var_list) else var_list)
        grads = tape.gradient(scaled, variables)
        return self.apply_gradients(  # type: ignore[attr-defined]
            zip(grads, variables, strict=True)
        )

    @property
    def dynamic(self) -> bool:
        """Whether the scale moves. Keras 2's name; new code reads `policy`."""
        return isinstance(self.policy, policies.Dynamic)  # type: ignore[attr-defined]

    @property
    def dynamic_counter(self):
        """Applied steps in a row since the scale last moved. Keras 2's name of `step_counter`."""
        return self.step_counter if self.dynamic else None  # type: ignore[attr-defined]
