"""Finds out which eager gradients are already unscaled.

An eager tensor does not show what it is computed from. But TensorFlow numbers eager tensors as it
creates them, so the number says between which calls of `scale_loss` and `unscale` that was. The
tensors that `unscale` returned are known by identity. An older tensor cannot be computed from them.
A newer tensor with the shape of an unscaled gradient counts as its clipped form. Nothing here keeps
a tensor alive.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import tensorflow as tf

from tfscale import _compat, gradients, misuse

_given: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_returned: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

_logs: weakref.WeakSet[EagerLog] = weakref.WeakSet()

_CALLS = 8  # calls that an optimizer remembers


class _Call(NamedTuple):
    number: int  # of the first tensor that the call created
    # Of the gradients that `unscale` returned and that were not applied yet; None: `scale_loss`.
    shapes: collections.Counter[tuple[int, ...]] | None


def remember_parts(given: Any, gradient: Any) -> None:
    """Remembers `gradient` if it was made from parts that `unscale` returned."""
    parts = tf.nest.flatten(given, expand_composites=False)
    if isinstance(given, (list, tuple)) and all(map(is_unscaled, parts)):
        _returned[id(gradient)] = gradient


def is_unscaled(gradient: Any) -> bool:
    """Whether the `unscale` of any optimizer returned `gradient`."""
    return _is_in(_returned, gradient)


def may_be_unscaled(gradient: Any) -> bool:
    """Whether an eager `gradient` is, or may be computed from, a result of any `unscale`."""
    return is_unscaled(gradient) or any(log.has_unscaled(gradient) for log in _logs)


class EagerLog:
    """The last calls of one optimizer in eager code."""

    def __init__(self) -> None:
        self._calls: collections.deque[_Call] = collections.deque(maxlen=_CALLS)
        _logs.add(self)

    def loss_scaled(self, scaled: Iterable[Any]) -> None:
        """`scale_loss` returned `scaled`."""
        self._calls.append(_Call(min(map(_compat.creation_number, scaled)), None))

    def unscaled(self, pairs: list[tuple[Any, Any]]) -> None:
        """`unscale` was called: pairs of a gradient given to it and its result."""
        tensors = [(gradients.values(given), gradients.values(result)) for given, result in pairs]
        for given, result in tensors:
            if given is not result:
                _given[id(given)] = given
            _returned[id(result)] = result
        number = min(_compat.creation_number(result) for _, result in tensors)
        self._calls.append(_Call(number, collections.Counter(_shape(r) for _, r in tensors)))

    def are_unscaled(self, grads: list[Any], pending: int) -> list[bool]:
        """Which gradients of an update are unscaled.

        Args:
            grads: list of eager gradients that are not None.
            pending: number of gradients unscaled since the last loss and not applied yet.

        Raises:
            ValueError: that is unknown for some of them.
        """
        if any(_is_in(_given, g) for g in grads):
            raise ValueError(misuse.RESULT_UNUSED)
        unscaled = list(map(is_unscaled, grads))
        made_after: dict[int, list[int]] = collections.defaultdict(list)
        for place, gradient in enumerate(grads):
            made_after[self._last_call_before(gradient)].append(place)
        pending -= sum(unscaled)
        for call, places in made_after.items():
            unknown = [place for place in places if not unscaled[place]]
            if unknown and self._are_clipped(call, [grads[i] for i in unknown], pending):
                for place in unknown:
                    unscaled[place] = True
            applied = collections.Counter(_shape(grads[i]) for i in places if unscaled[i])
            for shapes in self._unscaled_until(call):
                both = shapes & applied
                shapes -= both
                applied -= both
        return unscaled

    def has_unscaled(self, gradient: Any) -> bool:
        """Whether `gradient` may be computed from a result of `unscale` that was not applied."""
        call = self._last_call_before(gradient)
        newest = call == len(self._calls) - 1
        return newest and any(shapes[_shape(gradient)] for shapes in self._unscaled_until(call))

    def _are_clipped(self, call: int, grads: list[Any], pending: int) -> bool:
        """Whether gradients made after a call are computed from results of `unscale`."""
        newest = call == len(self._calls) - 1
        if newest and pending <= 0:
            return False  # a function has scaled a loss since, or all were applied
        if call < 0 or self._calls[call].shapes is None:
            # Then only a `tf.function`, which logs nothing here, can have unscaled them.
            if newest and pending < len(grads):
                raise ValueError(misuse.AMBIGUOUS)
            return newest
        shapes = sum(self._unscaled_until(call), collections.Counter())
        given = collections.Counter(map(_shape, grads))
        fitting = shapes & given
        if fitting and fitting != given:
            raise ValueError(misuse.AMBIGUOUS)
        return bool(fitting)

    def _unscaled_until(self, call: int) -> list[collections.Counter[tuple[int, ...]]]:
        """The shapes that each `unscale` returned, from the last loss up to this call."""
        found = []
        for earlier in reversed(range(call + 1)):
            shapes = self._calls[earlier].shapes
            if shapes is None:
                break
            found.append(shapes)
        return found

    def _last_call_before(self, gradient: Any) -> int:
        """The position of the last call before `gradient` was made, -1 if unknown."""
        number = _compat.creation_number(gradients.values(gradient))
        for place in reversed(range(len(self._calls))):
            if self._calls[place].number <= number:
                return place
        return -1


def _shape(gradient: Any) -> tuple[int, ...]:
    return tuple(gradients.values(gradient).shape)


def _is_in(known: weakref.WeakValueDictionary[int, Any], gradient: Any) -> bool:
    value = gradients.values(gradient)
    return known.get(id(value)) is value
