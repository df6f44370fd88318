"""How the loss scale moves: frozen dataclasses whose `update` is a pure function of tensors.

Every policy has three members. `is_scaling` says whether it scales the loss at all. `clamp(scale)`
returns the scale of this step, and `update(state, finite)`, which gets that scale, the state of the
next. They never branch on a tensor, so they work alike in eager code, in graphs and under XLA.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np
import tensorflow as tf

FLOAT32_MAX = float(tf.float32.max)


class ScaleState(NamedTuple):
    """The state of a policy: four scalar tensors.

    Attributes:
        scale: float32, the loss scale.
        good_steps: integer, steps applied since the last overflow or growth. A growth during
            recovery does not reset it.
        hysteresis_left: int64, overflows until the scale goes down; at 0, every one lowers it.
        held_scale: float32, the highest scale known not to overflow; 0 means `initial_scale`.
    """

    scale: Any
    good_steps: Any
    hysteresis_left: Any
    held_scale: Any = 0.0


# What a field may be: its type, a phrase, and a test in float32, in which policies compute: there
# 1 + 1e-9 is 1. A scale below the smallest normal number would be flushed to zero.
_SCALE = float, "a finite number of at least 2**-126", lambda x: np.float32(x) >= 2.0**-126
_ABOVE_1 = float, "a finite number above 1", lambda x: np.float32(x) > 1
_BELOW_1 = float, "a number between 0 and 1, both excluded", lambda x: 0 < np.float32(x) < 1
_COUNT = int, "an integer from 1 to 2**31 - 1", lambda x: 1 <= x < 2**31
_FLAG = bool, "True or False", lambda x: True

_TYPES = {float: numbers.Real, int: numbers.Integral, bool: bool}


def _check(policy: Any, rule: tuple[type, str, Callable[[Any], Any]], *fields: str) -> None:
    """Converts these fields to plain numbers; raises if one is not allowed."""
    kind, allowed, ok = rule
    for name in fields:
        value = getattr(policy, name)
        value = value.item() if isinstance(value, np.number) else value
        fits = isinstance(value, _TYPES[kind]) and isinstance(value, bool) == (kind is bool)
        if not (fits and abs(value) <= FLOAT32_MAX and ok(value)):
            owner = type(policy).__name__
            raise ValueError(f"`{name}` of {owner} must be {allowed}. Received: {name}={value!r}")
        object.__setattr__(policy, name, kind(value))


@dataclasses.dataclass(frozen=True)
class Dynamic:
    """Finds the scale during training: lowers it on overflow, raises it after many good steps.

        if finite:
            good_steps += 1
            if good_steps >= growth_interval:
                held_scale = max(held_scale, scale)
                scale = min(scale * growth_factor, max_scale)
                good_steps = 0
                hysteresis_left = hysteresis
            elif good_steps % recovery_interval == 0 and scale * growth_factor < held_scale:
                scale = min(scale * growth_factor, max_scale)
        else:
            if good_steps >= recovery_interval:
                held_scale = min(held_scale, scale)
            good_steps = 0
            hysteresis_left = max(hysteresis_left - 1, 0)
            if hysteresis_left == 0:
                scale = max(scale * backoff_factor, min_scale)

    So the scale always stays finite and within `[min_scale, max_scale]`. It grows after exactly
    `growth_interval` good steps, and the next step uses the new scale.

    Recovery works like TCP's slow start. After a burst of overflows the scale climbs fast to just
    below the highest scale that lasted a whole growth interval (`initial_scale` until one has). If
    it overflows on the way, that scale becomes the new limit. So a scale that can no longer be
    reached costs one more skipped step.

    Hysteresis is cumulative, as in Megatron-LM (and in DeepSpeed by default): the first
    `hysteresis - 1` overflows since the last growth only skip their step, and every later one also
    lowers the scale. If good steps or recovery reset this count, a scale that is slightly too high
    could skip every other step forever.

    Args:
        initial_scale: scale of the first step.
        growth_factor: factor that raises the scale, above 1. Powers of two round no gradient.
        backoff_factor: factor that lowers the scale, between 0 and 1.
        growth_interval: applied steps in a row until the scale grows.
        min_scale: lower limit. Below 1 is allowed: such a scale keeps huge gradients in range.
        max_scale: upper limit.
        hysteresis: overflows until the scale goes down; 1 lowers it at every overflow.
        recovery_interval: applied steps in a row, such as 20, until the scale grows while it is
            far below one that has held. None always waits for `growth_interval`.

    Raises:
        ValueError: an argument is out of range, or `initial_scale` is not within
            `[min_scale, max_scale]`.

    Example:
    >>> import tfscale
    >>> tfscale.Dynamic(growth_interval=500).growth_interval
    500

    Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2
    (arXiv:1710.03740), and NVIDIA's mixed precision guide for the dynamic rule.
    """

    initial_scale: float = 2.0**15
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 1.0
    max_scale: float = 2.0**24
    hysteresis: int = 1
    recovery_interval: int | None = None

    is_scaling: ClassVar[bool] = True
    skip_nonfinite: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check(self, _SCALE, "min_scale", "max_scale", "initial_scale")
        _check(self, _ABOVE_1, "growth_factor")
        _check(self, _BELOW_1, "backoff_factor")
        _check(self, _COUNT, "growth_interval", "hysteresis")
        if self.recovery_interval is not None:
            _check(self, _COUNT, "recovery_interval")
        if not self.min_scale <= self.initial_scale <= self.max_scale:
            raise ValueError(
                f"Dynamic needs `min_scale` <= `initial_scale` <= `max_scale`. Received: {self}"
            )

    def clamp(self, scale: tf.Tensor) -> tf.Tensor:
        """The scale to use: `scale` within the limits, which a loaded scale may exceed."""
        # In this form a NaN becomes `min_scale`, because it compares as False.
        return tf.where(scale > self.min_scale, tf.minimum(scale, self.max_scale), self.min_scale)

    def update(self, state: ScaleState, finite: tf.Tensor) -> ScaleState:
        """The state of the next step.

        Args:
            state: this step's `ScaleState`, with its scale within the limits.
            finite: scalar bool, whether every gradient of this step was finite.

        Returns:
            `ScaleState` of the same dtypes.
        """
        # A run with other settings may have saved the state; from now on these settings apply.
        left, scale = state.hysteresis_left, state.scale
        limit = tf.where(state.held_scale > 0, state.held_scale, self.initial_scale)
        good = tf.where(finite, state.good_steps + 1, 0)
        allowance = tf.constant(self.hysteresis, left.dtype)
        left = tf.minimum(left, allowance)
        left = tf.where(finite, left, tf.maximum(left - 1, 0))
        grown, whole = scale * self.growth_factor, good >= self.growth_interval
        held = tf.where(whole, tf.maximum(limit, scale), state.held_scale)
        grow = whole
        if self.recovery_interval is not None:
            grow |= finite & (good % self.recovery_interval == 0) & (grown < limit)
            failed = ~finite & (state.good_steps >= self.recovery_interval)
            held = tf.where(failed, tf.minimum(limit, scale), held)
        lowered = tf.where(~finite & (left <= 0), scale * self.backoff_factor, scale)
        return ScaleState(
            self.clamp(tf.where(grow, grown, lowered)),
            tf.where(whole, tf.zeros_like(good), good),
            tf.where(whole, allowance, left),
            held,
        )


class _Fixed:
    """A scale that never moves."""

    scale: float
    skip_nonfinite: bool

    def __post_init__(self) -> None:
        _check(self, _FLAG, "skip_nonfinite")

    @property
    def initial_scale(self) -> float:
        """The scale."""
        return self.scale

    min_scale = initial_scale

    def clamp(self, scale: tf.Tensor) -> tf.Tensor:
        """The scale to use: always the same."""
        return tf.fill(tf.shape(scale), tf.constant(self.scale, tf.float32))

    def update(self, state: ScaleState, finite: tf.Tensor) -> ScaleState:
        """The state of the next step: the same scale, and the new number of good steps in a row."""
        good = tf.where(finite, state.good_steps + 1, 0)
        return state._replace(good_steps=good)


@dataclasses.dataclass(frozen=True)
class Static(_Fixed):
    """A fixed scale. Overflows are still skipped and counted.

    Args:
        scale: the loss scale. `tfscale.profile` proposes one from a model's gradients.
        skip_nonfinite: False applies every step and checks nothing.

    Raises:
        ValueError: `scale` is not a positive finite number.

    Example:
    >>> import tfscale
    >>> tfscale.Static(1024).scale
    1024.0

    Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2.
    """

    scale: float
    skip_nonfinite: bool = True

    is_scaling: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self, _SCALE, "scale")


@dataclasses.dataclass(frozen=True)
class NoScaling(_Fixed):
    """No loss scaling, only skips of non-finite gradients: for bfloat16 and float32.

    bfloat16 has the exponent range of float32, so its gradients do not underflow. But they can
    still become infinite or NaN, and one such step ruins the weights.

    Args:
        skip_nonfinite: False applies every step and checks nothing.

    Example:
    >>> import tfscale
    >>> tfscale.NoScaling().initial_scale
    1.0
    """

    skip_nonfinite: bool = True

    scale: ClassVar[float] = 1.0  # type: ignore[misc]
    is_scaling: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True)
class Auto(Dynamic):
    """`Dynamic` if the loss depends on float16 arithmetic, otherwise `NoScaling`.

    What counts is the dtype in which the model computes. In a graph, the operations between the
    variables and the loss show it; in eager code, the layers that own the variables do. As long as
    it is unknown, the loss is scaled: scaling by a power of two changes nothing in float32, and
    float16 fails without it.
    """


Policy = Dynamic | Static | NoScaling


def amplifies(policy: Policy) -> bool:
    """Whether dividing by a scale of `policy` can make a finite gradient infinite."""
    return policy.min_scale < 1


def is_at_floor(policy: Policy, scale: float) -> bool:
    """Whether `scale` has gone down to the lowest that `policy` allows."""
    return scale <= float(np.float32(policy.min_scale)) < policy.initial_scale


def only_counts(policy: Policy, good_steps: Any) -> Any:
    """Scalar bool tensor: one more applied step surely changes only `good_steps`.

    None if unknown, because a subclass has its own `update`.
    """
    if not isinstance(policy, Dynamic) or type(policy).update is not Dynamic.update:
        return tf.constant(True) if type(policy).update is _Fixed.update else None
    good = good_steps + 1
    counts = good < policy.growth_interval
    if policy.recovery_interval is not None:
        counts &= good % policy.recovery_interval != 0  # cheaper than reading the two scales
    return counts


def scale_text(scale: float) -> str:
    """A loss scale as text that is valid Python: 32768, 2**26, 0.5, 1000.1."""
    mantissa, exponent = math.frexp(scale)
    return f"2**{exponent - 1}" if mantissa == 0.5 and exponent > 20 else f"{scale:g}"
