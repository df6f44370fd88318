"""The flight recorder: what happened, counted on the device and read only on request.

One integer vector holds all counters, so that a step costs one assignment.
"""

from __future__ import annotations

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
) = range(10)
COUNTERS = 10


def advance(counters, *, finite, loss_finite, partners_finite, before, after, floor):
    """The counters after this step: a pure function of tensors.

    Args:
        counters: int64 tensor of shape `[COUNTERS]`.
        finite: scalar bool, every gradient was finite.
        loss_finite: scalar bool, the loss was finite.
        partners_finite: scalar bool, gradients and losses of the linked optimizers were finite.
        before: scalar float32, the scale of this step.
        after: scalar float32, the scale of the next step.
        floor: float, the lowest scale of the policy.

    Returns:
        int64 tensor of shape `[COUNTERS]`.
    """
    bad_loss = tf.logical_not(loss_finite)
    overflow = tf.logical_and(loss_finite, tf.logical_not(finite))
    own = tf.logical_or(bad_loss, overflow)
    linked = tf.logical_and(tf.logical_not(own), tf.logical_not(partners_finite))
    skipped = tf.logical_or(own, linked)
    at_floor = tf.logical_and(overflow, after <= floor)
    events = (True, overflow, bad_loss, linked, after > before, after < before, at_floor, False)
    events = tf.stack([tf.convert_to_tensor(event) for event in events])
    run = tf.where(skipped, counters[RUN] + 1, tf.zeros([], tf.int64))
    longest = tf.maximum(counters[LONGEST_RUN], run)
    totals = counters[:RUN] + tf.cast(events, tf.int64)
    return tf.concat([totals, tf.stack([run, longest])], axis=0)


def retry(counters):
    """The counters when a batch that was skipped is about to be run again."""
    return counters + tf.one_hot(RETRIES, COUNTERS, dtype=counters.dtype)


def batches(counters):
    """Batches seen, from a vector of counters: each once, however often it was run."""
    return counters[STEPS] - counters[RETRIES]


def skipped(counters):
    """Batches left out, whatever the reason, from a vector of counters (tensor or array).

    A batch that was skipped and run again is not left out.
    """
    skips = counters[SKIPPED_OVERFLOW] + counters[SKIPPED_LOSS] + counters[SKIPPED_LINKED]
    return skips - counters[RETRIES]


def advice(new_skips, new_steps, by_loss, scale, at_floor) -> str:
    """What `fit` says when it ends and steps were skipped, or the scale sits at its floor."""
    share = new_skips / new_steps
    text = f"{new_skips:,} of {new_steps:,} training steps were skipped; loss scale {scale:g}."
    if by_loss:
        return text + (
            f" {by_loss:,} skips came from a loss that was not finite before it "
            "was scaled, which no scale can mend: look at the data and at the learning rate."
        )
    if at_floor:
        return text + (
            " The scale is at its floor, so overflows go on at any scale: lower the learning rate, "
            "run the layer that overflows in float32, or train in bfloat16."
        )
    if share <= 0.05 or (new_skips <= 20 and share < 1):
        return text + " That is normal while the scale is being found; nothing to do."
    return text + (
        " That is too many: start lower with tfscale.wrap(optimizer, initial_scale=...), take a "
        "longer growth_interval, or lower the learning rate."
    )
