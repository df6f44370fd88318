"""Counters of steps and skips, kept on the device and read only on request.

One integer vector holds all counters and, after them, a ring of the last changes of the scale, so
that a step costs one assignment and no branch. `record.py` turns them into plain Python.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

# Positions in the vector of counters.
(
    STEPS,
    SKIPPED_OVERFLOW,
    SKIPPED_LOSS,
    SKIPPED_LINKED,
    GROWTHS,
    BACKOFFS,
    AT_FLOOR,
    RETRIES,
    RUN,
    LONGEST_RUN,
    LAST_SKIP,
) = range(11)
COUNTERS = 11

CHANGES = 256  # changes of the scale that are remembered
# One more place: every step writes its new scale to the place after the last change, and only a
# change advances that place, so no branch is needed.
_RING = CHANGES + 1
SIZE = COUNTERS + _RING
_HIGH = 2**32  # a place holds the number of the step in its high half, the bits of the scale below


def advance(
    counters: tf.Tensor,
    *,
    finite: tf.Tensor,
    applied: tf.Tensor,
    loss_finite: tf.Tensor,
    before: tf.Tensor,
    after: tf.Tensor,
    floor: float,
) -> tf.Tensor:
    """The counters after this step: a pure function of tensors.

    Args:
        counters: int64 tensor of shape `[SIZE]`.
        finite: scalar bool, every gradient was finite.
        applied: scalar bool, so were the gradients of the linked optimizers.
        loss_finite: scalar bool, the loss was finite.
        before: scalar float32, the scale of this step.
        after: scalar float32, the scale of the next step.
        floor: float, the lowest scale of the policy.

    Returns:
        int64 tensor of shape `[SIZE]`.
    """
    # Split once: an index into a tensor is four operations.
    totals, tail, ring = tf.split(counters, [RUN, COUNTERS - RUN, _RING])
    steps, *_, growths, backoffs, _, _ = tf.unstack(totals)
    run, longest, last_skip = tf.unstack(tail)
    own = tf.logical_not(finite)
    overflow = tf.logical_and(own, loss_finite)
    bad_loss = tf.not_equal(own, overflow)
    linked = tf.not_equal(finite, applied)
    at_floor = tf.logical_and(overflow, after <= floor)
    events = [True, overflow, bad_loss, linked, after > before, after < before, at_floor, False]
    totals += tf.cast(tf.stack(events), tf.int64)
    step = steps + 1
    run = tf.where(tf.equal(last_skip, steps), run, np.int64(0))  # of the skips before this step
    run = tf.where(applied, np.int64(0), run + 1)
    longest = tf.maximum(longest, run)
    last_skip = tf.where(applied, last_skip, step)
    bits = tf.cast(tf.bitcast(after, tf.int32), tf.int64)
    here = tf.equal(np.arange(_RING), tf.math.floormod(growths + backoffs, _RING))
    ring = tf.where(here, step * _HIGH + bits, ring)
    return tf.concat([totals, [run, longest, last_skip], ring], axis=0)


# What to add for a step that was applied and did not change the scale. A run of skips has ended if
# the last skip is not the last step, and the place for the next change is written when there is
# one.
APPLIED = np.eye(1, SIZE, STEPS, dtype="int64")[0]
# What to add before a skipped batch runs again.
RETRY = np.eye(1, SIZE, RETRIES, dtype="int64")[0]


def in_a_row(counters: np.ndarray) -> int:
    """Steps skipped since the last one that was applied."""
    return int(counters[RUN]) if counters[LAST_SKIP] == counters[STEPS] else 0


def changes(counters: np.ndarray) -> list[tuple[int, float]]:
    """The last changes of the scale, oldest first: the step that made it, and the new scale.

    Args:
        counters: int64 array of shape `[SIZE]`.
    """
    made = int(counters[GROWTHS] + counters[BACKOFFS])
    places = np.arange(max(0, made - CHANGES), made) % _RING
    steps, bits = np.divmod(counters[COUNTERS:][places], _HIGH)
    scales = bits.astype(np.int32).view(np.float32)
    return list(zip(steps.tolist(), scales.tolist(), strict=True))


def batches(counters: Any) -> Any:
    """Batches seen, each counted once however often it ran (tensor or array)."""
    return counters[STEPS] - counters[RETRIES]


def skipped(counters: Any) -> Any:
    """Batches skipped, for any reason, without those that ran again (tensor or array)."""
    skips = counters[SKIPPED_OVERFLOW] + counters[SKIPPED_LOSS] + counters[SKIPPED_LINKED]
    return skips - counters[RETRIES]
