"""How a graph applies or skips a step: by `tf.cond`, by select, or in one compiled cluster.

`cond` runs the update in a branch. `select` always runs it, and then keeps the new or the old value
of each variable that it wrote. XLA fuses this into the kernels of the update, but would copy every
buffer that enters a branch. A table of which the update writes only rows is neither read nor
copied: a skipped step adds 0 to the rows, which changes no number but subnormal ones, which devices
flush. `compiled` puts everything from the check to the selection into one XLA cluster inside a
plain graph, so the host neither launches hundreds of small kernels nor waits for the decision. In
eager code each mode is a Python `if`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfscale import _compat, graph
from tfscale.gradients import Gradient

# A function that assigns variables; its result is not used.
Action: TypeAlias = Callable[[], Any]

MODES = ("auto", "cond", "select", "compiled")

_ROW_WRITES = ("ResourceScatterAdd", "ResourceScatterSub")


def resolve(
    mode: str,
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[Gradient | None],
    variables: Sequence[Any],
) -> str:
    """The mode for this trace: "cond", "select" or "compiled"."""
    if tf.executing_eagerly():
        return "cond"
    if _compat.in_xla_context():
        return "cond" if mode == "cond" else "select"
    if mode != "auto":
        return mode
    on_gpu = bool(tf.config.list_logical_devices("GPU")) and not any(
        "CPU" in _compat.tf_variable(v).device for v in variables
    )
    # XLA needs static shapes, and may be unable to compile a custom optimizer.
    static = all(map(_is_static, gradients))
    own = all(type(o).__module__.startswith("keras.") for o in _compat.sub_optimizers(optimizer))
    return "compiled" if on_gpu and static and own else "cond"


def _is_static(gradient: Gradient | None) -> bool:
    """Whether XLA knows the shape of this gradient."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient is None or gradient.shape.is_fully_defined()
    shape = gradient.dense_shape
    known = shape is not None and tf.get_static_value(shape) is not None
    return known and gradient.values.shape.is_fully_defined()


def cond(should_apply: tf.Tensor, good: Sequence[Action], bad: Sequence[Action]) -> None:
    """Runs all functions of `good` if the scalar bool tensor is True, otherwise all of `bad`."""

    def run(functions: Sequence[Action]) -> tf.Tensor:
        for function in functions:
            function()
        return tf.constant(True)

    tf.cond(should_apply, lambda: run(good), _compat.outlined(lambda: run(bad)))


def select(
    should_apply: tf.Tensor,
    update: Action,
    on_skip: Action,
    variables: Sequence[Any],
    optimizer: keras.optimizers.Optimizer,
) -> None:
    """Runs `update()`, or leaves everything as it was and runs `on_skip()`.

    Args:
        should_apply: scalar bool tensor.
        update: function without arguments that assigns variables and returns nothing.
        on_skip: the same for a skipped step. Under XLA it runs in every step, because that costs
            less than a branch, and must not change anything in an applied one.
        variables: every variable (`tf.Variable` or `keras.Variable`) that `update` may write.
        optimizer: the Keras optimizer that writes them.
    """
    changes = []  # added to rows, 0 in a skipped step

    def keep(values: tf.Tensor, nothing: float) -> tf.Tensor:
        changes.append(tf.where(should_apply, values, tf.cast(nothing, values.dtype)))
        return changes[-1]

    def run() -> None:
        with _compat.added_rows(optimizer, keep):
            update()

    # Traced as a separate function, so that its graph shows what it reads and writes.
    function = tf.function(run, autograph=False).get_concrete_function()
    by_handle = {id(v.handle): v for v in map(_compat.tf_variable, variables)}
    restored = []
    for outer, inner in zip(function.captured_inputs, function.inputs, strict=True):
        writes = [op for op in inner.consumers() if op.type not in graph.READS]
        if outer.dtype != tf.resource or all(_adds(op, changes) for op in writes):
            continue
        if id(outer) not in by_handle:
            # A variable that the optimizer does not list cannot be restored; use a branch.
            cond(should_apply, [function], [on_skip])
            return
        variable = by_handle[id(outer)]
        restored.append((variable, variable.read_value()))
    function()
    for variable, old in restored:
        variable.assign(tf.where(should_apply, variable.read_value(), old))
    if _compat.in_xla_context():
        on_skip()
    else:
        cond(should_apply, [], [on_skip])


def _adds(op: tf.Operation, changes: list[tf.Tensor]) -> bool:
    """Whether `op` adds one of `changes` to the rows of a table, or subtracts it."""
    return op.type in _ROW_WRITES and any(op.inputs[2] is change for change in changes)
