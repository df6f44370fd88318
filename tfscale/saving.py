"""Files: a tfscale optimizer's state, and that of the optimizers it takes the place of.

A file may come from tfscale (entries by name), from Keras' LossScaleOptimizer (numbered: two
unused ones, step counter, scale, then the inner optimizer's) or from a plain optimizer (numbered:
all of them the inner optimizer's). Keras' loader then visits the inner optimizer on its own.

What is loaded before the optimizer has variables is deferred until it has them. Keras drops it with
a warning, although `load_weights` into a freshly compiled model is how most runs are resumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tfscale import _compat
from tfscale.warnings import warn

_KERAS_OWN = 4  # iteration, learning rate, step counter, scale
_KERAS_UNBUILT = 2  # the first two of them
_DEFERRED_LOAD = "tfscale_deferred_load"  # attribute of an inner optimizer

Arrays = dict[str, np.ndarray]
Pairs = list[tuple[Any, Any]]  # of a variable and an array


def save(optimizer: Any, store: Any) -> None:
    """Writes the wrapper's own variables into `store` by name; Keras' saver visits the inner one.

    Args:
        optimizer: the `LossScaleOptimizer`.
        store: a mapping from names to arrays.
    """
    entries = {name: variable.numpy() for name, variable in _named(optimizer).items()}
    deferred = optimizer.deferred_state
    entries = deferred if _is_numbered(deferred) else {**entries, **deferred}
    # Keras' loaders warn where the count differs from theirs, and die where it does not.
    count = len(optimizer.inner_optimizer.variables)
    if not _is_numbered(entries) and len(entries) in (count, _KERAS_OWN + count):
        entries["not_of_keras"] = np.zeros(())
    for name, array in entries.items():
        store[name] = array


def load(optimizer: Any, store: Any) -> None:
    """Reads `store`, of whichever of the three kinds, into `optimizer` (see the module)."""
    arrays = _read(store)
    inner = optimizer.inner_optimizer
    inner_load = _DeferredLoad.of(inner)
    inner_load.undo, inner_load.count = [], None
    deferred: Arrays = {}
    if "dynamic_scale" in arrays:
        arrays.setdefault("held_scale", np.zeros(()))  # files from before there was one
        own = _named(optimizer)
        pairs = [(own[name], arrays[name]) for name in own if name in arrays]
        before = [(variable, variable.numpy()) for variable, _ in pairs]
        _assign(pairs)
        inner_load.undo = before
        if not optimizer.built:
            deferred = {name: arrays[name] for name in arrays if name not in own}
    elif inner.built:
        _load_numbered(optimizer, arrays)
    elif _is_untrained(arrays, inner):
        inner.load_own_variables(arrays)
    else:
        # Which of the entries belong to the inner optimizer is known once it is built.
        deferred = arrays
    _compat.set_untracked(optimizer, "deferred_state", deferred)


def set_weights(optimizer: Any, weights: Iterable[Any]) -> None:
    """Sets all variables from a list of arrays in the order of any of the three kinds."""
    arrays = [np.asarray(w) for w in weights]
    if optimizer.built:
        _set(optimizer, arrays)
    else:
        deferred = {str(i): array for i, array in enumerate(arrays)}
        _compat.set_untracked(optimizer, "deferred_state", deferred)


def _set(optimizer: Any, arrays: Sequence[np.ndarray]) -> None:
    own, inner = _compat.tracked(optimizer), optimizer.inner_optimizer.variables
    of_tfscale = [*own, *inner]
    if len(arrays) == len(of_tfscale) - 1:  # from before there was a held scale, the last of `own`
        arrays = [*arrays[: len(own) - 1], np.zeros(()), *arrays[len(own) - 1 :]]
    of_keras = [None, None, optimizer.step_counter, optimizer.dynamic_scale, *inner]
    for targets in (of_tfscale, of_keras, inner):
        if len(targets) == len(arrays):
            pairs = zip(targets, arrays, strict=True)
            _assign([(variable, array) for variable, array in pairs if variable is not None])
            return
    raise ValueError(
        f"set_weights() needs {len(of_tfscale)} arrays as in `optimizer.variables`, "
        f"{len(of_keras)} as in Keras' LossScaleOptimizer or {len(inner)} as in the inner "
        f"optimizer. Received: {len(arrays)} arrays."
    )


def defer_loads(inner: Any) -> None:
    """Lets `inner`, and the optimizers in it, keep what is loaded before they have variables.

    Args:
        inner: the optimizer that is wrapped.
    """
    for optimizer in _compat.sub_optimizers(inner):
        if _DEFERRED_LOAD not in vars(optimizer):
            _DeferredLoad(optimizer)


def load_deferred(optimizer: Any) -> None:
    """Loads what the optimizer was asked to load before it was built.

    Args:
        optimizer: the `LossScaleOptimizer`, whose inner optimizer has its variables now.
    """
    defer_loads(optimizer.inner_optimizer)  # a `MultiOptimizer` may have made new ones
    inner, *parts = map(_DeferredLoad.of, _compat.sub_optimizers(optimizer.inner_optimizer))
    deferred = optimizer.deferred_state
    _compat.set_untracked(optimizer, "deferred_state", {})
    try:
        for each in (inner, *parts):
            each.load_deferred()
        if not _is_numbered(deferred):
            own = _named(optimizer)
            _assign([(own[name], deferred[name]) for name in deferred if name in own])
        elif len(optimizer.variables) - len(deferred) in (0, 1):
            _set(optimizer, list(deferred.values()))
        elif inner.count is None or len(deferred) != _KERAS_UNBUILT + inner.count:
            _load_numbered(optimizer, deferred)
    except ValueError as error:
        # Not raised again: the weights of such a model did not fit either when it was loaded.
        warn(str(error))


class _DeferredLoad:
    """Replaces `load_own_variables` and `save_own_variables` of one optimizer.

    Attributes:
        undo: pairs of a variable of the wrapper and its value before the file that is being read,
            which is put back if the rest of that file turns out not to fit.
        count: number of entries that that file had for this optimizer, None where it had none.
    """

    def __init__(self, optimizer: Any) -> None:
        self.undo: Pairs = []
        self.count: int | None = None
        self._optimizer = optimizer
        self._deferred: Arrays = {}
        self._load_now, self._save_now = optimizer.load_own_variables, optimizer.save_own_variables
        _compat.set_untracked(optimizer, _DEFERRED_LOAD, self)
        _compat.set_untracked(optimizer, "load_own_variables", self.load)
        _compat.set_untracked(optimizer, "save_own_variables", self.save)

    @staticmethod
    def of(optimizer: Any) -> _DeferredLoad:
        return vars(optimizer)[_DEFERRED_LOAD]

    def load(self, store: Any) -> None:
        arrays = _read(store)
        if not arrays:
            # Keras' visit to an inner optimizer that the file does not have.
            return
        self.count = len(arrays)
        variables = self._optimizer.variables
        if not self._optimizer.built and not _is_untrained(arrays, self._optimizer):
            self._deferred = arrays
            return
        self._deferred = {}
        undo, self.undo = self.undo, []
        fits = False
        try:
            if _is_numbered(arrays) and len(arrays) == len(variables):
                _check([(v, arrays[str(i)]) for i, v in enumerate(variables)])
            self._load_now(arrays)
            fits = len(arrays) == len(variables)  # else Keras has warned
        finally:
            if not fits:
                _assign(undo)

    def save(self, store: Any) -> None:
        if not self._deferred:
            self._save_now(store)
        for name, array in self._deferred.items():
            store[name] = array

    def load_deferred(self) -> None:
        if self._optimizer.built:
            self.load(self._deferred)


def _load_numbered(optimizer: Any, arrays: Arrays) -> None:
    inner = optimizer.inner_optimizer
    own = []
    if len(arrays) == _KERAS_OWN + len(inner.variables):
        own = [(optimizer.step_counter, arrays["2"]), (optimizer.dynamic_scale, arrays["3"])]
        _check(own)
        arrays = {str(i): arrays[str(_KERAS_OWN + i)] for i in range(len(inner.variables))}
    inner.load_own_variables(arrays)
    _assign(own)


def _named(optimizer: Any) -> dict[str, Any]:
    """The wrapper's own variables by name; names of master weights need not be unique."""
    masters = {id(copy): f"master_{i}" for i, copy in enumerate(optimizer.masters.copies)}
    return {masters.get(id(v), v.name): v for v in _compat.tracked(optimizer)}


def _is_numbered(arrays: Mapping[str, Any]) -> bool:
    return "0" in arrays


def _is_untrained(arrays: Arrays, optimizer: Any) -> bool:
    """Whether `arrays` are those of an optimizer like this unbuilt one before its first step."""
    return len(arrays) == len(optimizer.variables) and not np.any(arrays.get("0", 1))


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
