"""Finds what a tensor of a graph is computed from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from tfscale import _compat

READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
"""The types of the operations that read a variable, or rows of it."""

CALLS = ("PartitionedCall", "StatefulPartitionedCall")
"""The types of the operations that call a `tf.function`."""

BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase", "While", "StatelessWhile")
"""The types of the operations of control flow."""

Key = tuple[int, str]


def key(of: Any) -> Key:
    """Identifies an operation or a tensor of a graph."""
    return id(of.graph), of.name


def function_graphs() -> list[Any]:
    """The graph being traced, and the graphs around it up to that of its `tf.function`.

    A branch or the body of a loop has its own graph, which belongs to the function around it. A
    nested `tf.function` does not: it may be traced once and called from anywhere.

    Returns:
        List of graphs, innermost first; empty in eager code.
    """
    if tf.executing_eagerly():
        return []
    graphs = [tf.compat.v1.get_default_graph()]
    while _compat.is_control_flow(graphs[-1]):
        graphs.append(graphs[-1].outer_graph)
    return graphs


def ancestors(tensors: Iterable[Any]) -> list[Any]:
    """The operations that `tensors` are computed from, inputs before outputs."""
    return list(_visit(tensors, lambda operation: False))


def marks_reached(
    tensors: Iterable[Any], marks: dict[Key, int], passed: Callable[[Any], int]
) -> list[int]:
    """Which marks each of `tensors` is computed from; the search stops at a mark.

    Args:
        tensors: tensors of the graph being traced, or of one around it.
        marks: from the `key` of a marked operation to its bits.
        passed: function that returns the bits of any other operation on the way.

    Returns:
        For each tensor, the bitwise or of all bits reached.
    """
    tensors = list(tensors)
    bits: dict[Key, int] = {}
    captured: dict[int, dict[str, Any]] = {}
    for operation in _visit(tensors, lambda operation: key(operation) in marks):
        found = marks.get(key(operation))
        if found is None:
            found = passed(operation)
            for tensor in _inputs(operation, captured):
                found |= bits.get(key(tensor.op), 0)
        bits[key(operation)] = found
    return [bits.get(key(t.op), 0) if hasattr(t, "graph") else 0 for t in tensors]


def from_variables(tensors: Iterable[Any]) -> Iterator[Any]:
    """The operations between floating variables and `tensors`, including the reads."""
    depends: set[Key] = set()
    captured: dict[int, dict[str, Any]] = {}
    for operation in ancestors(tensors):
        reads = any(
            key(t) in depends or _is_floating_variable(operation, t)
            for t in _inputs(operation, captured)
        )
        if reads and operation.type not in ("Const", "StopGradient"):
            depends.update(key(t) for t in operation.outputs)
            yield operation


def shares_forward_pass(grads: Iterable[Any], losses: Iterable[Any]) -> bool:
    """Whether `grads` are computed from operations between the variables and `losses`.

    For gradients from another function, or accumulated in a variable, this graph does not show it.
    """
    made_from = {key(operation) for operation in ancestors(grads)}
    forward = (op for op in from_variables(losses) if op.type not in READS)
    return any(key(operation) in made_from for operation in forward)


def _visit(tensors: Iterable[Any], is_end: Callable[[Any], bool]) -> Iterator[Any]:
    """The operations that `tensors` are computed from, inputs first, up to each `is_end`."""
    done: set[Key] = set()
    captured: dict[int, dict[str, Any]] = {}
    stack = [(t.op, False) for t in tensors if hasattr(t, "graph")]
    while stack:
        operation, expanded = stack.pop()
        if expanded:
            yield operation
        elif key(operation) not in done:
            done.add(key(operation))
            stack.append((operation, True))
            if not is_end(operation):
                stack.extend((t.op, False) for t in _inputs(operation, captured))


def _inputs(operation: Any, captured: dict[int, dict[str, Any]]) -> list[Any]:
    """The inputs of an operation; for a captured placeholder, the tensor of the outer graph.

    `captured` caches for each graph which tensor each placeholder stands for.
    """
    if operation.type != "Placeholder":
        return list(operation.inputs)
    graph = operation.graph
    if id(graph) not in captured:
        pairs = getattr(graph, "captures", ())
        captured[id(graph)] = {inner.name: outer for outer, inner in pairs}
    outer = captured[id(graph)].get(operation.outputs[0].name)
    return [outer] if hasattr(outer, "graph") else []


def _is_floating_variable(operation: Any, tensor: Any) -> bool:
    if tensor.dtype != tf.resource or operation.type == "Placeholder":
        return False
    if operation.type in READS:
        return operation.get_attr("dtype").is_floating
    # A branch, loop or nested function takes the variable: its dtype shows inside.
    return True
