"""Float32 master weights: copies of variables in half precision.

A float16 or bfloat16 weight rounds away any update smaller than half a unit in its last place; a
float32 copy accumulates them. The inner optimizer is built on the copies, so its slots, moving
averages, weight decay and constraints use float32 too. Each applied step rounds the copies into the
model. Variables in float32 have no copy and cost nothing.

Memory: 4 bytes for each half-precision parameter, and 4 instead of 2 for each of its slots.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfscale import _compat, gradients
from tfscale.warnings import warn

Variable: TypeAlias = keras.Variable | tf.Variable


def _is_half(variable: Variable) -> bool:
    return tf.as_dtype(variable.dtype) in (tf.float16, tf.bfloat16)


class Masters:
    """The float32 copies of those trainable variables of one optimizer that need one."""

    def __init__(self, variables: Iterable[Variable] = ()) -> None:
        self._pairs = {_key(v): (v, _copy(v)) for v in variables if _is_half(v)}

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

    def check(self, variables: Iterable[Variable], asked: bool | str) -> None:
        """Warns if the inner optimizer was built without copies, although there should be some.

        Raises:
            ValueError: the same, and `asked`, the optimizer's `master_weights`, is True.
        """
        if self or not asked or not any(map(_is_half, variables)):
            return
        text = (
            "The optimizer was built on half-precision variables before it was wrapped, so it has "
            "no float32 master weights. Wrap it before its first step."
        )
        if asked is True:
            raise ValueError(text)
        warn(text)

    def build(self, inner: keras.optimizers.Optimizer, variables: Iterable[Variable]) -> None:
        """Builds `inner` on the copies, and on those of `variables` that have none."""
        for optimizer in _compat.sub_optimizers(inner):
            excluded = _compat.excluded_from_weight_decay(optimizer)
            for variable in variables:
                if _compat.variable_key(optimizer, variable) in excluded:
                    excluded.add(_compat.variable_key(optimizer, self.of(variable)))
        inner.build([self.of(v) for v in variables])

    def update(
        self, inner: keras.optimizers.Optimizer, pairs: Sequence[tuple[Any, Variable]]
    ) -> None:
        """Updates pairs of an unscaled gradient (or None) and a variable with `inner`."""
        with self._in_step():
            updated = [self.of(v) for _, v in pairs]
            grads = [
                gradients.cast(g, tf.as_dtype(v.dtype))
                for (g, _), v in zip(pairs, updated, strict=True)
            ]
            grads = gradients.in_one_graph(grads)
            inner.apply_gradients(list(zip(grads, updated, strict=True)))

    def finalize(self, inner: keras.optimizers.Optimizer, variables: Iterable[Variable]) -> None:
        """Runs the end of `fit` for `inner`, which may assign moving averages."""
        with self._in_step():
            inner.finalize_variable_values([self.of(v) for v in variables])

    @contextlib.contextmanager
    def _in_step(self) -> Iterator[None]:
        """Reads the variables into the copies first, and writes the copies back at the end."""
        for variable, copy in self._pairs.values():
            # Others may have assigned to the variable, such as loaded weights.
            now, mine = tf.convert_to_tensor(variable), tf.convert_to_tensor(copy)
            same = tf.equal(tf.cast(mine, now.dtype), now)
            copy.assign(tf.where(same, mine, tf.cast(now, tf.float32)))
        yield
        # All of them, because an optimizer may also write variables without a gradient, such as by
        # moving averages.
        for variable, copy in self._pairs.values():
            variable.assign(tf.cast(tf.convert_to_tensor(copy), variable.dtype))


def _key(variable: Variable) -> int:
    return id(_compat.tf_variable(variable))


def _copy(variable: Variable) -> keras.Variable:
    """A float32 `keras.Variable` with the value, path and constraint of `variable`."""
    value = tf.cast(tf.convert_to_tensor(variable), tf.float32)
    *scopes, name = getattr(variable, "path", variable.name.partition(":")[0]).split("/")
    with contextlib.ExitStack() as stack:
        # Optimizers pick variables by path and name.
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        copy = keras.Variable(value, dtype="float32", name=name)
    copy.constraint = getattr(variable, "constraint", None)
    copy.overwrite_with_gradient = getattr(variable, "overwrite_with_gradient", False)
    return copy
