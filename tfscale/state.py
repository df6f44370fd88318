"""Files: a tfscale optimizer's state, and that of the optimizers it takes the place of.

A file may come from tfscale (entries by name), from Keras' LossScaleOptimizer (numbered: two
unused ones, step counter, scale, then the inner optimizer's) or from a plain optimizer (numbered:
all of them the inner optimizer's). Keras' loader then visits the inner optimizer by itself.
"""

from __future__ import annotations

import numpy as np

_KERAS_OWN = 4  # iteration, learning rate, step counter, scale


def save(optimizer, store) -> None:
    """Writes the wrapper's own variables into `store` by name; Keras' saver visits the inner one.

    Args:
        optimizer: the `LossScaleOptimizer`.
        store: a mapping from names to arrays.
    """
    for name, variable in _named(optimizer).items():
        store[name] = variable.numpy()


def load(optimizer, store) -> None:
    """Reads `store`, of whichever of the three kinds, into `optimizer` (see the module)."""
    names = set(store.keys())
    if "dynamic_scale" in names:
        own = _named(optimizer)
        _assign([(own[n], np.asarray(store[n])) for n in own if n in names])
        if not optimizer.built:
            later = {n: np.asarray(store[n]) for n in names - set(own)}
            object.__setattr__(optimizer, "_remembered_masters", later)
        return
    numbered = [np.asarray(store[str(i)]) for i in range(len(names))]
    if not numbered:
        return
    _assign(_own_pairs(optimizer, numbered))
    inner = _inner_part(numbered)
    optimizer.inner_optimizer.load_own_variables({str(i): a for i, a in enumerate(inner)})


def set_weights(optimizer, weights) -> None:
    """Sets all variables from a list of arrays in the order of any of the three kinds."""
    own, inner = optimizer._variables, optimizer.inner_optimizer.variables
    if not optimizer.built:
        raise ValueError(
            "set_weights() needs a built optimizer: call "
            "`optimizer.build(model.trainable_variables)` first."
        )
    arrays = [np.asarray(w) for w in weights]
    counts = {len(own) + len(inner): "tfscale", _KERAS_OWN + len(inner): "keras", len(inner): "-"}
    if len(arrays) not in counts:
        raise ValueError(
            f"set_weights() needs {len(own) + len(inner)} arrays as in `optimizer.variables`, "
            f"{_KERAS_OWN + len(inner)} as in Keras' LossScaleOptimizer or {len(inner)} as in the "
            f"inner optimizer. Received: {len(arrays)} arrays."
        )
    if len(arrays) == len(own) + len(inner):
        pairs = list(zip([*own, *inner], arrays, strict=True))
    else:
        pairs = _own_pairs(optimizer, arrays) + list(zip(inner, _inner_part(arrays), strict=True))
    _assign(pairs)


def _named(optimizer) -> dict:
    """The wrapper's own variables by name; names of master weights need not be unique."""
    masters = {id(copy): f"master_{i}" for i, copy in enumerate(optimizer.masters.copies)}
    return {masters.get(id(v), v.name): v for v in optimizer._variables}


def _is_keras_wrapper(arrays) -> bool:
    """Whether numbered entries are those of Keras' LossScaleOptimizer.

    There, entries 0, 2 and 4 are integer counters; a plain optimizer has one, at 0.
    """
    first = arrays[: _KERAS_OWN + 1]
    if len(first) <= _KERAS_OWN or any(a.shape != () for a in first):
        return False
    return all(np.issubdtype(first[i].dtype, np.integer) for i in (0, 2, 4))


def _own_pairs(optimizer, arrays) -> list:
    if not _is_keras_wrapper(arrays):
        return []
    return [(optimizer.step_counter, arrays[2]), (optimizer.dynamic_scale, arrays[3])]


def _inner_part(arrays) -> list:
    return arrays[_KERAS_OWN:] if _is_keras_wrapper(arrays) else arrays


def _assign(pairs) -> None:
    # All shapes are looked at before the first assignment: a bad file changes nothing.
    for variable, array in pairs:
        if tuple(variable.shape) != array.shape:
            raise ValueError(
                f"Optimizer variable {variable.path} has shape {tuple(variable.shape)}. "
                f"Received: an array of shape {array.shape}. Nothing was loaded."
            )
    for variable, array in pairs:
        variable.assign(array)


def remember_until_built(inner) -> None:
    """Lets `inner` keep what is loaded into it before it has variables.

    Keras drops such a state with a warning, although `load_weights` into a freshly compiled model
    is how most runs are resumed. `recall` hands it over once the optimizer is built.
    """
    if "_tfscale_remembered" in inner.__dict__:
        return
    load_now = inner.load_own_variables
    object.__setattr__(inner, "_tfscale_remembered", None)

    def load_own_variables(store):
        names = list(store.keys())
        if not names:
            # Keras' visit to an inner optimizer that the file does not have.
            return
        if inner.built:
            load_now(store)
            return
        arrays = {name: np.asarray(store[name]) for name in names}
        object.__setattr__(inner, "_tfscale_remembered", arrays)

    object.__setattr__(inner, "load_own_variables", load_own_variables)


def recall(optimizer) -> None:
    """Loads what the optimizer was asked to load before it was built."""
    masters = _named(optimizer)
    arrays = optimizer.__dict__.get("_remembered_masters") or {}
    _assign([(masters[name], array) for name, array in arrays.items() if name in masters])
    object.__setattr__(optimizer, "_remembered_masters", None)
    inner = optimizer.inner_optimizer
    remembered = inner.__dict__.get("_tfscale_remembered")
    if remembered is not None:
        object.__setattr__(inner, "_tfscale_remembered", None)
        inner.load_own_variables(remembered)
