"""Finds what a tensor of a graph is computed from."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfscale import _compat

# Types of operations: those that read a variable or rows of it, that call a `tf.function`, and
# those of control flow.
READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
CALLS = ("PartitionedCall", "StatefulPartitionedCall")
BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase", "While", "StatelessWhile")

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
    return [operation for operation, _ in _visit(tensors)]


def marks_reached(
    tensors: list[Any], marks: dict[Key, int], unseen_types: Sequence[str], unseen: int
) -> list[int]:
    """Which marks each of `tensors` is computed from; the search stops at a mark.

    Args:
        tensors: tensors of the graph being traced, or of one around it.
        marks: from the `key` of a marked operation to its bits.
        unseen_types: the types of operations that may hide a marked one.
        unseen: the bits of such an operation.

    Returns:
        For each tensor, the bitwise or of all bits reached.
    """
    bits: dict[Key, int] = {}
    for operation, inputs in _visit(tensors, marks):
        found = marks.get(key(operation))
        if found is None:
            found = unseen if operation.type in unseen_types else 0
            for tensor in inputs:
                found |= bits.get(key(tensor.op), 0)
        bits[key(operation)] = found
    return [bits.get(key(t.op), 0) if hasattr(t, "graph") else 0 for t in tensors]


def from_variables(tensors: Iterable[Any]) -> Iterator[Any]:
    """The operations between floating variables and `tensors`, including the reads."""
    depends: set[Key] = set()
    for operation, inputs in _visit(tensors):
        reads = any(key(t) in depends or _is_floating_variable(operation, t) for t in inputs)
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


def _visit(tensors: Iterable[Any], ends: Container[Key] = ()) -> Iterator[tuple[Any, list[Any]]]:
    """The operations that `tensors` are computed from, each after its inputs and with them.

    Args:
        tensors: list of tensors; eager ones have no operation.
        ends: the operations behind which nothing is visited.
    """
    done: set[Key] = set()
    captured: dict[int, dict[str, Any]] = {}
    stack: list[tuple[Any, Any]] = [(t.op, None) for t in tensors if hasattr(t, "graph")]
    while stack:
        operation, inputs = stack.pop()
        if inputs is not None:
            yield operation, inputs
        elif key(operation) not in done:
            done.add(key(operation))
            inputs = [] if key(operation) in ends else _inputs(operation, captured)
            stack.append((operation, inputs))
            stack.extend((t.op, None) for t in inputs)


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
