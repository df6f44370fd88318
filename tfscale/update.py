"""How a step is applied or skipped: `tf.cond`, select, or one compiled cluster.

`cond` runs the update in a branch. `select` runs it always and then takes, for every variable that
it wrote, the new value or the old one: under XLA that fuses into the update's own kernels, where a
branch would copy every buffer that crosses it. `compiled` puts everything from the check to the
selection into one XLA cluster inside a plain graph, so that the host neither dispatches hundreds of
small kernels nor waits for the decision. In eager code each of them is a Python `if`.
"""

from __future__ import annotations

import tensorflow as tf

from tfscale import _compat

MODES = ("auto", "cond", "select", "compiled")

_FEW_ROWS = 16  # a sixteenth of a table

_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")


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
    static = all(map(_fits_cluster, gradients))
    own = all(type(o).__module__.startswith("keras.") for o in _compat.sub_optimizers(optimizer))
    return "compiled" if on_gpu and static and own else "cond"


def _fits_cluster(gradient) -> bool:
    """Whether a cluster takes this gradient without being slower for it."""
    if gradient is None:
        return True
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient.shape.is_fully_defined()
    shape = None if gradient.dense_shape is None else tf.get_static_value(gradient.dense_shape)
    if shape is None or not gradient.values.shape.is_fully_defined():
        return False
    # A select reads and writes the whole table, which is more than a few rows are worth.
    return bool(gradient.values.shape[0] * _FEW_ROWS >= shape[0])


def run(mode: str, accept, update, skip, variables) -> None:
    """Runs `update()`, or leaves everything as it was and runs `skip()`.

    Args:
        mode: "cond" or "select".
        accept: scalar bool tensor.
        update: function without arguments that assigns variables and returns nothing.
        skip: the same for a bad step; it writes nothing that `update` writes.
        variables: every variable (`tf.Variable` or `keras.Variable`) that `update` may write.
    """
    if mode == "select":
        _select(accept, update, variables)
        _cond(accept, lambda: None, skip)
    else:
        _cond(accept, update, skip)


def compiled(step):
    """What `step()` returns, run as one XLA cluster of the graph that is traced now."""
    return tf.function(step, autograph=False, jit_compile=True)()


def _cond(accept, update, skip=lambda: None) -> None:
    def branch(function):
        function()
        return tf.constant(True)

    tf.cond(accept, lambda: branch(update), lambda: branch(skip))


def _select(accept, update, variables) -> None:
    # Traced as a function of its own, so that what it reads and writes can be seen.
    function = tf.function(update, autograph=False).get_concrete_function()
    by_handle = {id(v.handle): v for v in map(_compat.native, variables)}
    captured = function.captured_inputs
    inside = function.inputs[len(function.inputs) - len(captured) :]
    written = []
    for outer, inner in zip(captured, inside, strict=True):
        if outer.dtype != tf.resource or all(op.type in _READS for op in inner.consumers()):
            continue
        if id(outer) not in by_handle:
            # A variable that the optimizer does not list cannot be put back; a branch need not.
            _cond(accept, function)
            return
        written.append(by_handle[id(outer)])
    before = [v.read_value() for v in written]
    function()
    for variable, old in zip(written, before, strict=True):
        variable.assign(tf.where(accept, variable.read_value(), old))
