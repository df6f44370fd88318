"""Why is no step applied any more? The data, the range of float16, or the learning rate.

What the counters, the weights and one batch tell is put together once, when a run is stalled, so
that it may cost an eager pass over the model. No step in between pays for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale import dtypes, owners, policies
from tfscale.diagnostics.nonfinite import NonFiniteReport, find_nonfinite
from tfscale.record import remedies

# How many times the largest weight of the begin is no normal growth any more.
GROWN = 10.0
_NAMED = 3


@dataclasses.dataclass(frozen=True)
class Largest:
    """The weight of the largest magnitude."""

    path: str
    magnitude: float


def largest_weight(model: keras.Model) -> Largest:
    """The largest magnitude among the trainable weights, read from the device at once."""
    weights = [v for v in model.trainable_variables if tf.as_dtype(v.dtype).is_floating]
    if not weights:
        return Largest("", 0.0)
    tensors = [tf.convert_to_tensor(v) for v in weights]
    # Not the maximum of `abs`, which would copy every table.
    extremes = [tf.maximum(tf.reduce_max(t), -tf.reduce_min(t)) for t in tensors]
    magnitudes = tf.stack([tf.cast(e, tf.float32) for e in extremes]).numpy()
    i = int(np.argmax(magnitudes))
    return Largest(weights[i].path, float(magnitudes[i]))


def explain(model: keras.Model, start: Largest, before, now, batch: Any = None) -> str:
    """The cause of a stall and its remedy, as far as can be told.

    Args:
        model: the model in training.
        start: its `largest_weight` when training began.
        before, now: records of its optimizer; what happened between them is looked at.
        batch: `(x, y)` or `(x, y, sample_weight)` to look for the layer with, or None.

    Returns:
        Text of one or more lines.
    """
    ruined = owners.not_finite(model.trainable_variables)
    if ruined:
        rate = ", and lower the learning rate if an update ruined them" if now.applied else ""
        return (
            f"Weights are not finite: {_names(ruined)}. No step can be applied until they are put "
            f"back: load weights that were saved before{rate}."
        )
    # Without metrics and seeds. What is not trained need not be the cause, but is to be mended too.
    state = _state(owners.not_finite(model.non_trainable_weights))
    grown = _grown(model, start)
    if batch is None:
        return f"{grown or _from_counters(model, before, now)}{state}"
    report = find_nonfinite(model, batch)
    verdict = _from_report(report, grown, now) or _elsewhere(model, before, now)
    return f"{verdict}{state}\n{report}"


def _state(paths: list[str]) -> str:
    """What is to be said of untrained weights that are not finite; empty if there are none."""
    if not paths:
        return ""
    return (
        f" Not finite either: {_names(paths)}, which the optimizer does not guard. Put them back, "
        "from saved weights or with `variable.assign(...)`. Keras' own train step writes such "
        "state before the optimizer can skip; tfscale.compile(model, optimizer, ...) keeps a "
        "skipped step from writing it."
    )


def _grown(model, start: Largest) -> str:
    """What is to be said of weights that have grown beyond measure; empty if they have not."""
    now = largest_weight(model)
    if now.magnitude <= GROWN * max(start.magnitude, 1.0):
        return ""
    rate = float(tf.convert_to_tensor(model.optimizer.learning_rate))
    return (
        f"The learning rate is too high ({rate:g}): the largest weight, in {now.path}, is "
        f"{now.magnitude:.3g} and no weight was larger than {start.magnitude:.3g} when "
        "training began. Load weights from before and lower the learning rate."
    )


def _from_report(report: NonFiniteReport, grown: str, now) -> str:
    """The verdict on the batch of `data`; empty if it has nothing to do with the stall."""
    if report.loss is None or not np.isfinite(report.loss):
        if report.inputs:
            names = _names([bad.name for bad in report.inputs])
            return (
                f"The data is not finite: NaN or infinity in {names}. No scale can mend that: "
                "clean the data, or leave such samples out."
            )
        if report.forward is None:
            return ""
        where = _where(report.forward)
        if grown:
            return f"{grown} It shows first in {where}."
        if report.forward.finite_in_float32:
            return (
                f"The forward pass overflows float16 in {where}, which no loss scale can mend: run "
                'it in float32 (dtype="float32"), scale its input down, or train in bfloat16.'
            )
        return (
            f"The forward pass is not finite in {where}, and wider numbers do not mend it: look "
            "for a division by zero, a logarithm or a root of zero, or weights that have grown."
        )
    if report.backward is None:
        return ""
    if grown:
        return grown
    where = f"{_where(report.backward)} at loss scale {policies.scale_text(report.scale)}"
    rate = "lower the learning rate" if now.applied else "scale down the loss itself"
    zero = "look for sqrt, log, norm or a division at 0"
    if report.backward.finite_in_float32:
        return (
            f"The gradient overflows in {where}: run it in float32 "
            f'(dtype="float32"), {rate}, or train in bfloat16.'
        )
    if report.backward.finite_in_float32 is None:
        return f"The gradient is not finite in {where}: {zero}, or {rate}."
    return (
        f"The gradient is not finite in {where}, and wider numbers do not mend it: {zero}, or for "
        "a huge loss."
    )


def _where(found) -> str:
    """The place of what is not finite, as a sentence names it."""
    return f"layer {found.layer!r}" if found.layer else "the loss"


def _elsewhere(model, before, now) -> str:
    """The verdict if the batch of `data` is fine."""
    if _main_reason(before, now) == "skipped_loss":
        return (
            "The batch given as `data` is finite from its inputs to its gradients, but the loss of "
            "the batches in training is not: look for NaN, infinity or huge values in their inputs "
            "and targets."
        )
    return f"The batch given as `data` shows none of it. {_from_counters(model, before, now)}"


def _main_reason(before, now) -> str:
    reasons = ("skipped_loss", "skipped_overflow", "skipped_linked")
    return max(reasons, key=lambda reason: getattr(now, reason) - getattr(before, reason))


def _from_counters(model, before, now) -> str:
    reason = _main_reason(before, now)
    if reason == "skipped_loss":
        return _bad_loss(model)
    if reason == "skipped_linked":
        return (
            "The gradients or losses of a linked optimizer were not finite; this one's were. "
            "Look at the record() of the others."
        )
    new = {p: n - before.nonfinite.get(p, 0) for p, n in now.nonfinite.items()}
    # Backwards an infinity spreads from the loss to the inputs: the last layer is the first hit.
    guilty = [v.path for v in reversed(model.trainable_variables) if new.get(v.path, 0) > 0]
    names = f" of {_names(guilty)}" if guilty else ""
    remedy = _overflow_remedy(before, now)
    return f"The loss was finite, the gradients{names} were not. {remedy}"


def _bad_loss(model) -> str:
    half = dtypes.uses_float16([], model.trainable_variables) is not False
    forward = (
        "the forward pass overflows float16" if half else "a layer divides by zero or the like"
    )
    cause = f"and the weights are finite: either the data holds NaN or infinity, or {forward}"
    if owners.not_finite(model.non_trainable_weights):  # they are named in a sentence of their own
        cause = (
            f"and the trained weights are finite: the data holds NaN or infinity, {forward}, or it "
            "comes from weights that are not trained"
        )
    return (
        f"The loss was not finite before it was scaled, which no scale can mend, {cause}. "
        "StallGuard(..., data=(x, y)) with one batch tells which of them and names the layer, as "
        "does tfscale.find_nonfinite(model, (x, y))."
    )


def _overflow_remedy(before, now) -> str:
    otherwise = remedies(now.applied > 0, "run that layer in float32", "or train in bfloat16") + "."
    if now.is_at_floor:
        return f"The scale is at its floor and they are not finite all the same: {otherwise}"
    if now.policy == "static":
        smaller = policies.scale_text(now.scale / 16)
        return (
            f"The scale of {policies.scale_text(now.scale)} is constant: take a smaller one, as "
            f"tfscale.wrap(optimizer, {smaller}), or the policy tfscale.Dynamic(), which finds "
            f"one. If that does not help, {otherwise}"
        )
    if now.policy == "none":
        return f"There is no loss scale to lower: {otherwise}"
    if now.scale >= before.scale:
        return f"The scale did not fall: {otherwise}"
    first, last = policies.scale_text(before.scale), policies.scale_text(now.scale)
    return (
        f"The scale fell from {first} to {last} and may yet reach a value that "
        "fits: start lower with tfscale.wrap(optimizer, initial_scale=...), or take a larger "
        f"`patience`. If that does not help, {otherwise}"
    )


def _names(paths: Iterable[str]) -> str:
    paths = list(paths)
    more = len(paths) - _NAMED
    return ", ".join(paths[:_NAMED]) + (f" and {more} more" if more > 0 else "")
