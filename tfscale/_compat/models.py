"""Private names of Keras' layers, models and trainer."""

from __future__ import annotations

import gc
import inspect
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale._compat.lookup import KERAS, find, needs_private_names
from tfscale._compat.tensorflow import has_several_workers

Functional = find("keras.src.models.functional:Functional")

# Layers.


def live_layers() -> list[keras.layers.Layer]:
    """Every live Keras layer, including models.

    Keras variables do not know their layer, nor an optimizer its model. This takes a fraction of a
    second, so never call it in every step.
    """
    # By type, because a dead weak reference raises when asked for its class.
    return [obj for obj in gc.get_objects() if issubclass(type(obj), keras.layers.Layer)]


def model_of(optimizer: keras.optimizers.Optimizer) -> keras.Model | None:
    """The model that is compiled with `optimizer`; see `live_layers`."""
    models = (layer for layer in live_layers() if isinstance(layer, keras.Model))
    return next((m for m in models if vars(m).get("optimizer") is optimizer), None)


def own_variables(layer: keras.layers.Layer, deep: bool = False) -> list[keras.Variable]:
    """The variables that `layer` itself trains; with `deep`, also those of its inner layers."""
    layers = [layer, *sub_layers(layer)] if deep else [layer]
    return [v for each in layers for v in getattr(each, "_trainable_variables", ())]


@needs_private_names
def sub_layers(layer: keras.layers.Layer, deep: bool = True) -> list[keras.layers.Layer]:
    """The layers in `layer`, with `deep` at any depth; none before `Layer.__init__`."""
    if not hasattr(layer, "_layers"):
        return []
    return list(layer._flatten_layers(include_self=False, recursive=deep))


def casts(layer: keras.layers.Layer) -> list[keras.Operation]:
    """The operations, each with a `dtype`, that cast the inputs of a functional model's layers.

    Since Keras 3.10 each layer casts its own inputs when it is called.
    """
    if KERAS >= (3, 10):
        return []
    from keras.src.ops.core import Cast

    graph = layer._functional if isinstance(layer, keras.Sequential) else layer
    operations = graph.operations if isinstance(graph, Functional) else []
    return [operation for operation in operations if isinstance(operation, Cast)]


# Models.


def makes_functional(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether these arguments of a model's constructor contain inputs and outputs."""
    return len(args) == 2 or ("outputs" in kwargs and (len(args) == 1 or "inputs" in kwargs))


@needs_private_names
def state_variables(model: keras.Model) -> list[keras.Variable]:
    """The floating variables of `model` that a forward pass writes, without weights and seeds."""
    trained = {id(v) for v in own_variables(model, deep=True)}
    carried = []
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.SpectralNormalization) and layer.built:
            # The only layer whose call writes a weight.
            trained.discard(id(layer.kernel))
        if isinstance(layer, keras.layers.RNN) and layer.stateful and layer.built:
            # `weights` lacks it.
            carried += tf.nest.flatten(layer.states)
    variables = [v for v in [*model.weights, *carried] if id(v) not in trained]
    return [v for v in variables if keras.backend.is_float_dtype(v.dtype)]


@needs_private_names
def metric_variables(model: keras.Model) -> list[keras.Variable]:
    """The variables of every metric in `model`, whether or not `model.metrics` lists it."""
    metrics = [*model.metrics, *(m for layer in model._flatten_layers() for m in layer._metrics)]
    return list({id(v): v for metric in metrics for v in metric.variables}.values())


# The trainer.

# Not `keras.Model`, whose `fit` is replaced by packages that log trainings.
_Trainer = find("keras.src.backend.tensorflow.trainer:TensorFlowTrainer")
_fit: Any = getattr(_Trainer, "fit", None)
_FIT = getattr(inspect.unwrap(_fit), "__code__", None)
_built: weakref.WeakSet[Any] = weakref.WeakSet()


@needs_private_names
def build(model: keras.Model, data: Any) -> None:
    """Creates the variables of model, losses and metrics that the first batch would create.

    It does so once after each `compile()`, because a layer that is never called is never built.
    """
    tracker = loss_tracker(model)
    if tracker not in _built:
        model._symbolic_build(data_batch=data)
        _built.add(tracker)


@needs_private_names
def hide_from_lists(model: keras.Model, names: Sequence[str]) -> None:
    """Makes `train_on_batch` return a list, or a scalar, without the logs `names`."""
    flatten = type(model)._flatten_metrics_in_order
    model._flatten_metrics_in_order = lambda logs: flatten(
        model, {name: value for name, value in logs.items() if name not in names}
    )


def patch_fit(model: keras.Model) -> None:
    """Makes `fit` and `evaluate` work under a `MultiWorkerMirroredStrategy` of several workers.

    There Keras' trainer mistakes a batch that is spread over the workers for a tensor, and averages
    the logs of a step along an axis that they lack.

    Args:
        model: a compiled model; under any other strategy it stays unchanged.
    """
    if not has_several_workers(model.distribute_strategy):
        return
    build_from_local_batch(model)
    for name in ("train_step", "test_step"):
        setattr(model, name, _with_axis_for_logs(getattr(model, name)))


def _with_axis_for_logs(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def with_axis(value: Any) -> tf.Tensor:
        value = tf.convert_to_tensor(value)
        return value[None] if value.shape.rank == 0 else value

    def stepped(data: Any) -> Any:
        return tf.nest.map_structure(with_axis, step(data))

    return tf.autograph.experimental.do_not_convert(stepped)


def build_from_local_batch(model: keras.Model) -> None:
    """Makes `fit` build `model` from this worker's part of a batch that is spread over workers."""

    @needs_private_names
    def build(iterator: Any = None, data_batch: Any = None) -> None:
        strategy = model.distribute_strategy
        if iterator is not None:
            epoch = iterator.enumerate_epoch() if KERAS < (3, 7) else iterator
            *_, batches = next(iter(epoch))
            data_batch = next(batches)
        data_batch = tf.nest.map_structure(
            lambda part: strategy.experimental_local_results(part)[0], data_batch
        )
        with strategy.scope():
            model._symbolic_build(data_batch=data_batch)

    model._maybe_symbolic_build = build


@needs_private_names
def forward(model: keras.Model, x: Any) -> Any:
    """The model's output in training mode, computed as in Keras' train step."""
    return model(x, training=True) if model._call_has_training_arg else model(x)


@needs_private_names
def compute_loss(model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> tf.Tensor:
    """The model's loss, whichever signature its `compute_loss` has."""
    return model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)


def undo_replica_mean(loss: tf.Tensor) -> tf.Tensor:
    """The result of `compute_loss` without Keras' division by the number of replicas.

    Keras before 3.8 does not divide, so the sum of its gradients is larger by that factor.
    """
    replicas = 1 if KERAS < (3, 8) else tf.distribute.get_strategy().num_replicas_in_sync
    return loss * tf.cast(replicas, loss.dtype) if replicas > 1 else loss


@needs_private_names
def loss_tracker(model: keras.Model) -> keras.metrics.Metric:
    """The metric that holds the epoch's mean loss."""
    return model._loss_tracker


def for_logs(count: tf.Tensor) -> tf.Tensor:
    """An integer tensor in a form that the progress bar shows; Keras 3.6 shows only floats."""
    return tf.cast(count, tf.float32) if KERAS < (3, 7) else count


def add_to_fit(watched: Any, make: type[keras.callbacks.Callback]) -> None:
    """Adds the callback `make(watched)` to the running `fit`, and to later ones of its model.

    Keras itself calls only `model.optimizer`, and only when `fit` ends.

    Args:
        watched: an object; each `fit` gets one callback that has it as attribute `watched`.
        make: the class of the callback.
    """
    model = _join_fit(watched, make)
    if model is None:
        return
    reference, original = weakref.ref(watched), model.make_train_function

    def make_train_function(*args: Any, **kwargs: Any) -> Any:
        if (watched := reference()) is not None:
            _join_fit(watched, make)
        return original(*args, **kwargs)

    # Each `fit` calls this once its callbacks exist, even if the step is not traced again.
    model.make_train_function = make_train_function


def _join_fit(watched: Any, make: type[keras.callbacks.Callback]) -> keras.Model | None:
    """Adds a callback to Keras' innermost `fit` on the stack; returns its model if it did."""
    # By its code: other functions may have the same name and such variables.
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        if frame.f_code is not _FIT:
            continue
        model = frame.f_locals["self"]
        callbacks: Any = frame.f_locals.get("callbacks")
        # A list of another type may hold its callbacks differently.
        if type(callbacks) is not keras.callbacks.CallbackList:
            continue
        if any(type(c) is make and c.watched is watched for c in callbacks.callbacks):
            return None
        callback = make(watched)
        callback.set_model(model)
        callbacks.callbacks.append(callback)
        return model
    return None
