"""What `find_nonfinite` found, and its text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from tfscale.diagnostics.layers import HALF
from tfscale.policies import scale_text

_NO_BACKWARD = (
    "Backward pass: not run, it needs targets in the batch and a loss, from model.compile or "
    "`loss=`."
)


@dataclasses.dataclass(frozen=True)
class NonFiniteTensor:
    """A tensor of the batch, or a weight, that was not finite before the computation.

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
        return f"{self.name}: {_amount(self)}"


@dataclasses.dataclass(frozen=True)
class FirstNonFinite:
    """The first tensor that is not finite.

    Attributes:
        layer: name of the layer, with the layers around it: "block/dense". Empty for the loss.
        call: number of earlier calls of the layer in this pass (for instance of a recurrent cell).
        kind: class of the layer.
        place: what is not finite. In the forward pass: "output", "input" (it arose between the
            previous layer and this one, in code outside of any layer or in the cast to this layer's
            dtype) or "loss". In the backward pass: "output" (the gradient that reaches this layer),
            "input" (the gradient that it passes on) or the name of a variable.
        users: for a gradient that reaches an "output", the layers that it comes from.
        dtype: dtype of the tensor.
        size: number of values.
        nans: how many of them are NaN.
        infs: how many are infinite.
        largest_before: largest magnitude just before: of what the layer received or its last inner
            layer returned (forward), or of all gradients so far (backward). None if there was
            nothing before.
        finite_in_float32: whether the same tensor is finite if the whole model computes in float32;
            None if it does so already, or if that could not be tried.
        largest_in_float32: its largest finite magnitude in float32, or None.
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
        weights: the model's weights that hold NaN or infinity.
        loss: the loss, not scaled; None if there are no targets or no loss to compare with.
        scale: the loss scale of the backward pass; the largest, if the model's own step has
            several.
        forward: the first tensor of the forward pass that is not finite, or None.
        backward: the first gradient that is not finite, or None.
        cause: the cause, if known, such as a learning rate that was too high; otherwise empty.
        examined: what was run, if not a forward pass and the loss of `compile`.
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

    def __bool__(self) -> bool:
        """Whether something is not finite."""
        return not self.clean

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
            lines.append("Forward pass: " + _text(self.forward, _forward_text, "before it"))
        if self.loss is None:
            lines += [no_backward] if no_backward else []
        elif not np.isfinite(self.loss):
            lines.append(f"Backward pass: the loss is {self.loss}, so no gradient means anything.")
        else:
            text = _text(self.backward, _backward_text, "among the gradients before it")
            lines.append(f"Backward pass (loss {self.loss:.6g}, loss scale {scale}): {text}")
            if self.forward and not self.backward:
                lines.append(
                    "The loss and all gradients are finite nevertheless: a deliberate infinity, as "
                    "in an attention mask, does no harm."
                )
        return "\n".join(lines)


def _amount(bad: NonFiniteTensor | FirstNonFinite) -> str:
    parts = [f"{n:,} {what}" for n, what in ((bad.nans, "NaN"), (bad.infs, "infinite")) if n]
    return f"{' and '.join(parts)} of {bad.size:,} values"


def _text(first: FirstNonFinite | None, what: Callable[[FirstNonFinite], str], before: str) -> str:
    """What is not finite, the largest magnitude before it, and the result in float32."""
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
    amount = f"{_amount(first)}, in {first.dtype}"
    if first.place == "output":
        return f"{_layer_text(first)} is the first layer whose output is not finite: {amount}."
    cast = f", or in the cast to {first.dtype}" if first.dtype in HALF else ""
    return (
        f"what enters {_layer_text(first)} is the first tensor that is not finite: {amount}. "
        f"It arose outside of any layer{cast}."
    )


def _backward_text(first: FirstNonFinite) -> str:
    amount = f"{_amount(first)}, in {first.dtype}"
    if first.place != "output":
        return (
            f"{_layer_text(first)} is the first layer that produces a gradient that is not finite, "
            f"that of its {first.place}: {amount}."
        )
    cast = f"a cast to {first.dtype}, " if first.dtype in HALF else ""
    users = ", ".join(f"`{user}`" for user in first.users)
    source = users or f"the loss, {cast}or code outside of any layer"
    return (
        f"the gradient that reaches the output of {_layer_text(first)} is the first that is not "
        f"finite: {amount}. It comes from {source}."
    )


def _layer_text(first: FirstNonFinite) -> str:
    call = f", call number {first.call + 1}" if first.call else ""
    return f"`{first.layer}` ({first.kind}{call})"
