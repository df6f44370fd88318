"""The names that Keras 2's LossScaleOptimizer had, for code that uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from tfscale import policies


class Keras2Names:
    """Mixin of `LossScaleOptimizer`; each docstring names the counterpart for new code."""

    step_counter: Any
    scale_loss: Callable[[Any], Any]
    unscale: Callable[[Any], Any]
    apply_gradients: Callable[[Iterable[tuple[Any, Any]]], Any]

    def get_scaled_loss(self, loss: tf.Tensor | Callable[[], tf.Tensor]) -> Any:
        """Keras 2's name of `scale_loss`. A function's result is scaled when it is called.

        Args:
            loss: tensor, nested structure of tensors, or a function that returns one.
        """
        if callable(loss):
            return lambda: self.scale_loss(loss())
        return self.scale_loss(loss)

    def get_unscaled_gradients(self, grads: Iterable[tf.Tensor]) -> list[tf.Tensor]:
        """Keras 2's name of `unscale`."""
        return self.unscale(grads)

    def minimize(
        self,
        loss: tf.Tensor | Callable[[], tf.Tensor],
        var_list: Iterable[keras.Variable] | Callable[[], Iterable[keras.Variable]],
        tape: Any = None,
    ) -> keras.Variable:
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
        tape = tape or tf.GradientTape()
        with tape:
            scaled = self.scale_loss(loss() if callable(loss) else loss)
        variables = list(var_list() if callable(var_list) else var_list)
        grads = tape.gradient(scaled, variables)
        return self.apply_gradients(zip(grads, variables, strict=True))

    @property
    def dynamic(self) -> bool:
        """Whether the scale moves. Keras 2's name; new code reads `policy`."""
        return isinstance(self.policy, policies.Dynamic)  # type: ignore[attr-defined]

    @property
    def dynamic_counter(self) -> Any:
        """Applied steps in a row since the scale last moved. Keras 2's name of `step_counter`."""
        return self.step_counter if self.dynamic else None
