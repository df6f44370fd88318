"""How a task is trained: in which precision, and who scales the loss."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

import tfscale
from benchmarks.trainings.names import VARIANTS, parse


@contextlib.contextmanager
def precision(name: str) -> Iterator[None]:
    """Within the context, new layers have the dtype policy of the variant."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(VARIANTS[parse(name)[0]])
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def compile_model(name: str, model: keras.Model, optimizer: Any, **arguments: Any) -> None:
    """Compiles a model, built within `precision(name)`, as this variant does.

    Args:
        name: the variant.
        model: the model.
        optimizer: a Keras optimizer, not wrapped.
        **arguments: further arguments of `compile`.
    """
    variant, settings = parse(name)
    policy = tfscale.Dynamic(**settings) if settings else "auto"  # type: ignore[arg-type]
    if variant == "wrap":
        optimizer = tfscale.wrap(optimizer, policy)
    if variant == "compile":
        tfscale.compile(model, tfscale.wrap(optimizer, policy), **arguments)
    else:
        model.compile(optimizer, auto_scale_loss=variant == "keras", **arguments)
