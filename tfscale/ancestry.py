"""What a tensor of a graph is computed from."""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf

READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
"""The types of the operations that read a variable, or rows of it."""


def ancestors(tensors) -> list:
    """The operations that `tensors` are computed from, inputs before outputs."""
    order: list = []
    done: set[tuple[int, str]] = set()
    captured: dict = {}
    stack = [(t.op, False) for t in tensors if hasattr(t, "graph")]
    while stack:
        operation, expanded = stack.pop()
        if expanded:
            order.append(operation)
        elif _key(operation) not in done:
            done.add(_key(operation))
            stack.append((operation, True))
            stack.extend((t.op, False) for t in _inputs(operation, captured))
    return order


def from_variables(tensors) -> Iterator:
    """The operations between floating variables and `tensors`, with those that read a variable."""
    depends: set[tuple[int, str]] = set()
    captured: dict = {}
    for operation in ancestors(tensors):
        reads = any(
            _key(t) in depends or _is_floating_variable(operation, t)
            for t in _inputs(operation, captured)
        )
        if reads and operation.type not in ("Const", "StopGradient"):
            depends.update(_key(t) for t in operation.outputs)
            yield operation


def pass_by(scale, grads, losses) -> bool:
    """Whether `grads` belong to `losses` as they were before they were multiplied by `scale`.

    Gradients that were made elsewhere, or added up in a variable, are none of these losses' as far
    as this graph can tell.

    Args:
        scale: scalar tensor.
        grads: list of gradients of the same graph, or of one inside it.
        losses: list of tensors.
    """
    made_from = {_key(operation) for operation in ancestors(grads)}
    if _key(scale.op) in made_from:
        return False
    forward = (op for op in from_variables(losses) if op.type not in READS)
    return any(_key(operation) in made_from for operation in forward)


def _key(of) -> tuple[int, str]:
    """What tells operations apart, and tensors."""
    return id(of.graph), of.name


def _inputs(operation, captured: dict) -> list:
    """The inputs; for a tensor that was captured from an outer graph, that tensor.

    `captured` remembers for each graph what each of its placeholders stands for.
    """
    if operation.type != "Placeholder":
        return list(operation.inputs)
    graph = operation.graph
    if id(graph) not in captured:
        pairs = getattr(graph, "captures", ())
        captured[id(graph)] = {inner.name: outer for outer, inner in pairs}
    outer = captured[id(graph)].get(operation.outputs[0].name)
    return [outer] if hasattr(outer, "graph") else []


def _is_floating_variable(operation, tensor) -> bool:
    if tensor.dtype != tf.resource or operation.type == "Placeholder":
        return False
    if operation.type in READS:
        return operation.get_attr("dtype").is_floating
    # A variable handed to a branch, loop or nested function: its dtype is seen in there.
    return True
