"""Say why steps are no longer applied: the data, the range of float16, or the learning rate.

This runs once, when a run has stalled. So it may run the model eagerly; no other step pays for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfscale import float16
from tfscale.diagnostics.nonfinite import find_nonfinite, too_high_rate
from tfscale.diagnostics.nonfinite_report import FirstNonFinite, NonFiniteReport
from tfscale.policies import scale_text
from tfscale.record import Record
from tfscale.reporting import nonfinite_paths
from tfscale.skips import REPLACE_STATE, remedies

_NAMED = 3


def explain(model: keras.Model, before: Record, now: Record, batch: Any = None) -> str:
    """Name the cause of a stall and its remedy, as far as they are known.

    Args:
        model: the model in training.
        before: an earlier record of an optimizer; only what happened since then counts.
        now: the current record.
        batch: `(x, y)` or `(x, y, sample_weight)` to search for the layer with, or None.

    Returns:
        Text of one or more lines.
    """
    nonfinite = nonfinite_paths(model.trainable_variables)
    if nonfinite:
        rate = ", and lower the learning rate if an update caused it" if now.applied else ""
        return (
            f"Weights are not finite: {_names(nonfinite)}. No step can be applied until they are "
            f"replaced: load weights that were saved before{rate}."
        )
    # Without metrics and seeds. Such state may not be the cause, but must be replaced too.
    state = _names(nonfinite_paths(model.non_trainable_weights))
    if state:
        state = f" Not finite either: {state}, which the optimizer does not guard. {REPLACE_STATE}"
    grown = too_high_rate(model)
    if batch is None:
        return f"{grown or _from_counters(model, before, now)}{state}"
    report = dataclasses.replace(find_nonfinite(model, batch), cause="")  # said once
    verdict = _from_report(report, grown, now)
    if not verdict and _main_reason(before, now) == "skipped_loss":
        verdict = (
            "The batch given as `data` is finite from its inputs to its gradients, but the loss of "
            "the batches in training is not: look for NaN, infinity or huge values in their inputs "
            "and targets."
        )
    elif not verdict:
        counters = _from_counters(model, before, now)
        verdict = f"The batch given as `data` does not show the problem. {counters}"
    return f"{verdict}{state}\n{report}"


def _from_report(report: NonFiniteReport, grown: str, now: Record) -> str:
    """The cause that the batch of `data` shows; empty if it does not show the stall."""
    if report.inputs:
        names = _names([bad.name for bad in report.inputs])
        return (
            f"The data is not finite: NaN or infinity in {names}. No loss scale can fix that: "
            "clean the data, or leave such samples out."
        )
    if grown:
        return f"{grown} It shows first in {_where(report.forward)}." if report.forward else grown
    if report.loss is None or not np.isfinite(report.loss):
        return _from_forward(report)
    if report.backward is None:
        return ""
    where = f"{_where(report.backward)} at loss scale {scale_text(report.scale)}"
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
        f"The gradient is not finite in {where}, and higher precision does not fix it: {zero}, or "
        "for a huge loss."
    )


def _from_forward(report: NonFiniteReport) -> str:
    if report.forward is None:
        return ""
    where = _where(report.forward)
    if report.forward.finite_in_float32:
        return (
            f"The forward pass overflows float16 in {where}, which no loss scale can fix: run "
            'it in float32 (dtype="float32"), scale its input down, or train in bfloat16.'
        )
    return (
        f"The forward pass is not finite in {where}, and higher precision does not fix it: look "
        "for a division by zero, a logarithm or a root of zero, or weights that have grown."
    )


def _where(first: FirstNonFinite) -> str:
    return f"layer {first.layer!r}" if first.layer else "the loss"


def _main_reason(before: Record, now: Record) -> str:
    reasons = ("skipped_loss", "skipped_overflow", "skipped_linked")
    return max(reasons, key=lambda reason: getattr(now, reason) - getattr(before, reason))


def _from_counters(model: keras.Model, before: Record, now: Record) -> str:
    reason = _main_reason(before, now)
    if reason == "skipped_loss":
        return _loss_text(model)
    if reason == "skipped_linked":
        return (
            "The gradients or losses of a linked optimizer were not finite; this one's were. "
            "Look at the record() of the others."
        )
    new = {p: n - before.nonfinite.get(p, 0) for p, n in now.nonfinite.items()}
    # An infinity spreads backwards from the loss to the inputs: the last layer is hit first.
    paths = [v.path for v in reversed(model.trainable_variables) if new.get(v.path, 0) > 0]
    names = f" of {_names(paths)}" if paths else ""
    return f"The loss was finite, the gradients{names} were not. {_overflow_remedy(before, now)}"


def _loss_text(model: keras.Model) -> str:
    half = float16.uses_float16([], model.trainable_variables)
    layers = "the forward pass overflows float16" if half else "a layer divides by zero or the like"
    weights, causes = "weights", ["the data holds NaN or infinity", layers]
    if nonfinite_paths(model.non_trainable_weights):  # `explain` names them
        weights = "trained weights"
        causes.append("it comes from weights that are not trained")
    return (
        "The loss was not finite before it was scaled, which no loss scale can fix, and the "
        f"{weights} are finite: either {', or '.join(causes)}. StallGuard(..., data=(x, y)) with "
        "one batch says which of them and names the layer, as does "
        "tfscale.find_nonfinite(model, (x, y))."
    )


def _overflow_remedy(before: Record, now: Record) -> str:
    beyond_scale = now.skips(before).beyond_scale()
    if beyond_scale is not None:
        return f"{beyond_scale[0].upper()}{beyond_scale[1:]}."
    otherwise = remedies(now.applied > 0, "run that layer in float32", "or train in bfloat16") + "."
    if now.policy == "static":
        return (
            f"The scale of {scale_text(now.scale)} is constant: use a smaller one, such as "
            f"tfscale.wrap(optimizer, {scale_text(now.scale / 16)}), or the policy "
            f"tfscale.Dynamic(), which finds one. If that does not help, {otherwise}"
        )
    return (
        f"The scale went from {scale_text(before.scale)} to {scale_text(now.scale)} and may still "
        "reach a value that fits: start lower with tfscale.wrap(optimizer, initial_scale=...), or "
        f"use a larger `patience`. If that does not help, {otherwise}"
    )


def _names(paths: Sequence[str]) -> str:
    more = len(paths) - _NAMED
    return ", ".join(paths[:_NAMED]) + (f" and {more} more" if more > 0 else "")
