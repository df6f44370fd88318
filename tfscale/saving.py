"""Saves and loads an optimizer's state, also from files of Keras' own optimizers.

A file may come from tfscale (named entries), from Keras' LossScaleOptimizer (numbered: two unused
ones, step counter, scale, then the inner optimizer's) or from a plain optimizer (numbered: all of
them the inner optimizer's). Keras' loader then loads the inner optimizer separately: from that
optimizer's entries, or from nothing if the file is a plain optimizer's.

State that is loaded before the optimizer has variables is deferred until it has them; scale,
counters and `iterations`, which exist from the start, are set at once. Keras drops such a file with
a warning, although most runs are resumed by `load_weights` into a freshly compiled model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tfscale import _compat
from tfscale.warnings import warn

_KERAS_OWN = 4  # iteration, learning rate, step counter, scale
_DEFERRED_LOAD = "tfscale_deferred_load"  # attribute of an inner optimizer

Arrays = dict[str, np.ndarray]
Pairs = list[tuple[Any, Any]]  # of a variable and an array


def save(optimizer: Any, store: Any) -> None:
    """Writes the wrapper's own variables by name; Keras' saver visits the inner optimizer."""
    entries = {name: variable.numpy() for name, variable in _named(optimizer).items()}
    entries |= optimizer.deferred_state
    # Keras' loaders warn if the number of entries differs from theirs, and fail if it does not.
    count = len(optimizer.inner_optimizer.variables)
    if len(entries) in (count, _KERAS_OWN + count):
        entries["not_of_keras"] = np.zeros(())
    for name, array in entries.items():
        store[name] = array


def load(optimizer: Any, store: Any) -> None:
    """Loads `store`, of any of the three kinds (see the module), into `optimizer`."""
    arrays = _read(store)
    inner_load = _DeferredLoad.of(optimizer.inner_optimizer)
    inner_load.undo, inner_load.unsorted = [_undo(optimizer)], None
    deferred: Arrays = {}
    if "dynamic_scale" in arrays:
        arrays.setdefault("held_scale", np.zeros(()))  # older files have none
        own = _named(optimizer)
        _assign([(own[name], arrays[name]) for name in own if name in arrays])
        if not optimizer.built:
            deferred = {name: arrays[name] for name in arrays if name not in own}
    else:
        inner_load.unsorted = optimizer, arrays
    _compat.set_untracked(optimizer, "deferred_state", deferred)


def set_weights(optimizer: Any, weights: Iterable[Any]) -> None:
    """Sets all variables from arrays in the order of any of the three kinds."""
    arrays = [np.asarray(w) for w in weights]
    own, inner = _compat.tracked(optimizer), optimizer.inner_optimizer.variables
    of_tfscale = [*own, *inner]
    if len(arrays) == len(of_tfscale) - 1:  # older lists lack the held scale, the last of `own`
        arrays = [*arrays[: len(own) - 1], np.zeros(()), *arrays[len(own) - 1 :]]
    of_keras = [None, None, optimizer.step_counter, optimizer.dynamic_scale, *inner]
    for targets in (of_tfscale, of_keras, inner):
        if len(targets) == len(arrays) and optimizer.built:
            pairs = zip(targets, arrays, strict=True)
            _assign([(variable, array) for variable, array in pairs if variable is not None])
            return
    raise ValueError(
        f"set_weights() needs a built optimizer and {len(of_tfscale)} arrays as in "
        f"`optimizer.variables`, {len(of_keras)} as in Keras' LossScaleOptimizer or {len(inner)} "
        f"as in the inner optimizer. Received: {len(arrays)} arrays, built={optimizer.built}. "
        "Before the first step call `optimizer.build(model.trainable_variables)`."
    )


def defer_loads(inner: Any) -> None:
    """Makes `inner`, and the optimizers in it, keep what is loaded before they have variables."""
    for optimizer in _compat.sub_optimizers(inner):
        if _DEFERRED_LOAD not in vars(optimizer):
            _DeferredLoad(optimizer)


def load_deferred(optimizer: Any) -> None:
    """Loads what was deferred; the wrapper and its inner optimizer now have their variables."""
    defer_loads(optimizer.inner_optimizer)  # a `MultiOptimizer` may have made new ones
    deferred = optimizer.deferred_state
    _compat.set_untracked(optimizer, "deferred_state", {})
    try:
        loads = map(_DeferredLoad.of, _compat.sub_optimizers(optimizer.inner_optimizer))
        fits = [each.load_deferred() for each in loads]
        own = _named(optimizer) if all(fits) else {}
        _assign([(own[name], deferred[name]) for name in deferred if name in own])
    except ValueError as error:
        # Not raised: when it was loaded, the weights of such a model did not fit either.
        warn(str(error))


class _DeferredLoad:
    """Replaces `load_own_variables` and `save_own_variables` of one optimizer.

    Attributes:
        undo: functions that undo what was loaded so far from the current file, in case the rest of
            it does not fit or cannot be read.
        unsorted: the wrapper and its numbered entries, until it is known which of them belong to
            this optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self.undo: list[Callable[[], None]] = []
        self.unsorted: tuple[Any, Arrays] | None = None
        self._optimizer = optimizer
        self._deferred: Arrays = {}
        self._load_now, self._save_now = optimizer.load_own_variables, optimizer.save_own_variables
        _compat.set_untracked(optimizer, _DEFERRED_LOAD, self)
        _compat.set_untracked(optimizer, "load_own_variables", self.load)
        _compat.set_untracked(optimizer, "save_own_variables", self.save)

    @staticmethod
    def of(optimizer: Any) -> _DeferredLoad:
        return vars(optimizer)[_DEFERRED_LOAD]

    def load(self, store: Any) -> bool:
        """Loads, defers or undoes everything; returns whether the entries may fit."""
        fits = False
        try:
            fits = self._load(self._own(_read(store)))
        finally:
            if not fits:
                for undo in self.undo:
                    undo()
                self.undo = []
        return fits

    def _own(self, arrays: Arrays) -> Arrays:
        """This optimizer's entries, if Keras passes `arrays`; the wrapper's are loaded."""
        unsorted, self.unsorted = self.unsorted, None
        if unsorted is None:
            return arrays
        wrapper, numbered = unsorted
        if arrays and len(numbered) == _KERAS_OWN + len(arrays):
            _assign([(wrapper.step_counter, numbered["2"]), (wrapper.dynamic_scale, numbered["3"])])
        elif not numbered:
            self.undo = []  # a file without an optimizer
        return arrays or numbered

    def _load(self, arrays: Arrays) -> bool:
        if not arrays and not self.undo:
            return True  # Keras loads an optimizer that the file lacks
        variables = self._optimizer.variables
        as_many = len(arrays) == len(variables)
        is_untrained = as_many and not np.any(arrays.get("0", 1))
        self._deferred = {}
        if arrays and not self._optimizer.built and not is_untrained:
            own = _compat.tracked(self._optimizer)  # `iterations` and, if there is one, the rate
            before = [(v, v.numpy()) for v in own]
            self.undo.append(lambda: _assign(before))
            pairs = [(v, arrays[str(i)]) for i, v in enumerate(own) if str(i) in arrays]
            _assign([(v, array) for v, array in pairs if tuple(v.shape) == array.shape])
            self._deferred = arrays
            return True
        if as_many and "0" in arrays:
            _check([(v, arrays[str(i)]) for i, v in enumerate(variables)])
        self._load_now(arrays)
        if as_many:  # else Keras has warned
            self.undo = []
        return as_many

    def save(self, store: Any) -> None:
        if not self._deferred:
            self._save_now(store)
        for name, array in self._deferred.items():
            store[name] = array

    def load_deferred(self) -> bool:
        return not (self._optimizer.built and self._deferred) or self.load(self._deferred)


def _undo(optimizer: Any) -> Callable[[], None]:
    """A function that restores the wrapper's current state."""
    before = [(v, v.numpy()) for v in _compat.tracked(optimizer)]
    deferred = optimizer.deferred_state

    def undo() -> None:
        _assign(before)
        _compat.set_untracked(optimizer, "deferred_state", deferred)
        optimizer.reports.ignore_earlier_skips()

    return undo


def _named(optimizer: Any) -> dict[str, Any]:
    """The wrapper's own variables by name; names of master weights need not be unique."""
    masters = {id(copy): f"master_{i}" for i, copy in enumerate(optimizer.masters.copies)}
    return {masters.get(id(v), v.name): v for v in _compat.tracked(optimizer)}


def _read(store: Any) -> Arrays:
    return {name: np.asarray(store[name]) for name in store.keys()}  # noqa: SIM118 (Keras' stores)


def _check(pairs: Pairs) -> None:
    for variable, array in pairs:
        if tuple(variable.shape) != array.shape:
            raise ValueError(
                f"Optimizer variable {variable.path} has shape {tuple(variable.shape)}. "
                f"Received: an array of shape {array.shape}. Nothing was loaded."
            )


def _assign(pairs: Pairs) -> None:
    # All shapes are checked before the first assignment: a bad file changes nothing.
    _check(pairs)
    for variable, array in pairs:
        variable.assign(array)
