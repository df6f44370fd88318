"""`wrap`: one call that turns whatever names an optimizer into one that scales its loss."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import keras

from tfscale import policies
from tfscale.optimizer import LossScaleOptimizer, LossScaleWarning, dynamic_like_keras

_KERAS_NAMES = {"dynamic_growth_steps": "growth_interval"}


def wrap(optimizer: Any, policy: Any = "auto", *, update: str = "auto", **settings: Any):
    """Wraps an optimizer so that it scales the loss, checks the gradients and skips bad steps.

    Args:
        optimizer: a Keras optimizer, its name, or its config; a
            `keras.optimizers.LossScaleOptimizer`, whose inner optimizer and settings are taken
            over; or a tfscale one, which is returned as it is, or re-made with the new policy.
        policy: "auto" (scale where the model computes in float16, only guard elsewhere),
            "dynamic", "none", a number for a static scale, or a policy such as
            `tfscale.Dynamic(growth_interval=500)`.
        update: "auto", "cond", "select" or "compiled": how a step is skipped inside a graph.
        **settings: fields of `tfscale.Dynamic`; with "auto" they mean "dynamic". Keras' name
            `dynamic_growth_steps` is understood as well.

    Returns:
        A `tfscale.LossScaleOptimizer`, which is a `keras.optimizers.LossScaleOptimizer`.

    Raises:
        TypeError: `optimizer` is none of these.
        ValueError: a setting is unknown or out of range.

    Example:

    >>> import keras, tfscale
    >>> optimizer = tfscale.wrap("adam", "dynamic", initial_scale=2.0**12)
    >>> float(optimizer.loss_scale)
    4096.0
    """
    settings = _renamed(settings)
    asked = bool(settings) or not (isinstance(policy, str) and policy == "auto")
    if isinstance(optimizer, LossScaleOptimizer) and not asked:
        if update != "auto":
            return _remake(optimizer, optimizer.policy, update)
        return optimizer
    wanted = policies.get(policy, settings)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return _remake(optimizer, wanted if asked else None, update)
    inner = _get(optimizer)
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        return wrap(inner, policy, update=update, **settings)
    return LossScaleOptimizer(
        inner, policy=_with_factor(inner, wanted if asked else None) or wanted, update=update
    )


def _renamed(settings: dict[str, Any]) -> dict[str, Any]:
    renamed: dict[str, Any] = {}
    for name, value in settings.items():
        name = _KERAS_NAMES.get(name, name)
        if name in renamed:
            raise ValueError(f"{name!r} was given twice, once by its name in Keras.")
        renamed[name] = value
    unknown = sorted(set(renamed) - {*policies.DYNAMIC_FIELDS, "scale", "skip_nonfinite"})
    if unknown:
        raise ValueError(
            f"wrap() has no setting {', '.join(map(repr, unknown))}. It has: policy, update, "
            f"{', '.join(policies.DYNAMIC_FIELDS)}, dynamic_growth_steps."
        )
    return renamed


def _get(optimizer):
    """A Keras optimizer from an instance, a name or a config."""
    if isinstance(optimizer, keras.optimizers.Optimizer):
        return optimizer
    if isinstance(optimizer, str | dict):
        # Keras takes entries out of the caller's config.
        return keras.optimizers.get(copy.deepcopy(optimizer))
    hint = ""
    if isinstance(optimizer, type) and issubclass(optimizer, keras.optimizers.Optimizer):
        hint = f" Make an instance: tfscale.wrap({optimizer.__name__}(...))."
    raise TypeError(
        "`optimizer` must be a Keras optimizer, its name, or its config."
        f"{hint} Received: {optimizer!r} of type {type(optimizer).__name__}"
    )


def _with_factor(inner, wanted):
    """`Static` for an optimizer that comes with a `loss_scale_factor` of its own, said aloud."""
    factor = inner.loss_scale_factor
    if factor is None:
        return None
    taken = wanted or policies.Static(factor)
    warnings.warn(
        f"The optimizer has loss_scale_factor={factor}, which neither checks nor skips. It is "
        f"replaced by policy={taken}.",
        LossScaleWarning,
        stacklevel=3,
    )
    return taken


def _remake(optimizer, policy, update):
    """A tfscale optimizer round the inner optimizer of another loss scale optimizer."""
    inner = optimizer.inner_optimizer
    made = LossScaleOptimizer(
        inner,
        policy=policy
        or dynamic_like_keras(optimizer.initial_scale, optimizer.dynamic_growth_steps),
        update=update,
    )
    if optimizer.built:
        made.build(inner._trainable_variables)
        if policy is None or policy == getattr(optimizer, "policy", None):
            made.dynamic_scale.assign(optimizer.dynamic_scale)
            made.step_counter.assign(optimizer.step_counter)
    return made
