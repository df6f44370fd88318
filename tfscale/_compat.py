"""Every private name of Keras and TensorFlow that tfscale touches, in one place.

`tests/test_compat.py` calls each of them, so that a release which drops one fails there first.
"""

from __future__ import annotations

import contextlib

import keras
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

if keras.backend.backend() != "tensorflow":
    raise ImportError(
        "tfscale needs Keras on the TensorFlow backend. Received: "
        f"keras.backend.backend()={keras.backend.backend()!r}. Set the environment variable "
        "KERAS_BACKEND=tensorflow (or the `backend` entry of ~/.keras/keras.json) before the "
        "first import of keras."
    )


def in_xla_context() -> bool:
    """Whether what is traced now will be compiled by XLA as a whole (`jit_compile=True`)."""
    if tf.executing_eagerly():
        return False
    return control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def outer_graphs():
    """The graph that is traced now and the graphs around it, from inside out; none in eager."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)


def sub_optimizers(optimizer) -> list:
    """`optimizer` and, if it is a `MultiOptimizer`, the optimizers in it."""
    return [optimizer, *getattr(optimizer, "_inner_optimizers", ())]


@contextlib.contextmanager
def gradients_already_reduced(optimizer):
    """Within: Keras' optimizer does not all-reduce its gradients over the replicas again."""
    targets = sub_optimizers(optimizer)
    for target in targets:
        object.__setattr__(target, "_all_reduce_sum_gradients", lambda pairs: list(pairs))
    try:
        yield
    finally:
        for target in targets:
            object.__delattr__(target, "_all_reduce_sum_gradients")


def strategy_without_merge_call() -> bool:
    """Whether the current strategy replaces `merge_call` by collectives (XLA on GPUs, TPUs)."""
    return tf.__internal__.distribute.strategy_supports_no_merge_call()


def own_variables(layer) -> list:
    """The variables that `layer` itself owns and trains, without those of the layers in it."""
    return list(layer._trainable_variables)


def state_variables(model) -> list:
    """The floating variables of `model` that a forward pass writes: no weights, no seeds."""
    frozen = {id(v) for layer in model._flatten_layers() for v in own_variables(layer)}
    return [
        v
        for v in model.non_trainable_variables
        if id(v) not in frozen and keras.backend.is_float_dtype(v.dtype)
    ]


def forward(model, x):
    """The model's output in training mode, as Keras' train step calls it."""
    return model(x, training=True) if model._call_has_training_arg else model(x)


def compute_loss(model, x, y, y_pred, sample_weight):
    """The model's loss, whichever signature its `compute_loss` has."""
    return model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)


def loss_tracker(model):
    """The metric that holds the epoch's mean loss."""
    return model._loss_tracker
