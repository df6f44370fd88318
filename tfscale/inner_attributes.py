"""Attributes of the inner optimizer, read and set through the wrapper."""

from __future__ import annotations

from typing import Any

# Methods of PyTorch's GradScaler, and their equivalents.
_GRAD_SCALER = {
    "scale": "scale_loss(loss)",
    "unscale_": "unscale(gradients)",
    "step": "apply_gradients(zip(gradients, variables)), which skips too",
    "update": "apply_gradients(zip(gradients, variables)), which updates the scale too",
    "get_scale": "loss_scale",
}


def _of_inner(name: str, doc: str) -> Any:
    """An attribute of the inner optimizer, read and set through the wrapper."""

    def read(self: Any) -> Any:
        return getattr(self.__dict__.get("inner_optimizer"), name, None)

    def write(self: Any, value: Any) -> None:
        # Keras' base class sets defaults before there is an inner optimizer.
        if "inner_optimizer" in self.__dict__:
            setattr(self.inner_optimizer, name, value)

    return property(read, write, doc=f"{doc} of the inner optimizer.")


class InnerAttributes:
    """Mixin of `LossScaleOptimizer` that exposes the inner optimizer's attributes.

    Keras' wrapper has these attributes too, but nothing reads them.
    """

    inner_optimizer: Any

    weight_decay = _of_inner("weight_decay", "Weight decay")
    clipnorm = _of_inner("clipnorm", "Norm that each gradient is clipped to")
    global_clipnorm = _of_inner("global_clipnorm", "Norm that all gradients are clipped to")
    clipvalue = _of_inner("clipvalue", "Value that each gradient is clipped to")
    use_ema = _of_inner("use_ema", "Whether a moving average of the weights is kept")
    ema_momentum = _of_inner("ema_momentum", "Momentum of the moving average")
    ema_overwrite_frequency = _of_inner("ema_overwrite_frequency", "Steps between EMA overwrites")
    gradient_accumulation_steps = _of_inner("gradient_accumulation_steps", "Accumulation steps")

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
        foreign = inner is not None and not name.startswith("_") and hasattr(inner, name)
        if foreign and name not in self.__dict__ and not hasattr(type(self), name):
            setattr(inner, name, value)
        else:
            super().__setattr__(name, value)

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Calls the method of the inner optimizer."""
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)
