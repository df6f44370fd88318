"""What the gradients of an update were multiplied by, and how a graph shows it."""

from __future__ import annotations

from typing import Any, NamedTuple

from tfscale import gradients, graph, misuse, trace_log
from tfscale.trace_log import FIRST_SCALE, IN_LOSS, UNSCALED, UNSEEN


class Carried(NamedTuple):
    """What gradients were multiplied by.

    Attributes:
        divisors: what to divide each gradient by: a scalar float32 tensor, or None if it is
            unscaled, was never scaled, or is None itself.
        scale: the scale of the loss, scalar float32 tensor; None if no loss was scaled.
        was_scaled: whether the loss was scaled: Python bool, or a scalar bool tensor if it is only
            known when the graph runs.
        taken: number of gradients that are already unscaled: int, or a scalar int64 tensor.
        checks: operations that must run before anything is written.
        is_known: scalar bool tensor, False if it is unknown which gradients are unscaled, so that
            the step must be skipped; None if it is known.
        from_elsewhere: whether a gradient comes from another function.
    """

    divisors: list[Any]
    scale: Any
    was_scaled: Any
    taken: Any
    checks: list[Any] = []
    is_known: Any = None
    from_elsewhere: bool = False


# Below, `owner` is the `Handoff` of an optimizer.


def seen_in_graph(
    owner: Any, grads: list[Any], *, unscaled: bool | None, to_unscale: bool
) -> tuple[list[Any], list[int], int]:
    """What each gradient must be divided by; for the arguments see `Handoff.carried`.

    Returns:
        The divisors, as in `Carried`; the indices of the gradients from another function, whose
        divisors this graph does not show; the number of unscaled gradients.

    Raises:
        ValueError: these gradients cannot belong to one update.
    """
    places = [i for i, g in enumerate(grads) if g is not None]
    tensors = [gradients.values(grads[i]) for i in places]
    trace = trace_log.current()
    if unscaled is None and not to_unscale and trace.was_given(tensors):
        raise ValueError(misuse.RESULT_UNUSED)
    scales, bits = trace.bits_reached(owner, tensors)
    divisors: list[Any] = [None] * len(grads)
    elsewhere, taken = [], 0
    for place, found in zip(places, bits, strict=True):
        own = found // FIRST_SCALE
        if unscaled is None and found & UNSCALED:
            if to_unscale:
                raise ValueError(misuse.TWICE_UNSCALED)
            if own:
                raise ValueError(misuse.MIXED)
        is_unscaled = found & UNSCALED or (found & IN_LOSS and not own)
        if unscaled or (unscaled is None and is_unscaled):
            taken += 1
        elif own and not (found & UNSEEN and unscaled is None):
            divisors[place] = scales[own.bit_length() - 1].scale
        else:
            elsewhere.append(place)
    return divisors, elsewhere, taken


def all_unscaled(owner: Any, grads: list[Any]) -> bool:
    """Whether optimizers have unscaled all of these gradients, none of which is None."""
    reached = trace_log.current().bits_reached(owner, list(map(gradients.values, grads)))[1]
    return all(found & (UNSCALED | IN_LOSS) for found in reached)


def bypassed(owner: Any, grads: list[Any]) -> bool:
    """Whether `grads` are gradients of a loss before it was scaled."""
    trace = trace_log.current()
    here = [scaled for scaled in trace.losses_of(owner) if scaled.scale is not None]
    tensors = [gradients.values(g) for g in grads if g is not None]
    if not here or any(trace.bits_reached(owner, tensors)[1]):
        return False
    return graph.shares_forward_pass(tensors, [loss for s in here for loss in s.losses])
