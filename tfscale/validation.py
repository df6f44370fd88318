"""Checks the gradients of an update, in any form that Keras takes, before anything changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale import _compat, gradients


def to_gradient(value: Any) -> Any:
    """As `to_floating`, but None stays None."""
    return None if value is None else to_floating(value)


def to_floating(value: Any) -> Any:
    """Converts to a tensor or `IndexedSlices` of floating or complex dtype, if it is not one."""
    if not isinstance(value, (tf.Tensor, tf.IndexedSlices)):
        value = tf.convert_to_tensor(_compat.tf_variable(value))
    if value.dtype.is_floating or value.dtype.is_complex:
        return value
    return gradients.cast(value, tf.float32)


def check_options(unscaled: Any, reduce_flag: Any) -> None:
    """Raises a TypeError if one of these arguments of `apply_gradients` is invalid."""
    if unscaled is not None and not isinstance(unscaled, bool):
        raise TypeError(
            f"`unscaled` must be True, False, or None to find out. Received: unscaled={unscaled!r}"
        )
    if reduce_flag is not None and not callable(reduce_flag):
        raise TypeError(
            "`reduce_flag` must be a function that sums a scalar float32 tensor over all replicas. "
            f"Received: reduce_flag={reduce_flag!r}"
        )


def check(grads: Sequence[Any], variables: Sequence[Any]) -> None:
    """Raises if gradients cannot belong to `variables`.

    Args:
        grads: list of tensors, `IndexedSlices` and None.
        variables: list of variables.

    Raises:
        ValueError: their numbers differ, all gradients are None, or one does not have the shape of
            its variable.
    """
    if len(variables) != len(grads):
        raise ValueError(
            "apply() needs one gradient for each variable. Received: "
            f"{len(grads)} gradients and {len(variables)} variables."
        )
    if all(gradient is None for gradient in grads):
        raise ValueError(
            "No gradients provided for any variable: all of them are None. Scale the loss inside "
            "the tape, `scaled = optimizer.scale_loss(loss)`, and differentiate what it returned, "
            "`tape.gradient(scaled, variables)`."
        )
    for gradient, variable in zip(grads, variables, strict=True):
        if gradient is not None:
            _check_shape(gradient, variable)


def _check_shape(gradient: Any, variable: Any) -> None:
    own, given = tf.TensorShape(variable.shape), gradients.values(gradient).shape
    if isinstance(gradient, tf.IndexedSlices):
        own, given = own[1:], given[1:]
    if own == given:
        return
    try:
        fits = tf.broadcast_static_shape(given, own).is_compatible_with(own)
    except ValueError:
        fits = False
    if not fits:
        rows = "rows of " if isinstance(gradient, tf.IndexedSlices) else ""
        path = getattr(variable, "path", variable.name)
        raise ValueError(
            f"A gradient must have the shape of its variable. Received: {rows}shape {given} for "
            f"{path} with {rows}shape {own}. Are gradients and variables in the same order?"
        )
