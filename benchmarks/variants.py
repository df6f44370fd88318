"""How the optimizer is wrapped: a variant maps the plain optimizer to the one that trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import keras

import tfscale

Optimizer: TypeAlias = keras.optimizers.Optimizer


def keras_compile(model: keras.Model, **arguments: Any) -> None:
    """`model.compile` with the optimizer exactly as given."""
    # auto_scale_loss would wrap the plain optimizer, and `none` would not be none.
    model.compile(auto_scale_loss=False, **arguments)


def tfscale_compile(model: keras.Model, **arguments: Any) -> None:
    """`tfscale.compile`: the whole step as one transaction."""
    tfscale.compile(model, **arguments)


@dataclass(frozen=True)
class Variant:
    """One way to scale the loss.

    Attributes:
        name: name on the command line.
        optimizer: wraps the plain optimizer.
        compile: replaces `model.compile` where the model's own `train_step` is measured.
        only_train_step: whether it needs the model's own `train_step`.
        quick: whether `--quick` measures it by default.
    """

    name: str
    optimizer: Callable[[Optimizer], Optimizer]
    compile: Callable[..., None] = keras_compile
    only_train_step: bool = False
    quick: bool = True


def _wrapped(update: str) -> Callable[[Optimizer], Optimizer]:
    def wrap(optimizer: Optimizer) -> Optimizer:
        return tfscale.wrap(optimizer, "dynamic", update=update)

    return wrap


def _unguarded(optimizer: Optimizer) -> Optimizer:
    """A constant scale and no check: only the numbers differ from the plain step.

    Gradients that are not zero draw more power, and a GPU at its limit lowers its clock. The scale
    is small enough not to overflow anywhere.
    """
    return tfscale.wrap(optimizer, tfscale.Static(256.0, skip_nonfinite=False))


def _unrecorded(optimizer: Optimizer) -> Optimizer:
    """The usual one without its record: the difference is the cost of the record."""
    made = tfscale.wrap(optimizer, "dynamic")
    for name in ("count_step", "count_applied", "count_nonfinite"):
        setattr(made.reports, name, lambda *args, **kwargs: None)
    return made


_ALL = (
    Variant("none", lambda optimizer: optimizer),
    Variant("keras", lambda optimizer: keras.optimizers.LossScaleOptimizer(optimizer)),
    Variant("tfscale", _wrapped("auto")),
    Variant("tfscale-cond", _wrapped("cond"), quick=False),
    Variant("tfscale-select", _wrapped("select"), quick=False),
    Variant("tfscale-compiled", _wrapped("compiled"), quick=False),
    Variant("tfscale-unguarded", _unguarded, quick=False),
    Variant("tfscale-unrecorded", _unrecorded, quick=False),
    Variant("tfscale-step", _wrapped("auto"), tfscale_compile, only_train_step=True),
)
VARIANTS: dict[str, Variant] = {v.name: v for v in _ALL}

BASELINES = {"torch": "torch", "torch-scaler": "torch"}
"""The baseline of each variant whose ratio does not refer to `none`."""
