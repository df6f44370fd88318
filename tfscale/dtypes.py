"""Does this loss depend on float16 arithmetic? The question that `Auto` asks, once a trace."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import keras
import tensorflow as tf

from tfscale import _compat

# Functions that graphs call (branches, loops, nested `tf.function`s) name their bodies here.
_FUNCTION_ATTRIBUTES = ("f", "then_branch", "else_branch", "body", "cond", "branches", "forward")


def uses_float16(tensors, variables: Iterable) -> bool:
    """Whether float16 arithmetic lies between the variables and `tensors`.

    In a graph the operations between the floating variables and `tensors` are looked at: what a
    model is called, and what the global policy says now, do not matter. In eager code there is no
    graph, so the layers that own `variables` are asked for their compute dtype.

    Args:
        tensors: nested structure of tensors: losses or gradients.
        variables: the trainable variables as far as they are known (eager code only).

    Returns:
        True where float16 is seen or, in eager code without known variables, where any layer
        that is alive computes in float16.
    """
    tensors = [t for t in tf.nest.flatten(tensors) if isinstance(t, tf.Tensor)]
    if any(tensor.dtype == tf.float16 for tensor in tensors):
        return True
    if tf.executing_eagerly():
        return _layers_use_float16(list(variables))
    return _graph_uses_float16(tensors)


def _layers_use_float16(variables) -> bool:
    if any(v.dtype in ("float16", tf.float16) for v in variables):
        return True
    wanted = {id(v) for v in variables}
    # Keras variables do not know their layer, and a loss in eager code does not know its model.
    layers = [obj for obj in gc.get_objects() if isinstance(obj, keras.layers.Layer)]
    for layer in layers:
        if getattr(layer, "compute_dtype", None) != "float16":
            continue
        # A composite's own compute dtype says nothing about the layers in it.
        own = _compat.own_variables(layer)
        if (not wanted and own) or any(id(v) in wanted for v in own):
            return True
    return False


def _graph_uses_float16(tensors) -> bool:
    operations = _ancestors(tensors)
    float16_functions: dict[str, bool] = {}
    depends = set()  # names of tensors that are computed from a floating variable
    for operation in operations:
        reads = any(
            t.name in depends or _is_floating_variable(operation, t) for t in operation.inputs
        )
        if operation.type in ("Placeholder", "Const", "StopGradient") or not reads:
            continue
        depends.update(t.name for t in operation.outputs)
        if any(t.dtype == tf.float16 for t in operation.outputs):
            return True
        if any(_function_uses_float16(operation, f, float16_functions) for f in _bodies(operation)):
            return True
    return False


def _is_floating_variable(operation, tensor) -> bool:
    if tensor.dtype != tf.resource:
        return False
    if operation.type in ("ReadVariableOp", "ResourceGather", "ResourceGatherNd"):
        return operation.get_attr("dtype").is_floating
    # A variable handed to a branch, loop or nested function: its dtype is seen in there.
    return True


def _ancestors(tensors) -> list:
    """The operations that `tensors` are computed from, inputs before outputs."""
    order: list = []
    done = set()
    stack = [(t.op, False) for t in tensors if hasattr(t, "graph")]
    while stack:
        operation, expanded = stack.pop()
        if expanded:
            order.append(operation)
        elif operation.name not in done:
            done.add(operation.name)
            stack.append((operation, True))
            stack.extend((t.op, False) for t in operation.inputs if t.op.name not in done)
    return order


def _bodies(operation) -> list[str]:
    names = []
    for key in _FUNCTION_ATTRIBUTES:
        if key in operation.node_def.attr:
            value = operation.node_def.attr[key]
            names += [f.name for f in (value.list.func or [value.func]) if f.name]
    return names


def _function_uses_float16(operation, name: str, known: dict[str, bool]) -> bool:
    """Whether any operation in the function `name`, or in what it calls, yields float16."""
    if not known:
        library = operation.graph.as_graph_def().library.function
        calls = {}
        for function in library:
            attributes = [a for node in function.node_def for a in node.attr.values()]
            half = tf.float16.as_datatype_enum
            known[function.signature.name] = any(
                a.type == half or half in a.list.type for a in attributes
            )
            calls[function.signature.name] = {
                f.name for a in attributes for f in [*a.list.func, a.func] if f.name
            }
        for _ in calls:  # spread from the called to the callers
            for caller, called in calls.items():
                known[caller] = known[caller] or any(known.get(c, False) for c in called)
    return known.get(name, False)
