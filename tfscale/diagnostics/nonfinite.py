"""Find the first tensor that is infinite or NaN in one batch, forward and backward.

An infinity spreads: a step later everything is NaN, and nothing shows its origin. So this examines
what enters and leaves every layer in the order of execution, then the gradients of the same tensors
in the opposite order; the first one that is not finite names the layer. If layers compute in half
precision, it repeats the run in float32, which distinguishes an overflow of float16 from a fault
that higher precision does not fix.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfscale.diagnostics import layers, running
from tfscale.diagnostics.batches import as_tensors
from tfscale.diagnostics.nonfinite_report import FirstNonFinite, NonFiniteReport, NonFiniteTensor
from tfscale.diagnostics.passes import Stats, TensorRecord, backward, forward, in_float32
from tfscale.reporting import scaling_optimizers


def find_nonfinite(
    model: keras.Model, batch: Any, *, loss: running.LossLike = None
) -> NonFiniteReport:
    """Find the layer where a batch becomes infinite or NaN, forward and backward.

    The model runs one batch eagerly, in training mode and in its own dtypes. Its loss is
    differentiated at the optimizer's current loss scale. If something is not finite and any layer
    computes in float16 or bfloat16, the batch runs once more in float32. The model is left as it
    was: weights, statistics, metrics, seeds, dtypes and optimizer.

    If the model has a custom `train_step`, that step runs with optimizers that update nothing, and
    each loss that it differentiates with respect to variables is examined at its own scale. If the
    step cannot run eagerly by itself, as under a strategy, or if it shows no such loss, as in a
    concrete function, only the forward pass is examined.

    Args:
        model: a compiled Keras model, or any Keras model together with `loss`. Without a loss, or
            without targets in the batch, only the forward pass is examined.
        batch: what `fit` calls a batch: `(x, y)` or `(x, y, sample_weight)`, or `x` alone.
        loss: name of a Keras loss, a `keras.losses.Loss`, or a function of (y_true, y_pred).

    Returns:
        A `NonFiniteReport`, which is true if something is not finite.

    Raises:
        TypeError: `model` is not a Keras model, or `batch` is a whole data set.

    Example:
        >>> import keras, numpy as np, tfscale
        >>> model = keras.Sequential(
        ...     [keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones", name="big")]
        ... )
        >>> model.compile(loss="mse")
        >>> x, y = np.full((2, 4), 1e38, "float32"), np.zeros((2, 1))
        >>> report = tfscale.find_nonfinite(model, (x, y))
        >>> report.forward.layer, report.forward.infs
        ('big', 2)
    """
    loss = running.resolve_loss(model, loss)
    if isinstance(batch, tf.data.Dataset | Iterator | keras.utils.PyDataset):
        raise TypeError(
            "`batch` must be one batch, such as (x, y). Pass the batches of a data set one by one: "
            f"for batch in data: ... Received: batch={batch!r}"
        )
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    own_step = running.has_own_step(model, loss)
    examined = "The model's own train_step was run, without its updates." if own_step else ""
    forward_only = loss is None and not model.compiled

    def run() -> tuple[layers.ForwardPass, list[list[TensorRecord]]]:
        if own_step:
            recorded = running.run_step(model, batch)
        else:
            recorded = running.run_eagerly(model, batch, loss, forward_only)
        return recorded, [list(forward(recorded, x)), list(backward(recorded))]

    try:
        recorded, passes = run()
    except Exception as error:
        if not own_step:
            raise
        own_step, forward_only = False, True
        examined = (
            "Only the forward pass was run. The model's own train_step, run eagerly by itself, "
            f"raised {type(error).__name__}: {error}"
        )
        try:
            recorded, passes = run()
        except Exception:
            raise error from None
    first = [next((r for r in found if not r.stats.finite), None) for found in passes]
    wide: list[list[TensorRecord]] = [[], []]
    if any(first) and recorded.compute_dtype in layers.HALF:
        # An error of a user's layer in another dtype must not hide what was found.
        with contextlib.suppress(Exception), in_float32(recorded):
            _, wide = run()
    in_forward, in_backward = (
        None if record is None else _describe(record, found)
        for record, found in zip(first, wide, strict=True)
    )
    parts = (("x", x), ("y", y), ("sample_weight", sample_weight))
    inputs = [bad for name, part in parts for bad in _nonfinite_tensors(name, part)]
    trained = {id(v) for v in model.trainable_weights}
    weights = [
        bad
        for v in model.weights
        for bad in _nonfinite_tensors(v.path, tf.convert_to_tensor(v), id(v) in trained)
    ]
    return NonFiniteReport(
        model=model.name,
        compute_dtype=recorded.compute_dtype,
        inputs=tuple(inputs),
        weights=tuple(weights),
        loss=None if recorded.loss is None else float(recorded.loss),
        scale=max((loss.scale for loss in recorded.losses), default=1.0),
        forward=in_forward,
        backward=in_backward,
        cause=too_high_rate(model) if any(first) and not inputs else "",
        examined=examined,
    )


def too_high_rate(model: keras.Model) -> str:
    """Say which weight has grown far too large since the first step; empty if none has."""
    for optimizer in scaling_optimizers(model).values():
        grown = optimizer.reports.grown()
        if grown:
            rate = float(tf.convert_to_tensor(optimizer.learning_rate))
            return (
                f"The learning rate is too high ({rate:g}): {grown}. Load weights from before and "
                "lower the learning rate."
            )
    return ""


def _describe(record: TensorRecord, in_float32: list[TensorRecord]) -> FirstNonFinite:
    call, stats = record.call, record.stats
    wide = next((r.stats for r in in_float32 if r.key == record.key), None)
    return FirstNonFinite(
        layer=call.name if call else "",
        call=call.number if call else 0,
        kind=type(call.operation).__name__ if call else "",
        place=record.place,
        users=record.producers,
        dtype=stats.dtype,
        size=stats.size,
        nans=stats.nans,
        infs=stats.infs,
        largest_before=record.largest_before,
        finite_in_float32=wide.finite if wide else None,
        largest_in_float32=wide.largest if wide else None,
    )


def _nonfinite_tensors(
    name: str, structure: Any, trained: bool = False
) -> Iterator[NonFiniteTensor]:
    """The tensors of a nested structure that are not finite, under names such as "x['a'][0]"."""
    if isinstance(structure, dict | list | tuple):
        parts = structure.items() if isinstance(structure, dict) else enumerate(structure)
        for key, part in parts:
            yield from _nonfinite_tensors(f"{name}[{key!r}]", part)
    else:
        for tensor in layers.float_tensors(as_tensors(structure)):
            stats = Stats.of(tensor)
            if not stats.finite:
                yield NonFiniteTensor(name, stats.size, stats.nans, stats.infs, trained)
