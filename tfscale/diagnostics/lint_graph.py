"""The rules of `lint` that inspect the operations of a model's forward pass.

The model is traced into a graph, as in `fit`, but in a scope that changes no variable and no loss.
The graph shows what settings do not: in which dtype each operation computes, how many elements it
sums, and which small constants have become zero.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.diagnostics.findings import Finding, summarize
from tfscale.diagnostics.layers import Call, layer_hook
from tfscale.graph import ancestors

# float16 counts in steps of one up to here: 2048 + 1 is 2048.
COUNTS_TO = 2048
# A layer with a smaller share of the weights may be in float32 on purpose, such as a router.
LARGE = 0.01

# They pass a tensor on.
_PASSING = {"Cast", "Identity", "Reshape", "Squeeze", "ExpandDims", "Transpose", "StopGradient"}
_PROBABILITIES = {"Softmax", "LogSoftmax", "Sigmoid"}
_SUMS = {"Sum", "Mean", "EuclideanNorm"}
_PRODUCTS = {"MatMul", "BatchMatMulV2", "Einsum", "Conv2D", "Conv3D", "DepthwiseConv2dNative"}
# Operations that a small constant guards, and the position of the guarded operand.
_GUARDED = {"RealDiv": 1, "Rsqrt": 0, "Log": 0, "Reciprocal": 0, "Sqrt": 0}


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A traced forward pass.

    Attributes:
        graph: its operations.
        layers: from the name of an operation to the layer in which it was made.
    """

    graph: tf.Graph
    layers: dict[str, str]

    @property
    def uses_float16(self) -> bool:
        """Whether anything in it is computed in float16."""
        return any(t.dtype == tf.float16 for o in self.graph.get_operations() for t in o.outputs)


def trace(model: keras.Model) -> Traced | None:
    """Trace the forward pass in training mode; return None if that is not possible."""
    if not model.built:
        return None
    for specs in _input_specs(model):
        # The user's code may raise anything in tracing, for instance if a guessed input is wrong.
        with contextlib.suppress(Exception), warnings.catch_warnings():
            # The findings explain what NumPy warns about, such as a constant that overflows.
            warnings.simplefilter("ignore")
            return _trace(model, specs)
    return None


def _trace(model: keras.Model, specs: Any) -> Traced:
    layers: dict[str, str] = {}
    stack: list[str] = []

    def on_call(call: Call, kind: str, tensors: Any) -> None:
        # Operations that have no label yet were made since the last call of this function.
        operations = tf.compat.v1.get_default_graph().get_operations()
        for operation in reversed(operations):
            if operation.name in layers:
                break
            layers[operation.name] = stack[-1] if stack else model.name
        if kind == "input":
            stack.append(call.name)
        else:
            stack.pop()

    with keras.StatelessScope(), layer_hook(model, on_call):
        function = tf.function(lambda inputs: model(inputs, training=True))
        graph = function.get_concrete_function(specs).graph
    return Traced(graph, layers)


def _input_specs(model: keras.Model) -> Iterator[Any]:
    """The inputs of the model, or guesses from the shape that it was built for."""
    if getattr(model, "inputs", None):
        inputs = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
        yield keras.tree.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), inputs)
        return
    shape = (model.get_build_config() or {}).get("input_shape")
    if shape is not None:
        for dtype in (keras.config.floatx(), "int32"):
            yield keras.tree.map_shape_structure(
                lambda part, dtype=dtype: tf.TensorSpec([None, *part[1:]], dtype), shape
            )


def check(traced: Traced) -> Iterator[Finding]:
    """Yield all findings in the forward pass."""
    yield from _outputs(traced)
    for operation in traced.graph.get_operations():
        where = traced.layers.get(operation.name, operation.name)
        if any(t.dtype == tf.float16 for t in operation.outputs):
            yield from _sum(operation, where)
            yield from _constant(operation, where)
    yield from _wide_islands(traced)


def _outputs(traced: Traced) -> Iterator[Finding]:
    for tensor in traced.graph.outputs:
        source = _source(tensor)
        where = traced.layers.get(source.op.name, source.op.name)
        kind = source.op.type
        if tensor.dtype == tf.float16:
            what = f"the final {kind.lower()}" if kind in _PROBABILITIES else "the model's output"
            yield Finding(
                "float16-output",
                where,
                f"{what} is in float16: the loss is computed from numbers of 11 bits, and small "
                "probabilities are zero.",
                'make this layer with dtype="float32"',
            )
        elif kind in _PROBABILITIES and source.dtype == tf.float16:
            yield Finding(
                "float16-softmax",
                where,
                f"the final {kind.lower()} is computed in float16 and only then cast to "
                f"{tensor.dtype.name}: probabilities below 6e-8 are zero already.",
                f'keras.layers.Activation("{kind.lower()}", dtype="float32")  # on float16 logits',
            )


def _sum(operation: tf.Operation, where: str) -> Iterator[Finding]:
    if operation.type not in _SUMS:
        return
    axes = tf.get_static_value(operation.inputs[1])
    shape = operation.inputs[0].shape
    if axes is None or shape.rank is None:
        return
    sizes = [shape[int(axis)] or 1 for axis in np.ravel(axes)]  # an unknown batch counts as one
    number = math.prod(sizes)
    if number > COUNTS_TO:
        yield Finding(
            "long-sum",
            where,
            f"{operation.type.lower()} of {number:,} elements in float16: past {COUNTS_TO} a sum "
            "of ones no longer grows on some devices, past 65504 it is infinite.",
            "keras.ops.mean(x)  # computes in float32; or keras.ops.cast(x, 'float32') before",
        )


def _constant(operation: tf.Operation, where: str) -> Iterator[Finding]:
    if operation.type in _GUARDED:
        guard = operation.inputs[_GUARDED[operation.type]].op
        while guard.type == "Identity":
            guard = guard.inputs[0].op
        # The root of a maximum with zero is intended; nobody adds zero on purpose.
        guards = ("AddV2",) if operation.type == "Sqrt" else ("AddV2", "Maximum")
        if guard.type in guards and any(np.all(c == 0) for c in _constants(guard)):
            yield Finding(
                "epsilon",
                where,
                f"{operation.type} is guarded by a constant that is zero in float16.",
                "epsilon = 1e-6  # at least 6e-8, or compute in float32",
            )
    if operation.type in ("Minimum", "Maximum") and any(
        np.all(np.isinf(c)) for c in _constants(operation)
    ):
        yield Finding(
            "limit",
            where,
            f"{operation.type} with a limit that is infinite in float16, so it limits nothing.",
            "compute this layer in float32: dtype='float32'",
        )


def _constants(operation: tf.Operation) -> list[np.ndarray]:
    found = (tf.get_static_value(t) for t in operation.inputs)
    return [np.asarray(value) for value in found if value is not None and np.size(value)]


def _wide_islands(traced: Traced) -> Iterator[Finding]:
    """Products with large weights in float32 or float64 whose result float16 or bfloat16 uses."""
    operations = traced.graph.get_operations()
    products = [o for o in operations if o.type in _PRODUCTS]
    weights = {o.name: sum(_weights(t) for t in o.inputs) for o in products}
    total = sum(weights.values())
    half = {tf.float16, tf.bfloat16}
    if not any(o.outputs[0].dtype in half for o in products):
        return
    narrow = [t for o in operations for t in o.outputs if t.dtype in half]
    used_in_half = {o.name for o in ancestors(narrow)}
    wide: dict[str, list[str]] = {}
    for o in products:
        dtype = o.outputs[0].dtype
        if dtype not in half and weights[o.name] > LARGE * total and o.name in used_in_half:
            wide.setdefault(dtype.name, []).append(traced.layers.get(o.name, o.name))
    for dtype_name, names in wide.items():
        yield Finding(
            "wide-layer",
            summarize(list(dict.fromkeys(names))),
            f"computes in {dtype_name} between layers in half precision: slow, and probably made "
            "before the dtype policy was set.",
            "make it after keras.config.set_dtype_policy(...), or pass it the policy as dtype=",
        )


def _source(tensor: tf.Tensor) -> tf.Tensor:
    """The computed tensor, before operations that only pass it on."""
    while tensor.op.type in _PASSING and tensor.op.inputs:
        tensor = tensor.op.inputs[0]
    return tensor


def _weights(tensor: tf.Tensor) -> int:
    """Number of elements of the variable that this is, possibly after a cast; else 0."""
    source = _source(tensor)
    return (source.shape.num_elements() or 0) if source.op.type == "ReadVariableOp" else 0
