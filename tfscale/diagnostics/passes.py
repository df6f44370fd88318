"""The tensors of a forward and a backward pass in order, with statistics of each.

A fault in a layer first shows in its output, or in the gradient that it passes on. So the order is:
the input of a layer, then its output; and backward, the gradient of the output, then those of the
variables and of the input.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale import _compat
from tfscale.diagnostics.batches import as_tensors
from tfscale.diagnostics.layers import HALF, Call, ForwardPass, float_tensors
from tfscale.gradients import values


@dataclasses.dataclass(frozen=True)
class Stats:
    """Statistics of a floating tensor; `largest` is the largest finite magnitude."""

    dtype: str
    size: int
    nans: int
    infs: int
    largest: float

    @classmethod
    def of(cls, tensor: tf.Tensor) -> Stats:
        """Read a floating tensor."""
        finite = tf.math.is_finite(tensor)
        size = int(tf.size(finite))
        nans = int(tf.math.count_nonzero(tf.math.is_nan(tensor)))
        infs = size - nans - int(tf.math.count_nonzero(finite))
        magnitude = tf.where(finite, tf.abs(tensor), tf.zeros_like(tensor))
        largest = float(tf.reduce_max(magnitude)) if size else 0.0
        return cls(tensor.dtype.name, size, nans, infs, largest)

    @property
    def finite(self) -> bool:
        """Whether every value is."""
        return not (self.nans or self.infs)


@dataclasses.dataclass(frozen=True, eq=False)
class TensorRecord:
    """A tensor of a pass.

    Attributes:
        call: the call of the layer that it belongs to; None for the loss.
        place: "input", "output", "loss" or the name of a variable.
        index: its number among the tensors of that place.
        stats: statistics of the tensor.
        largest_before: the largest magnitude just before it, None if there was nothing before.
        producers: for the gradient of an output, the layers that it comes from.
    """

    call: Call | None
    place: str
    index: int
    stats: Stats
    largest_before: float | None
    producers: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """The same for the same tensor of another run."""
        call = self.call
        return call and (call.name, call.number), self.place, self.index


def forward(recorded: ForwardPass, x: Any) -> Iterator[TensorRecord]:
    """Yield the tensors of the forward pass in the order of execution."""
    known: dict[int, Stats] = {}

    def stats(tensor: tf.Tensor) -> Stats:
        if id(tensor) not in known:
            known[id(tensor)] = Stats.of(tensor)
        return known[id(tensor)]

    def records(
        call: Call | None, place: str, tensors: Sequence[tf.Tensor], before: Sequence[tf.Tensor]
    ) -> Iterator[TensorRecord]:
        largest_before = max((stats(t).largest for t in before), default=None)
        for i, t in enumerate(tensors):
            yield TensorRecord(call, place, i, stats(t), largest_before)

    before = inputs = float_tensors(as_tensors(x))  # kept, because `known` goes by their ids
    for event in recorded.events:
        yield from records(event.call, event.kind, event.tensors, before)
        before = event.tensors
    if recorded.loss is not None:
        yield from records(None, "loss", [recorded.loss], recorded.outputs or inputs)


def backward(recorded: ForwardPass) -> Iterator[TensorRecord]:
    """Yield the gradients in reverse order; none without a loss."""
    if not recorded.losses:
        return
    owners, users = recorded.owners(), _users(recorded)
    sources: list[tuple[Call, str, int, Any, tuple[str, ...]]] = []
    for event in reversed(recorded.events):
        if event.kind == "input":
            variables = getattr(event.call.operation, "variables", ())
            own = [v for v in variables if v.trainable and owners.get(id(v)) is event.call]
            sources += [(event.call, v.name, 0, v, ()) for v in own]
        for i, t in enumerate(event.tensors):
            used_by = tuple(users.get(id(t), ()))
            if event.kind == "output":
                sources.append((event.call, event.kind, i, t, used_by))
            # If several layers use a tensor, its gradient is their sum and shows nothing about one
            # of them. It is examined at the output that they use.
            elif len(used_by) == 1:
                sources.append((event.call, event.kind, i, t, ()))
    gradients = recorded.gradients([source[3] for source in sources])
    before = None
    for (call, place, i, _, producers), gradient in zip(sources, gradients, strict=True):
        if gradient is not None:
            stats = Stats.of(values(gradient))
            yield TensorRecord(call, place, i, stats, before, producers)
            before = max(before or 0.0, stats.largest)


def _users(recorded: ForwardPass) -> dict[int, list[str]]:
    """From the id of a tensor to the innermost layers that receive it, by name and call."""
    users: dict[int, list[str]] = {}
    for event in recorded.events:
        if event.kind == "output" or event.call is recorded.events[0].call:
            continue
        name = event.call.name
        for tensor in event.tensors:
            others = users.setdefault(id(tensor), [])
            # A block that passes its input on to an inner layer is not a user itself.
            others[:] = [other for other in others if not name.startswith(other + "/")]
            others.append(name)
    return users


class _ComputeInFloat32(keras.DTypePolicy):
    """A layer's policy with another compute dtype; its variables keep their dtype."""

    @property
    def compute_dtype(self) -> str:
        return "float32"


@contextlib.contextmanager
def in_float32(recorded: ForwardPass) -> Iterator[None]:
    """Within the context, recorded layers that compute in half precision compute in float32.

    Raises:
        NotImplementedError: a layer has a policy of another kind, such as a quantized one.
    """
    layers = {id(e.call.operation): e.call.operation for e in recorded.events}.values()
    half = [layer for layer in layers if getattr(layer, "compute_dtype", None) in HALF]
    casts = [c for layer in layers for c in _compat.casts(layer) if c.dtype in HALF]
    if any(type(layer.dtype_policy) is not keras.DTypePolicy for layer in half):
        raise NotImplementedError
    saved = [(layer, "dtype_policy", layer.dtype_policy) for layer in half]
    saved += [(cast, "dtype", cast.dtype) for cast in casts]
    try:
        for layer in half:
            layer.dtype_policy = _ComputeInFloat32(layer.dtype_policy.name)
        for cast in casts:
            cast.dtype = "float32"
        yield
    finally:
        for owner, attribute, value in saved:
            setattr(owner, attribute, value)
