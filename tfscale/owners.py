"""Which layers own these variables?

Keras variables do not know their layer and an optimizer does not know its model, so the layers that
are alive are looked through. That takes a fraction of a second: never do it in every step.
"""

from __future__ import annotations

import gc

import keras
import tensorflow as tf

from tfscale import _compat


def live_layers() -> list:
    """Every Keras layer that is alive, models among them."""
    # By type: asking a dead weak reference for its class raises.
    return [obj for obj in gc.get_objects() if issubclass(type(obj), keras.layers.Layer)]


def not_finite(variables) -> list[str]:
    """Paths of those floating `variables` that hold an infinity or a NaN."""
    floating = [v for v in variables if tf.as_dtype(v.dtype).is_floating]
    return [
        v.path for v in floating if not tf.reduce_all(tf.math.is_finite(tf.convert_to_tensor(v)))
    ]


def not_finite_state(variables) -> list[str]:
    """Paths of the state beside `variables` that holds an infinity or a NaN.

    Args:
        variables: the trainable variables of an optimizer.

    Returns:
        Sorted paths of floating variables that are not trained, such as the moving statistics of
        BatchNorm, in the layers and models that own `variables`.
    """
    wanted = {id(_compat.tf_variable(v)) for v in variables}
    state = {}
    for layer in live_layers():
        if any(
            id(_compat.tf_variable(v)) in wanted for v in _compat.own_variables(layer, deep=True)
        ):
            state.update({id(v): v for v in _compat.state_variables(layer)})
    return sorted(not_finite(state.values()))


def remedy(paths: list[str]) -> str:
    """What `fit` says when it ends and state is not finite."""
    return (
        "Not finite after skipped steps, so that evaluate() and predict() will not be either: "
        f"{', '.join(paths)}. Keras' own train step writes such state before the optimizer can "
        "skip. Put these variables back, from saved weights or with `variable.assign(...)`, and "
        "compile with tfscale.compile(model, optimizer, ...), which leaves them alone on a skip."
    )
