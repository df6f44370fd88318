"""Count magnitudes by their base-2 exponent, exactly, and say what float16 does to them.

The exponent comes from the bits of a float32, not from a logarithm, so it is exact and the same on
every device. Powers of two are counted separately, because at the edges they round differently.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

# float16: the largest number, the smallest normal exponent, and the exponent of the magnitude that
# rounds to zero. Exactly 2**-25 lies half-way between zero and the smallest number, 2**-24, and
# rounds to zero, the even neighbour.
FLOAT16_MAX = 65504.0
SMALLEST_NORMAL = -14
ROUNDS_TO_ZERO = -25

# Bin i counts the magnitudes in [2**(i - 127), 2**(i - 126)): the exponent field of a float32.
BINS, BIAS = 255, 127


@dataclasses.dataclass(frozen=True)
class GradientRange:
    """The magnitudes of one gradient, or of many together.

    Attributes:
        name: the variable or layer.
        dtype: the dtype in which this gradient was computed.
        counted: whether it is in float16 (or would be, in a float32 model), so that the proposal
            considers it.
        zeros: how many values were exactly zero.
        largest: the largest magnitude.
        counts: 255 counts; entry i is the number of values in `[2**(i-127), 2**(i-126))`. The first
            one includes float32's subnormal numbers.
        powers: how many of these were powers of two, which round differently.
    """

    name: str
    dtype: str
    counted: bool
    zeros: int
    largest: float
    counts: tuple[int, ...]
    powers: tuple[int, ...]

    @classmethod
    def of(cls, name: str, gradient: tf.Tensor, scale: float, counted: bool) -> GradientRange:
        """Count the magnitudes of `gradient / scale`; see the class for the rest."""
        magnitude = tf.abs(tf.cast(tf.reshape(gradient, [-1]), tf.float32))
        if scale != 1:  # arithmetic may flush subnormal numbers
            magnitude = magnitude / scale
        # On the CPU: a GPU refuses to count if operations must be deterministic.
        with tf.device("CPU:0"):
            bits = tf.bitcast(magnitude, tf.int32)
            exponents = tf.bitwise.right_shift(bits, 23)
            is_power = tf.equal(tf.bitwise.bitwise_and(bits, 0x7FFFFF), 0)
            counts, powers = (
                tf.math.bincount(e, minlength=BINS, maxlength=BINS).numpy().tolist()
                for e in (exponents, tf.boolean_mask(exponents, is_power))
            )
        # Zero has exponent field 0, like float32's subnormals, but only zero has no bit set.
        zeros = powers[0]
        counts[0] -= zeros
        powers[0] = 0
        largest = float(tf.reduce_max(magnitude)) if tf.size(magnitude) else 0.0
        return cls(name, gradient.dtype.name, counted, zeros, largest, (*counts,), (*powers,))

    def __add__(self, other: GradientRange) -> GradientRange:
        """Return the range of both together."""
        return GradientRange(
            self.name,
            self.dtype if self.dtype == other.dtype else "mixed",
            other.counted,
            self.zeros + other.zeros,
            max(self.largest, other.largest),
            tuple(map(operator.add, self.counts, other.counts)),
            tuple(map(operator.add, self.powers, other.powers)),
        )

    @property
    def nonzero(self) -> int:
        """How many values were not zero."""
        return sum(self.counts)

    @property
    def zero_share(self) -> float:
        """Exact zeros, as a share of all values."""
        return self.zeros / max(self.zeros + self.nonzero, 1)

    @property
    def largest_exponent(self) -> int | None:
        """e, where the largest magnitude is in `[2**e, 2**(e+1))`; None if all are zero."""
        return exponent(self.largest) if self.largest else None

    @property
    def headroom(self) -> int | None:
        """The largest k for which no value times 2**k passes 65504; None if all are zero."""
        return math.floor(math.log2(FLOAT16_MAX / self.largest)) if self.largest else None

    def histogram(self) -> dict[int, int]:
        """Return e -> number of values in `[2**e, 2**(e+1))`, without empty bins."""
        return {i - BIAS: n for i, n in enumerate(self.counts) if n}

    def lost(self, scale: float = 1.0) -> float:
        """Return the share of the non-zero values that float16 turns into zero at a loss scale.

        Args:
            scale: a power of two; any other number counts as the one below it.
        """
        return self._below(ROUNDS_TO_ZERO, scale) / max(self.nonzero, 1)

    def subnormal(self, scale: float = 1.0) -> float:
        """Return the share of the non-zero values that float16 keeps with fewer than 11 bits.

        Args:
            scale: the loss scale, as in `lost`.
        """
        kept = self._below(SMALLEST_NORMAL, scale) - self._below(ROUNDS_TO_ZERO, scale)
        # A value of exactly 2**-14 is normal, unlike one of 2**-25, which is lost.
        return (kept - self._exactly(SMALLEST_NORMAL, scale)) / max(self.nonzero, 1)

    def _below(self, limit: int, scale: float) -> int:
        """How many values times `scale` are at most 2**limit."""
        edge = max(limit + BIAS - exponent(scale), 0)
        return sum(self.counts[:edge]) + self._exactly(limit, scale)

    def _exactly(self, power: int, scale: float) -> int:
        """How many values times `scale` are 2**power."""
        edge = power + BIAS - exponent(scale)
        return self.powers[edge] if 0 <= edge < BINS else 0

    def to_dict(self) -> dict[str, Any]:
        """Plain Python, for JSON."""
        return {
            "name": self.name,
            "dtype": self.dtype,
            "counted": self.counted,
            "values": self.zeros + self.nonzero,
            "zero_share": self.zero_share,
            "largest": self.largest,
            "headroom": self.headroom,
            "histogram": self.histogram(),
        }


def merge(name: str, ranges: Iterable[GradientRange]) -> GradientRange:
    """Return the range of all `ranges` together, without those that are not `counted`."""
    counted = [r for r in ranges if r.counted]
    if not counted:
        return GradientRange(name, "mixed", True, 0, 0.0, (0,) * BINS, (0,) * BINS)
    return dataclasses.replace(functools.reduce(operator.add, counted), name=name)


def exponent(scale: float) -> int:
    """Return e, where `scale` is in [2**e, 2**(e+1))."""
    return math.frexp(scale)[1] - 1


def percent(share: float) -> str:
    """Return two digits and "%"; a share that is not zero is never rounded to "0 %"."""
    return "0 %" if share == 0 else f"{100 * share:.2g} %" if share < 0.995 else f"{share:.1%}"
