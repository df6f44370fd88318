"""Finds whether a loss depends on float16 arithmetic; `Auto` decides by it once per trace."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfscale import _compat, graph
from tfscale.model_optimizers import own_train_step


def uses_float16(tensors: Any, variables: Iterable[Any], *, anywhere: bool = False) -> bool | None:
    """Whether float16 arithmetic lies between the variables and `tensors`.

    In a graph this examines the operations between the floating variables and `tensors`; dtype
    policies do not matter. Eager code has no graph, and that of a function that receives a finished
    loss is incomplete: there the compute dtypes of the layers that own `variables` count. A `call`
    that is not Keras' own may cast, so with one the answer is None.

    Args:
        tensors: nested structure of tensors: losses or gradients.
        variables: the trainable variables as far as they are known.
        anywhere: whether in eager code all live layers count, unless a compiled model with Keras'
            own step owns `variables`.

    Returns:
        True or False, or None if it cannot be known.
    """
    tensors = [t for t in tf.nest.flatten(tensors) if isinstance(t, tf.Tensor)]
    if any(tensor.dtype == tf.float16 for tensor in tensors):
        return True
    found = None if tf.executing_eagerly() else _graph_uses_float16(tensors)
    return _layers_use_float16(list(variables), anywhere) if found is None else found


def _layers_use_float16(variables: list[Any], anywhere: bool) -> bool | None:
    if any(tf.as_dtype(v.dtype) == tf.float16 for v in variables):
        return True
    wanted = {id(v) for v in variables}
    if anywhere:
        gc.collect()  # an unreferenced layer must not count
    layers = _compat.live_layers()
    owned = {
        id(layer): wanted.intersection(map(id, _compat.own_variables(layer))) for layer in layers
    }
    # A layer without variables, such as an activation, is found through the model that holds it.
    involved = []
    for layer in layers:
        parts = _compat.sub_layers(layer)
        if any(owned.get(id(part)) for part in (layer, *parts)):
            involved += [layer, *parts]
    # In a custom loop the loss may pass through any other model, such as a critic.
    trained = [m for m in involved if isinstance(m, keras.Model) and m.compiled]
    is_own_loop = anywhere and all(own_train_step(model) for model in trained)
    path = layers if is_own_loop else involved
    # The dtype of a layer that only holds others does not matter.
    computing = [la for la in path if owned.get(id(la)) or not _compat.sub_layers(la)]
    if any(map(_is_float16, computing)):
        return True
    known = set().union(*owned.values())
    is_known = wanted and wanted <= known and not any(map(_has_own_call, involved))
    return False if is_known else None


def _has_own_call(layer: keras.layers.Layer) -> bool:
    """Whether `layer` may compute in a dtype other than its own."""
    of_keras = type(layer).call.__module__.partition(".")[0] == "keras"
    return not of_keras or isinstance(layer, keras.layers.Lambda)


def _is_float16(layer: keras.layers.Layer) -> bool:
    # An input comes before every variable.
    is_input = isinstance(layer, keras.layers.InputLayer)
    return not is_input and getattr(layer, "compute_dtype", None) == "float16"


def _graph_uses_float16(tensors: list[tf.Tensor]) -> bool | None:
    float16_functions = functools.cache(_float16_functions)
    found = None
    for operation in graph.from_variables(tensors):
        found = False
        if any(t.dtype == tf.float16 for t in operation.outputs):
            return True
        called = _functions(operation.node_def.attr.values())
        if called and called & float16_functions(operation.graph):
            return True
    return found


def _functions(attributes: Iterable[Any]) -> set[str]:
    """The functions that these attributes name: branches, loops, nested `tf.function`s."""
    return {f.name for a in attributes for f in [*a.list.func, a.func] if f.name}


def _float16_functions(outer: tf.Graph) -> set[str]:
    """The functions in a graph with an operation, in them or in what they call, of float16."""
    half = tf.float16.as_datatype_enum
    found, calls = set(), {}
    for function in outer.as_graph_def().library.function:
        name = function.signature.name
        attributes = [a for node in function.node_def for a in node.attr.values()]
        calls[name] = _functions(attributes)
        if any(a.type == half or half in a.list.type for a in attributes):
            found.add(name)
    for _ in calls:  # spread from the called to the callers
        found |= {name for name, called in calls.items() if called & found}
    return found
