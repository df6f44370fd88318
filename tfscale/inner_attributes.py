"""Attributes of the inner optimizer, read and set through the wrapper."""

from __future__ import annotations

from typing import Any

from tfscale import _compat

# Methods of PyTorch's GradScaler, and their equivalents.
_GRAD_SCALER = {
    "scale": "scale_loss(loss)",
    "unscale_": "unscale(gradients)",
    "step": "apply_gradients(zip(gradients, variables)), which skips too",
    "update": "apply_gradients(zip(gradients, variables)), which updates the scale too",
    "get_scale": "loss_scale",
}


class InnerAttributes:
    """Mixin of `LossScaleOptimizer` that exposes the inner optimizer's attributes."""

    inner_optimizer: Any

    @property
    def loss_scale_factor(self) -> None:
        """Always None: the policy has the scale."""
        return None

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: float | None) -> None:
        if value is not None:
            raise ValueError(
                "The policy of a tfscale optimizer sets its scale. Write "
                f"tfscale.wrap(optimizer, {value}). Received: loss_scale_factor={value}"
            )

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute that only the inner optimizer has."""
        inner = self.__dict__.get("inner_optimizer")
        if inner is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name in _GRAD_SCALER and not hasattr(inner, name):
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}. For GradScaler's "
                f"{name!r} write optimizer.{_GRAD_SCALER[name]}"
            )
        return getattr(inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute of the inner optimizer if only the inner optimizer has it."""
        inner = self.__dict__.get("inner_optimizer")
        if inner is None and name in _compat.UNREAD_BY_WRAPPER:
            return  # a default that Keras' wrapper never reads; it would hide the inner optimizer's
        foreign = inner is not None and not name.startswith("_") and hasattr(inner, name)
        if foreign and name not in self.__dict__ and not hasattr(type(self), name):
            setattr(inner, name, value)
        else:
            super().__setattr__(name, value)

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Calls the method of the inner optimizer."""
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)
