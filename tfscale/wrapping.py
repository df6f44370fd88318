"""`wrap`: turns an optimizer, its name or its config into one that scales its loss."""

from __future__ import annotations

import copy
import difflib
from typing import Any

import keras

from tfscale import _compat, policies, policy_config
from tfscale.optimizer import LossScaleOptimizer
from tfscale.settings import dynamic_like_keras
from tfscale.warnings import warn

_KERAS_NAME = "dynamic_growth_steps"  # of `growth_interval`


def wrap(
    optimizer: keras.optimizers.Optimizer | str | dict[str, Any],
    policy: policies.Policy | str | float = "auto",
    *,
    update: str = "auto",
    master_weights: bool | str = "auto",
    **settings: float,
) -> LossScaleOptimizer:
    """Wraps an optimizer so that it scales the loss, checks the gradients and skips bad steps.

    Args:
        optimizer: a Keras optimizer, its name, or its config; a
            `keras.optimizers.LossScaleOptimizer`, whose inner optimizer, settings and state are
            used; or a tfscale one, which is returned unchanged, or rebuilt with the new policy.
        policy: "auto" (scale if the model computes in float16, otherwise only guard), "dynamic",
            "none", a number for a static scale, or a policy such as
            `tfscale.Dynamic(growth_interval=500)`.
        update: "auto", "cond", "select" or "compiled": how a step is skipped inside a graph.
        master_weights: "auto" or True keeps float32 copies of variables in float16 or bfloat16 (4
            bytes per parameter); False does not.
        **settings: fields of `tfscale.Dynamic`, which turn "auto" into "dynamic". Keras' name
            `dynamic_growth_steps` works too.

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
    options: dict[str, Any] = {"update": update, "master_weights": master_weights}
    asked = bool(settings) or not (isinstance(policy, str) and policy == "auto")
    if isinstance(optimizer, str | dict):
        optimizer = _from_config(optimizer)
    if (
        isinstance(optimizer, LossScaleOptimizer)
        and not asked
        and all(value == "auto" for value in options.values())
    ):
        return optimizer
    wanted = policy_config.get(policy, settings) if asked else None
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return _rebuild(optimizer, wanted, options)
    inner = _check(optimizer)
    if inner.loss_scale_factor is not None:
        wanted = wanted or policies.Static(inner.loss_scale_factor)
        warn(
            f"The optimizer has loss_scale_factor={inner.loss_scale_factor}, which neither checks "
            f"nor skips. It is replaced by policy={wanted}."
        )
    return LossScaleOptimizer(inner, policy=wanted or policies.Auto(), **options)


def _renamed(settings: dict[str, Any]) -> dict[str, Any]:
    if _KERAS_NAME in settings:
        if "growth_interval" in settings:
            raise ValueError("'growth_interval' was given twice, once by its name in Keras.")
        settings["growth_interval"] = settings.pop(_KERAS_NAME)
    unknown = sorted(set(settings) - {*policy_config.DYNAMIC_FIELDS, "scale", "skip_nonfinite"})
    if unknown:
        known = ["policy", "update", "master_weights", *policy_config.DYNAMIC_FIELDS, _KERAS_NAME]
        close = difflib.get_close_matches(unknown[0], known, 1)
        hint = f"Did you mean {close[0]!r}? " if close else ""
        raise ValueError(
            f"wrap() has no setting {', '.join(map(repr, unknown))}. {hint}It has: "
            f"{', '.join(known)}."
        )
    return settings


_ALLOWED = "`optimizer` must be a Keras optimizer, its name, or its config."


def _from_config(optimizer: str | dict[str, Any]) -> keras.optimizers.Optimizer:
    name = optimizer if isinstance(optimizer, str) else optimizer.get("class_name")
    reason: Exception | None = None
    try:
        if isinstance(name, str):
            # Keras removes entries from the caller's config.
            return keras.optimizers.get(copy.deepcopy(optimizer))
    except (TypeError, ValueError) as error:
        # Keras 3.16 raises the second one. For a class inside the config, its error passes.
        refusals = ("Could not interpret", f"Could not locate class {name!r}")
        if not str(error).startswith(refusals):
            raise
        reason = error
    raise ValueError(f"{_ALLOWED} Received: {optimizer!r}") from reason


def _check(optimizer: Any) -> keras.optimizers.Optimizer:
    if isinstance(optimizer, keras.optimizers.Optimizer):
        return optimizer
    hint = ""
    if isinstance(optimizer, type) and issubclass(optimizer, keras.optimizers.Optimizer):
        hint = f" Make an instance: tfscale.wrap({optimizer.__name__}(...))."
    raise TypeError(f"{_ALLOWED}{hint} Received: {optimizer!r} of type {type(optimizer).__name__}")


def _rebuild(
    optimizer: keras.optimizers.LossScaleOptimizer, policy: Any, options: dict[str, Any]
) -> LossScaleOptimizer:
    """Rebuilds a loss scale optimizer around the same inner optimizer, with the same state."""
    of_tfscale = isinstance(optimizer, LossScaleOptimizer)
    before = optimizer.policy if of_tfscale else None
    keeps_scale = policy is None or policy == before
    if of_tfscale:
        own = {"update": optimizer.update_mode, "master_weights": optimizer.master_weights}
        options = {n: own[n] if value == "auto" else value for n, value in options.items()}
    policy = before if policy is None else policy
    if policy is None:
        policy = dynamic_like_keras(optimizer.initial_scale, optimizer.dynamic_growth_steps)
    made = LossScaleOptimizer(optimizer.inner_optimizer, policy=policy, **options)
    if of_tfscale:
        _compat.set_untracked(made, "deferred_state", optimizer.deferred_state)
        made.set_masters(optimizer.masters)
        made.whole_step = optimizer.whole_step
    if optimizer.built:
        made.build(_compat.built_on(optimizer))
    if of_tfscale and keeps_scale:
        made.scaling.assign(optimizer.scaling.state)
        made.assumes_scaled = optimizer.assumes_scaled
        made.reports.copy_from(optimizer.reports)
    elif keeps_scale and optimizer.built:  # before, Keras' wrapper has no variables
        made.step_counter.assign(optimizer.step_counter)
        made.dynamic_scale.assign(optimizer.dynamic_scale)
    return made
