"""How a step is applied or skipped: `tf.cond`, select, or one compiled cluster.

`cond` runs the update in a branch. `select` runs it always and then takes, for every variable that
it wrote, the new value or the old one: under XLA that fuses into the update's own kernels, where a
branch would copy every buffer that crosses it. `compiled` puts everything from the check to the
selection into one XLA cluster inside a plain graph, so that the host neither dispatches hundreds of
small kernels nor waits for the decision. In eager code each of them is a Python `if`.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfscale import _compat

MODES = ("auto", "cond", "select", "compiled")

_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
_ROW_WRITES = ("ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterUpdate")


def resolve(mode: str, optimizer, gradients, variables) -> str:
    """The mode for this trace: "cond", "select" or "compiled"."""
    if tf.executing_eagerly():
        return "cond"
    if _compat.in_xla_context():
        # Everything is in a cluster already.
        return "cond" if mode == "cond" else "select"
    if mode != "auto":
        return mode
    on_gpu = bool(tf.config.list_logical_devices("GPU")) and not any(
        "CPU" in _compat.native(v).device for v in variables
    )
    # XLA wants static shapes, and a custom optimizer may hold what it cannot compile.
    static = all(map(_is_static, gradients))
    own = all(type(o).__module__.startswith("keras.") for o in _compat.sub_optimizers(optimizer))
    return "compiled" if on_gpu and static and own else "cond"


def _is_static(gradient) -> bool:
    """Whether XLA knows the shape of this gradient."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient is None or gradient.shape.is_fully_defined()
    shape = gradient.dense_shape
    known = shape is not None and tf.get_static_value(shape) is not None
    return known and gradient.values.shape.is_fully_defined()


def run(mode: str, accept, update, blame, variables) -> None:
    """Runs `update()`, or leaves everything as it was and runs `blame()`.

    Args:
        mode: "cond" or "select".
        accept: scalar bool tensor.
        update: function without arguments that assigns variables and returns nothing.
        blame: the same for a bad step; under XLA, where it costs less than a branch, for a good
            one too, which must then change nothing.
        variables: every variable (`tf.Variable` or `keras.Variable`) that `update` may write.
    """
    if mode == "select":
        _select(accept, update, variables)
        if _compat.in_xla_context():
            blame()
        else:
            _cond(accept, lambda: None, _rarely(blame))
    else:
        _cond(accept, update, _rarely(blame))


def _rarely(function):
    """`function` as one operation of a plain graph, not the hundred that it is made of: even those
    of a branch that is not taken cost something."""
    if tf.executing_eagerly() or _compat.in_xla_context():
        return function
    attributes = {_compat.NO_INLINE: True}
    return tf.function(function, autograph=False, experimental_attributes=attributes)


def compiled(step):
    """What `step()` returns, run as one XLA cluster of the graph that is traced now."""
    return tf.function(step, autograph=False, jit_compile=True)()


def _cond(accept, update, blame=lambda: None) -> None:
    def branch(function):
        function()
        return tf.constant(True)

    tf.cond(accept, lambda: branch(update), lambda: branch(blame))


def _select(accept, update, variables) -> None:
    # Traced as a function of its own, so that what it reads and writes can be seen.
    function = tf.function(update, autograph=False).get_concrete_function()
    by_handle = {id(v.handle): v for v in map(_compat.native, variables)}
    captured = function.captured_inputs
    inside = function.inputs[len(function.inputs) - len(captured) :]
    outside = {id(inner): outer for outer, inner in zip(captured, inside, strict=True)}
    put_back: list[Any] = []
    for outer, inner in zip(captured, inside, strict=True):
        writes = [op for op in inner.consumers() if op.type not in _READS]
        if outer.dtype != tf.resource or not writes:
            continue
        if id(outer) not in by_handle:
            # A variable that the optimizer does not list cannot be put back; a branch need not.
            _cond(accept, function)
            return
        variable, rows = by_handle[id(outer)], _rows(writes, outside)
        parts = [_Whole(variable)] if rows is None else [_Rows(variable, row) for row in rows]
        put_back.extend(parts)
    function()
    for part in put_back:
        part.choose(accept)


def _rows(writes, outside) -> list | None:
    """The rows that `writes`, operations on one variable, touch; None if they may be any."""
    rows = []
    for op in writes:
        if op.type not in _ROW_WRITES:
            return None
        indices = op.inputs[1]
        while indices.op.type == "Identity":
            indices = indices.op.inputs[0]
        if id(indices) not in outside:
            return None
        rows.append(outside[id(indices)])
    return rows


class _Whole:
    """A variable as it was before the update."""

    def __init__(self, variable):
        self.variable = variable
        self.old = variable.read_value()

    def choose(self, accept) -> None:
        new = self.variable.read_value()
        self.variable.assign(tf.where(accept, new, self.old))


class _Rows:
    """Some rows of a table as they were: the others need not be read, let alone written."""

    def __init__(self, variable, rows):
        self.variable, self.rows = variable, rows
        self.old = variable.sparse_read(rows)

    def choose(self, accept) -> None:
        new = self.variable.sparse_read(self.rows)
        chosen = tf.IndexedSlices(tf.where(accept, new, self.old), self.rows)
        self.variable.scatter_update(chosen)
