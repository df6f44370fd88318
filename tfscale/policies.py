"""How the loss scale moves: frozen dataclasses whose `update` is a pure function of tensors.

Every policy has the same three verbs. `clamp(scale)` is the scale that multiplies the loss of
this step and divides its gradients, `update(state, finite)` is the state of the next step, and
`is_scaling` says whether there is anything to multiply at all. No verb branches on a tensor, so all
of them work alike in eager code, in graphs and under XLA.
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
    """What a policy carries from step to step: four scalar tensors.

    Attributes:
        scale: float32, the loss scale.
        good_steps: integer, steps applied since the last overflow or growth; growths of a recovery
            do not count.
        hysteresis_left: int64, overflows that may still happen before the scale goes down.
        held_scale: float32, the highest scale known to hold; 0 stands for `initial_scale`.
    """

    scale: Any
    good_steps: Any
    hysteresis_left: Any
    held_scale: Any = 0.0


# What a field may be: its type, in words, and as a test in float32, in which it will be used:
# 1 + 1e-9 would be no growth. Below the smallest normal number a scale is flushed to zero.
_SCALE = float, "a finite number of at least 2**-126", lambda x: np.float32(x) >= 2.0**-126
_ABOVE_1 = float, "a finite number above 1", lambda x: np.float32(x) > 1
_BELOW_1 = float, "a number between 0 and 1, both excluded", lambda x: 0 < np.float32(x) < 1
_COUNT = int, "an integer from 1 to 2**31 - 1", lambda x: 1 <= x < 2**31
_FLAG = bool, "True or False", lambda x: True

_TYPES = {float: numbers.Real, int: numbers.Integral, bool: bool}


def _check(policy: Any, rule: tuple[type, str, Callable[[Any], Any]], *fields: str) -> None:
    """Makes these fields plain numbers, or raises an error that says what is allowed."""
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
    """Find the scale while training: back off on overflow, grow after a run of good steps.

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

    The scale therefore stays finite and within `[min_scale, max_scale]` for ever, grows after
    exactly `growth_interval` good steps, and the new scale is in force on the very next step.

    Recovery works as TCP's slow start: after a burst of overflows the scale climbs fast to below
    the highest that has lasted a whole growth interval (`initial_scale`, until one has). If it
    overflows on the way, that scale is the new limit, so a scale that can no longer be reached
    costs one more skipped step.

    Hysteresis is the cumulative one of Megatron-LM (and of DeepSpeed by default): the first
    `hysteresis - 1` overflows since the scale last grew are only skipped, every later one lowers
    the scale. Refilling the allowance on every good step, or while recovering, would let a scale
    that is slightly too high skip every other step for ever.

    Args:
        initial_scale: scale of the first step.
        growth_factor: factor of a growth, above 1. Powers of two lose no bit of a gradient.
        backoff_factor: factor of a backoff, between 0 and 1.
        growth_interval: applied steps in a row until the scale grows.
        min_scale: floor. Below 1 is allowed: such a scale keeps huge gradients in range.
        max_scale: ceiling.
        hysteresis: overflows that it takes to lower the scale, 1 for every one.
        recovery_interval: applied steps in a row until the scale grows where it is far below one
            that has held, such as 20; None grows after `growth_interval` everywhere.

    Raises:
        ValueError: an argument is out of its range, or `initial_scale` is out of
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
        """The scale in force: `scale` within the bounds, which another run may have set wider."""
        # Compared like this, because a NaN is not above the floor and so comes back as the floor.
        return tf.where(scale > self.min_scale, tf.minimum(scale, self.max_scale), self.min_scale)

    def update(self, state: ScaleState, finite: tf.Tensor) -> ScaleState:
        """The state of the next step.

        Args:
            state: this step's `ScaleState`.
            finite: scalar bool, whether every gradient of this step was finite.

        Returns:
            `ScaleState` of the same dtypes.
        """
        # State of a run with other settings obeys these: the bounds, the allowance, the intervals.
        left, scale = state.hysteresis_left, self.clamp(state.scale)
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
        """The scale in force: always the same."""
        return tf.fill(tf.shape(scale), tf.constant(self.scale, tf.float32))

    def update(self, state: ScaleState, finite: tf.Tensor) -> ScaleState:
        """The state of the next step: the same scale, the good steps in a row counted."""
        good = tf.where(finite, state.good_steps + 1, 0)
        return state._replace(scale=self.clamp(state.scale), good_steps=good)


@dataclasses.dataclass(frozen=True)
class Static(_Fixed):
    """A scale that never moves; an overflow is still skipped and counted.

    Args:
        scale: the loss scale. `tfscale.profile` proposes one from a model's own gradients.
        skip_nonfinite: False applies every step, without a check.

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
    """Scale 1: only the guard against non-finite gradients, for bfloat16 and float32.

    bfloat16 has the exponent range of float32, so its gradients do not underflow, but they still
    become infinite or NaN, and one such step is enough to ruin the weights.

    Args:
        skip_nonfinite: False switches the guard off as well.

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
    """`Dynamic` where the loss depends on float16 arithmetic, `NoScaling` where it does not.

    What counts is the dtype in which the model really computes. In a graph the operations between
    the variables and the loss show it while the step is traced, in eager code the layers that own
    the variables. Until it is known, and where it cannot be known, the scale is used: scaling by a
    power of two changes nothing in float32, and without it float16 fails.
    """


Policy = Dynamic | Static | NoScaling


def amplifies(policy: Policy) -> bool:
    """Whether dividing by a scale of `policy` can make a finite gradient infinite."""
    return policy.min_scale < 1


def is_at_floor(policy: Policy, scale: float) -> bool:
    """Whether `scale` is the lowest that `policy` allows, and not its first."""
    return scale <= float(np.float32(policy.min_scale)) < policy.initial_scale


def only_counts(policy: Policy, good_steps: Any) -> Any:
    """Scalar bool tensor: one more applied step is sure to change nothing but `good_steps`.

    None where it cannot be known, because a subclass has an `update` of its own.
    """
    if not isinstance(policy, Dynamic) or type(policy).update is not Dynamic.update:
        return tf.constant(True) if type(policy).update is _Fixed.update else None
    good = good_steps + 1
    counts = good < policy.growth_interval
    if policy.recovery_interval is not None:
        counts &= good % policy.recovery_interval != 0  # cheaper than reading the two scales
    return counts


def scale_text(scale: float) -> str:
    """A loss scale as one reads it and could type it: 32768, 2**26, 0.5, 1000.1."""
    mantissa, exponent = math.frexp(scale)
    return f"2**{exponent - 1}" if mantissa == 0.5 and exponent > 20 else f"{scale:g}"
