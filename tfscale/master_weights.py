"""Float32 master weights for variables that are themselves in half precision.

An update smaller than half a unit in the last place of a float16 or bfloat16 weight is rounded away
every time; added to a float32 copy, it accumulates. The inner optimizer is built on the copies, so
that slots, moving averages, weight decay and constraints live in float32 too, and each applied step
rounds the copies into the model. Variables in float32 have no copy and cost nothing.

Memory: 4 bytes for each half-precision parameter, and each slot takes 4 bytes instead of 2.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TypeAlias

import keras
import tensorflow as tf

from tfscale import _compat

Variable: TypeAlias = keras.Variable | tf.Variable


def is_half(variable: Variable) -> bool:
    """Whether `variable` is float16 or bfloat16."""
    return tf.as_dtype(variable.dtype) in (tf.float16, tf.bfloat16)


class Masters:
    """The float32 copies of one optimizer.

    Args:
        variables: the trainable variables; those in half precision get a copy.
    """

    def __init__(self, variables: Iterable[Variable] = ()) -> None:
        self._pairs = {_key(v): (v, _copy(v)) for v in variables if is_half(v)}

    def __len__(self) -> int:
        return len(self._pairs)

    @property
    def copies(self) -> list[keras.Variable]:
        """The copies."""
        return [copy for _, copy in self._pairs.values()]

    @property
    def variables(self) -> list[Variable]:
        """Both the variables and their copies."""
        return [v for pair in self._pairs.values() for v in pair]

    def of(self, variable: Variable) -> Variable:
        """The copy of `variable`, or `variable` itself."""
        return self._pairs.get(_key(variable), (variable, variable))[1]

    def read(self) -> None:
        """Copies what was assigned to the variables from outside, such as loaded weights."""
        for variable, copy in self._pairs.values():
            now, mine = tf.convert_to_tensor(variable), tf.convert_to_tensor(copy)
            same = tf.equal(tf.cast(mine, now.dtype), now)
            copy.assign(tf.where(same, mine, tf.cast(now, tf.float32)))

    def write(self) -> None:
        """Rounds the copies into the variables.

        All of them, because an optimizer may write more than it was given gradients for, such as
        the moving averages.
        """
        for variable, copy in self._pairs.values():
            variable.assign(tf.cast(tf.convert_to_tensor(copy), variable.dtype))


def _key(variable: Variable) -> int:
    return id(_compat.tf_variable(variable))


def _copy(variable: Variable) -> keras.Variable:
    """A float32 `keras.Variable` with the value, path and constraint of `variable`."""
    value = tf.cast(tf.convert_to_tensor(variable), tf.float32)
    *scopes, name = getattr(variable, "path", variable.name.partition(":")[0]).split("/")
    with contextlib.ExitStack() as stack:
        # The same path and name, by which optimizers pick variables.
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        copy = keras.Variable(value, dtype="float32", name=name)
    copy.constraint = getattr(variable, "constraint", None)
    copy.overwrite_with_gradient = getattr(variable, "overwrite_with_gradient", False)
    return copy


def exclude_from_weight_decay(
    inner: keras.optimizers.Optimizer, masters: Masters, variables: Iterable[Variable]
) -> None:
    """Excludes the copies of those variables that are excluded from weight decay."""
    for optimizer in _compat.sub_optimizers(inner):
        excluded = _compat.excluded_from_weight_decay(optimizer)
        for variable in variables:
            if _compat.variable_key(optimizer, variable) in excluded:
                excluded.add(_compat.variable_key(optimizer, masters.of(variable)))
