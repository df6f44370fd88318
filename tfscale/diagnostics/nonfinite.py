"""Find the first tensor that is infinite or NaN in one batch, forward and backward.

An infinity spreads: a step later everything is NaN, and nothing shows where it came from. So what
enters and leaves every layer is examined in the order of execution, then the gradients of the same
tensors in the opposite order; the first one that is not finite names the layer. If layers compute
in half precision, all of it is repeated in float32, which distinguishes an overflow of float16 from
a fault that higher precision does not fix.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.diagnostics import layers, running
from tfscale.diagnostics.batches import as_tensors
from tfscale.diagnostics.passes import Key, Stats, TensorRecord, backward, forward, in_float32
from tfscale.model_optimizers import optimizers_of
from tfscale.policies import scale_text

_NO_BACKWARD = (
    "Backward pass: not run, it needs targets in the batch and a loss, from model.compile or "
    "`loss=`."
)
_OWN_STEP = "The model's own train_step was run, without its updates."


@dataclasses.dataclass(frozen=True)
class NonFiniteTensor:
    """A tensor of the batch, or a weight, that was not finite before anything was computed.

    Attributes:
        name: such as "x", "x[0]", "y", "sample_weight", or the path of a weight.
        size: number of values.
        nans: how many of them are NaN.
        infs: how many are plus or minus infinity.
        trained: whether it is a weight that an optimizer updates.
    """

    name: str
    size: int
    nans: int
    infs: int
    trained: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {_amount(self.nans, self.infs, self.size)}"


@dataclasses.dataclass(frozen=True)
class FirstNonFinite:
    """The first tensor that is not finite.

    Attributes:
        layer: name of the layer, with the layers around it: "block/dense". Empty for the loss.
        call: how often the layer was called before in this pass (a step of a recurrent cell).
        kind: class of the layer.
        place: what of the layer is not finite: "output" and "input" of the forward pass, where
            "input" means that it arose between the layer before and this one, in code outside of
            any layer or in the cast to this layer's dtype; "loss"; and in the backward pass
            "output" (the gradient that reaches this layer), "input" (the gradient that it passes
            on) or the name of a variable.
        users: for a gradient that reaches an "output", the layers that it comes from.
        dtype: of the tensor.
        size: its number of values.
        nans: how many of them are NaN.
        infs: how many are infinite.
        largest_before: largest magnitude just before: of what the layer received or the last layer
            in it returned (forward), of all gradients until then (backward). None if there was
            nothing before.
        finite_in_float32: whether the same tensor is finite if the whole model computes in float32;
            None if it does so anyway, or if that could not be tried.
        largest_in_float32: its largest finite magnitude then, or None.
    """

    layer: str
    call: int
    kind: str
    place: str
    users: tuple[str, ...]
    dtype: str
    size: int
    nans: int
    infs: int
    largest_before: float | None
    finite_in_float32: bool | None
    largest_in_float32: float | None


@dataclasses.dataclass(frozen=True)
class NonFiniteReport:
    """What `find_nonfinite` found. Print it, or read its fields.

    Attributes:
        model: name of the model.
        compute_dtype: "float16", "bfloat16" or "float32", the narrowest in the model.
        inputs: the tensors of the batch that hold NaN or infinity.
        weights: the model's weights that do.
        loss: the loss, not scaled; None if there are no targets or no loss to compare with.
        scale: the loss scale of the backward pass; the largest, if a step of its own has several.
        forward: the first tensor of the forward pass that is not finite, or None.
        backward: the first gradient that is not finite, or None.
        cause: what is known of the cause, such as a learning rate that was too high; may be empty.
        examined: what was run, if that is not a forward pass and the loss of `compile`.
    """

    model: str
    compute_dtype: str
    inputs: tuple[NonFiniteTensor, ...]
    weights: tuple[NonFiniteTensor, ...]
    loss: float | None
    scale: float
    forward: FirstNonFinite | None
    backward: FirstNonFinite | None
    cause: str = ""
    examined: str = ""

    @property
    def clean(self) -> bool:
        """Whether everything that was examined is finite."""
        return not (self.inputs or self.weights or self.forward or self.backward)

    def to_dict(self) -> dict[str, Any]:
        """Plain Python, for JSON."""
        return {**dataclasses.asdict(self), "clean": self.clean}

    def __str__(self) -> str:
        scale = scale_text(self.scale)
        lines = [f"Search for NaN and infinity in {self.model!r}, computed in {self.compute_dtype}"]
        lines += [text for text in (self.examined, self.cause) if text]
        no_backward = "" if self.examined else _NO_BACKWARD
        if self.clean:
            if self.loss is None:
                lines.append(f"All finite: data, weights, activations. {no_backward}".rstrip())
            else:
                lines.append(
                    f"All finite: data, weights, activations, the loss ({self.loss:.6g}) and the "
                    f"gradients at loss scale {scale}."
                )
            return "\n".join(lines)
        if self.inputs:
            lines += ["The data itself is not finite:", *(f"  {bad}" for bad in self.inputs)]
        trained = [bad for bad in self.weights if bad.trained]
        state = [bad for bad in self.weights if not bad.trained]
        if trained:
            lines.append("Weights are not finite before the step: an earlier update caused it.")
        lines += [f"  {bad}" for bad in trained]
        if state:
            lines.append(
                "Untrained state is not finite before the step. No update writes it: the forward "
                "pass of an earlier step did, which the optimizer may have skipped. "
                "tfscale.compile(model, optimizer, ...) undoes that too."
            )
        lines += [f"  {bad}" for bad in state]
        if self.forward and self.forward.place == "input" and self.inputs:
            layer = _layer_text(self.forward)
            lines.append(f"Forward pass: what follows is not finite either, from {layer} on.")
        else:
            text = _text(self.forward, _forward_text, "before it")
            lines.append(f"Forward pass: {text}")
        if self.loss is None:
            lines += [no_backward] if no_backward else []
        elif not np.isfinite(self.loss):
            lines.append(f"Backward pass: the loss is {self.loss}, so no gradient means anything.")
        else:
            text = _text(self.backward, _backward_text, "among the gradients before it")
            lines.append(f"Backward pass (loss {self.loss:.6g}, loss scale {scale}): {text}")
            if self.forward and not self.backward:
                lines.append(
                    "The loss and all gradients are finite nevertheless: an infinity on purpose, "
                    "as in an attention mask, does no harm."
                )
        return "\n".join(lines)


def find_nonfinite(
    model: keras.Model, batch: Any, *, loss: running.LossLike = None
) -> NonFiniteReport:
    """Find the layer where a batch becomes infinite or NaN, forward and backward.

    The model runs one batch eagerly, in training mode and in its own dtypes, and the gradient of
    the loss is taken at the loss scale that the model's optimizer uses now. If any layer computes
    in float16 or bfloat16 and something is not finite, the same runs once more in float32. The
    model is left as it was: weights, statistics, metrics, seeds, dtypes and optimizer.

    Of a model with a `train_step` of its own this step is what runs, with optimizers that update
    nothing, and each loss that it differentiates by variables is examined at its own scale. If it
    cannot run eagerly by itself, as under a strategy, only the forward pass is examined.

    Args:
        model: a compiled Keras model, or any Keras model together with `loss`. Without a loss, or
            without targets in the batch, only the forward pass is examined.
        batch: what `fit` calls a batch: `(x, y)` or `(x, y, sample_weight)`, or `x` alone.
        loss: name of a Keras loss, a `keras.losses.Loss`, or a function of (y_true, y_pred).

    Returns:
        A `NonFiniteReport`; its `clean` says whether there was anything to find.

    Raises:
        TypeError: `model` is no Keras model.

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
    if loss is not None or not isinstance(model, keras.Model) or model.compiled:
        loss = running.resolve_loss(model, loss)
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    own_step = running.has_own_step(model, loss)
    examined = _OWN_STEP if own_step else ""
    forward_only = loss is None and not model.compiled

    def run() -> tuple[layers.ForwardPass, list[dict[Key, TensorRecord]]]:
        if own_step:
            recorded = running.run_step(model, batch)
        else:
            recorded = running.run_eagerly(model, batch, loss, forward_only)
        return recorded, [forward(recorded, x), backward(recorded)]

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
    first = [next((r for r in found.values() if not r.stats.finite), None) for found in passes]
    wide: list[dict[Key, TensorRecord]] = [{}, {}]
    if any(first) and recorded.compute_dtype in layers.HALF:
        # Whatever a user's layer raises in another dtype must not hide what was found.
        with contextlib.suppress(Exception), in_float32(recorded):
            _, wide = run()
    in_forward, in_backward = (
        None if record is None else _describe(record, records.get(record.key))
        for record, records in zip(first, wide, strict=True)
    )
    inputs = _nonfinite_tensors({"x": x, "y": y, "sample_weight": sample_weight})
    trained = {v.path for v in model.trainable_weights}
    weights = _nonfinite_tensors({v.path: tf.convert_to_tensor(v) for v in model.weights})
    return NonFiniteReport(
        model=model.name,
        compute_dtype=recorded.compute_dtype,
        inputs=inputs,
        weights=tuple(dataclasses.replace(w, trained=w.name in trained) for w in weights),
        loss=None if recorded.loss is None else float(recorded.loss),
        scale=max((loss.scale for loss in recorded.losses), default=1.0),
        forward=in_forward,
        backward=in_backward,
        cause=too_high_rate(model) if any(first) and not inputs else "",
        examined=examined,
    )


def too_high_rate(model: keras.Model) -> str:
    """Say which weight has grown far too large since the first step; empty if none has."""
    for optimizer in optimizers_of(model).values():
        reports = getattr(optimizer, "reports", None)
        grown = reports.grown() if reports else ""
        if grown:
            rate = float(tf.convert_to_tensor(optimizer.learning_rate))
            return (
                f"The learning rate is too high ({rate:g}): {grown}. Load weights from before and "
                "lower the learning rate."
            )
    return ""


def _describe(record: TensorRecord, wide: TensorRecord | None) -> FirstNonFinite:
    call, stats = record.call, record.stats
    return FirstNonFinite(
        layer=call.name if call else "",
        call=call.number if call else 0,
        kind=type(call.operation).__name__ if call else "",
        place=record.place,
        users=record.producers,
        dtype=record.dtype,
        size=stats.size,
        nans=stats.nans,
        infs=stats.infs,
        largest_before=record.largest_before,
        finite_in_float32=wide.stats.finite if wide else None,
        largest_in_float32=wide.stats.largest if wide else None,
    )


def _nonfinite_tensors(parts: dict[str, Any]) -> tuple[NonFiniteTensor, ...]:
    all_stats = (
        (name, Stats.of(tensor))
        for name, leaf in _named_leaves(parts)
        for tensor in layers.float_tensors(as_tensors(leaf))
    )
    return tuple(
        NonFiniteTensor(name, stats.size, stats.nans, stats.infs)
        for name, stats in all_stats
        if not stats.finite
    )


def _named_leaves(structure: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(structure, dict):
        for key, part in structure.items():
            yield from _named_leaves(part, f"{name}[{key!r}]" if name else key)
    elif isinstance(structure, list | tuple):
        for i, part in enumerate(structure):
            yield from _named_leaves(part, f"{name}[{i}]")
    else:
        yield name, structure


def _amount(nans: int, infs: int, size: int) -> str:
    parts = [f"{n:,} {what}" for n, what in ((nans, "NaN"), (infs, "infinite")) if n]
    return f"{' and '.join(parts)} of {size:,} values"


def _text(first: FirstNonFinite | None, what: Callable[[FirstNonFinite], str], before: str) -> str:
    """What is not finite, the largest magnitude `before`, and how it is in float32."""
    if first is None:
        return "all finite."
    text = what(first)
    if first.largest_before is not None:
        text += f" The largest magnitude {before} is {first.largest_before:.4g}."
    if first.finite_in_float32:
        largest = f"its largest magnitude is {first.largest_in_float32:.4g}"
        text += f" In float32 it is finite, {largest}: it exceeds the range of half precision."
    elif first.finite_in_float32 is False:
        text += " In float32 it is not finite either: higher precision does not fix it."
    return text


def _forward_text(first: FirstNonFinite) -> str:
    if first.place == "loss":
        return f"the loss is the first tensor that is not finite, in {first.dtype}."
    amount = f"{_amount(first.nans, first.infs, first.size)}, in {first.dtype}"
    if first.place == "output":
        return f"{_layer_text(first)} is the first layer whose output is not finite: {amount}."
    cast = f", or in the cast to {first.dtype}" if first.dtype in layers.HALF else ""
    return (
        f"what enters {_layer_text(first)} is the first tensor that is not finite: {amount}. "
        f"It arose outside of any layer{cast}."
    )


def _backward_text(first: FirstNonFinite) -> str:
    amount = f"{_amount(first.nans, first.infs, first.size)}, in {first.dtype}"
    if first.place != "output":
        return (
            f"{_layer_text(first)} is the first layer that produces a gradient that is not finite, "
            f"that of its {first.place}: {amount}."
        )
    cast = f"a cast to {first.dtype}, " if first.dtype in layers.HALF else ""
    users = ", ".join(f"`{user}`" for user in first.users)
    source = users or f"the loss, {cast}or code outside of any layer"
    return (
        f"the gradient that reaches the output of {_layer_text(first)} is the first that is not "
        f"finite: {amount}. It comes from {source}."
    )


def _layer_text(first: FirstNonFinite) -> str:
    call = f", call number {first.call + 1}" if first.call else ""
    return f"`{first.layer}` ({first.kind}{call})"
