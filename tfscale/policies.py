"""How the loss scale moves: frozen dataclasses whose `update` is a pure function of tensors.

Every policy has the same three verbs. `clamp(scale)` is the scale that multiplies the loss of
this step and divides its gradients, `update(state, finite)` is the state of the next step, and
`is_scaling` says whether there is anything to multiply at all. No verb branches on a tensor, so all
of them work alike in eager code, in graphs and under XLA.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

FLOAT32_MAX = float(tf.float32.max)


class ScaleState(NamedTuple):
    """What a policy carries from step to step: three scalar tensors.

    Attributes:
        scale: float32, the loss scale.
        good_steps: integer, steps applied since the scale last moved or a gradient overflowed.
        hysteresis_left: int64, overflows that may still happen before the scale goes down.
    """

    scale: Any
    good_steps: Any
    hysteresis_left: Any


def _number(owner: str, name: str, value: Any, allowed: str, ok: Callable[[float], bool]) -> float:
    """`value` as a float, or an error that names the argument and what is allowed."""
    number = math.nan
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # an integer that is too large for any float
            number = float(value)
    # Checked in float32, in which it will be used: 1 + 1e-9 would be no growth.
    if not (abs(number) <= FLOAT32_MAX and ok(float(tf.float32.as_numpy_dtype(number)))):
        raise ValueError(f"`{name}` of {owner} must be {allowed}. Received: {name}={value!r}")
    return number


def _count(owner: str, name: str, value: Any) -> int:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"`{name}` of {owner} must be an integer of at least 1. Received: {name}={value!r}"
        )
    if value > tf.int32.max:
        raise ValueError(
            f"`{name}` of {owner} must be at most {tf.int32.max}. Received: {name}={value!r}"
        )
    return int(value)


def _flag(owner: str, name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"`{name}` of {owner} must be True or False. Received: {name}={value!r}")
    return value


def _positive(value: float) -> bool:
    # Below the smallest normal float32 a scale is flushed to zero on most devices.
    return value >= float(tf.float32.as_numpy_dtype(2.0**-126))


_POSITIVE = "a finite number of at least 2**-126 (the smallest normal float32)"


@dataclasses.dataclass(frozen=True)
class Dynamic:
    """Find the scale while training: back off on overflow, grow after a run of good steps.

        if finite:
            good_steps += 1
            if good_steps >= growth_interval:
                scale = min(scale * growth_factor, max_scale)
                good_steps = 0
                hysteresis_left = hysteresis
        else:
            good_steps = 0
            hysteresis_left = max(hysteresis_left - 1, 0)
            if hysteresis_left == 0:
                scale = max(scale * backoff_factor, min_scale)

    The scale therefore stays finite and within `[min_scale, max_scale]` for ever, grows after
    exactly `growth_interval` good steps, and the new scale is in force on the very next step.

    Hysteresis has three meanings in the field. Here it is the cumulative one (Megatron-LM, and
    DeepSpeed by default): the first `hysteresis - 1` overflows since the scale last grew are only
    skipped, every later one lowers the scale, and only a growth refills the allowance. Refilling
    on every good step instead would let a scale that is slightly too high skip every other step
    for ever.

    Args:
        initial_scale: scale of the first step.
        growth_factor: factor of a growth, above 1. Powers of two lose no bit of a gradient.
        backoff_factor: factor of a backoff, between 0 and 1.
        growth_interval: applied steps in a row until the scale grows.
        min_scale: floor. Below 1 is allowed: such a scale keeps huge gradients in range.
        max_scale: ceiling.
        hysteresis: overflows that it takes to lower the scale, 1 for every one.

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

    def __post_init__(self) -> None:
        """Checks the fields."""
        for name, allowed, ok in (
            ("min_scale", _POSITIVE, _positive),
            ("max_scale", _POSITIVE, _positive),
            ("initial_scale", _POSITIVE, _positive),
            ("growth_factor", "a finite number above 1 in float32", lambda x: x > 1),
            (
                "backoff_factor",
                "a number between 0 and 1 in float32, both excluded",
                lambda x: 0 < x < 1,
            ),
        ):
            value = _number("Dynamic", name, getattr(self, name), allowed, ok)
            object.__setattr__(self, name, value)
        for name in ("growth_interval", "hysteresis"):
            object.__setattr__(self, name, _count("Dynamic", name, getattr(self, name)))
        if not self.min_scale <= self.initial_scale <= self.max_scale:
            raise ValueError(
                "Dynamic needs `min_scale` <= `initial_scale` <= `max_scale`. Received: "
                f"min_scale={self.min_scale}, initial_scale={self.initial_scale}, "
                f"max_scale={self.max_scale}. Change the bound that is violated."
            )

    @property
    def is_scaling(self) -> bool:
        """True: there is a scale to multiply with."""
        return True

    @property
    def skip_nonfinite(self) -> bool:
        """True: a step with a gradient that is not finite is always skipped."""
        return True

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
        one = tf.ones_like(state.good_steps)
        good = tf.where(finite, state.good_steps + one, tf.zeros_like(one))
        # `>=`, so that a run resumed with a smaller interval still grows.
        grow = good >= tf.cast(self.growth_interval, good.dtype)
        left = state.hysteresis_left
        # A count restored from a run with a larger allowance obeys this one.
        left = tf.minimum(left, tf.constant(self.hysteresis, left.dtype))
        left = tf.where(finite, left, tf.maximum(left - 1, 0))
        back_off = tf.logical_and(tf.logical_not(finite), left <= 0)
        factor = tf.where(grow, self.growth_factor, tf.where(back_off, self.backoff_factor, 1.0))
        scale = self.clamp(self.clamp(state.scale) * tf.cast(factor, tf.float32))
        return ScaleState(
            scale,
            tf.where(grow, tf.zeros_like(good), good),
            tf.where(grow, tf.constant(self.hysteresis, left.dtype), left),
        )


class _Fixed:
    """A scale that never moves."""

    scale: float

    @property
    def initial_scale(self) -> float:
        """The scale."""
        return self.scale

    @property
    def min_scale(self) -> float:
        """The scale."""
        return self.scale

    def clamp(self, scale: tf.Tensor) -> tf.Tensor:
        """The scale in force: always the same."""
        return tf.fill(tf.shape(scale), tf.constant(self.scale, tf.float32))

    def update(self, state: ScaleState, finite: tf.Tensor) -> ScaleState:
        """The state of the next step: the same scale, the good steps in a row counted."""
        one = tf.ones_like(state.good_steps)
        good = tf.where(finite, state.good_steps + one, tf.zeros_like(one))
        return ScaleState(self.clamp(state.scale), good, state.hysteresis_left)


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

    def __post_init__(self) -> None:
        """Checks the fields."""
        value = _number("Static", "scale", self.scale, _POSITIVE, _positive)
        object.__setattr__(self, "scale", value)
        _flag("Static", "skip_nonfinite", self.skip_nonfinite)

    @property
    def is_scaling(self) -> bool:
        """True: there is a scale to multiply with."""
        return True


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

    def __post_init__(self) -> None:
        """Checks the fields."""
        _flag("NoScaling", "skip_nonfinite", self.skip_nonfinite)

    @property
    def scale(self) -> float:  # type: ignore[override]
        """1."""
        return 1.0

    @property
    def is_scaling(self) -> bool:
        """False: the scale is always 1."""
        return False


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
    """Whether one more applied step changes nothing but the count of them.

    Args:
        policy: the policy.
        good_steps: scalar integer tensor, before the step.

    Returns:
        Scalar bool tensor; None where it cannot be known, because a subclass has an `update` of
        its own.
    """
    if isinstance(policy, Dynamic) and type(policy).update is Dynamic.update:
        return good_steps + 1 < policy.growth_interval
    return tf.constant(True) if type(policy).update is _Fixed.update else None


DYNAMIC_FIELDS = tuple(field.name for field in dataclasses.fields(Dynamic))

_BY_NAME = {"auto": Auto, "dynamic": Dynamic, "static": Static, "none": NoScaling}


def scale_text(scale: float) -> str:
    """A loss scale as one reads it and could type it: 32768, 2**26, 0.5, 1000.1."""
    mantissa, exponent = math.frexp(scale)
    return f"2**{exponent - 1}" if mantissa == 0.5 and exponent > 20 else f"{scale:g}"


def get(policy: Any, settings: dict[str, Any] | None = None) -> Policy:
    """The policy that `policy` and `settings` mean.

    Args:
        policy: a policy (returned as it is), its name ("auto", "dynamic", "static", "none"), a
            number (`Static`), a config as made by `to_config`, or None (`Dynamic` if there are
            settings, else `Auto`).
        settings: fields of `Dynamic`, or of the policy that is named.

    Raises:
        ValueError: an unknown name or setting, or settings beside a finished policy.
        TypeError: none of these.

    Example:
    >>> from tfscale import policies
    >>> policies.get(1024.0)
    Static(scale=1024.0, skip_nonfinite=True)
    """
    settings = dict(settings or {})
    allowed = '"auto", "dynamic", "none", a number, or a policy such as tfscale.Dynamic()'
    if isinstance(policy, Dynamic | Static | NoScaling):
        if settings:
            raise ValueError(
                f"Settings beside a finished policy are not possible: put them into the policy. "
                f"Received: policy={policy}, {settings}"
            )
        return policy
    if isinstance(policy, numbers.Real) and not isinstance(policy, bool):
        return _build(Static, {"scale": policy, **settings})
    if isinstance(policy, dict):
        settings = {**policy, **settings}
        policy = settings.pop("name", "dynamic")
    elif settings and (policy is None or (isinstance(policy, str) and policy.lower() == "auto")):
        policy = "dynamic"
    elif policy is None:
        policy = "auto"
    if isinstance(policy, str):
        if policy.lower() not in _BY_NAME:
            raise ValueError(f"`policy` must be {allowed}. Received: policy={policy!r}")
        return _build(_BY_NAME[policy.lower()], settings)
    if isinstance(policy, type) and issubclass(policy, Dynamic | Static | NoScaling):
        raise TypeError(
            f"`policy` must be an instance: write tfscale.{policy.__name__}(...), "
            f"not tfscale.{policy.__name__}. Received: policy={policy}"
        )
    raise TypeError(f"`policy` must be {allowed}. Received: policy={policy!r}")


def _build(kind: type, settings: dict[str, Any]) -> Policy:
    known = [field.name for field in dataclasses.fields(kind)]
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise ValueError(
            f"{kind.__name__} has no setting {', '.join(map(repr, unknown))}. "
            f"It has: {', '.join(known) or 'none'}."
        )
    if kind is Static and "scale" not in settings:
        raise ValueError("The static policy needs its scale: write tfscale.wrap(optimizer, 1024.0)")
    return kind(**settings)


def to_config(policy: Policy) -> dict[str, Any]:
    """A plain dictionary that `get` turns back into an equal policy."""
    for name, kind in _BY_NAME.items():
        if kind is type(policy):
            return {"name": name, **dataclasses.asdict(policy)}
    raise TypeError(
        "Only tfscale's own policies can be saved, a subclass cannot. Received: "
        f"policy={policy} of type {type(policy).__name__}"
    )
