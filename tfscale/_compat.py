"""Every private name of Keras and TensorFlow that tfscale touches, in one place.

`tests/test_compat.py` calls each of them, so that a release which drops one fails there first.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.core import Variable
from keras.src.models.functional import Functional as Functional
from keras.src.models.model import functional_init_arguments
from keras.src.ops.core import Cast
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.eager.polymorphic_function.attributes import NO_INLINE as NO_INLINE
from tensorflow.python.ops import control_flow_util
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph

if keras.backend.backend() != "tensorflow":
    raise ImportError(
        "tfscale needs Keras on the TensorFlow backend. Received: "
        f"keras.backend.backend()={keras.backend.backend()!r}. Set the environment variable "
        "KERAS_BACKEND=tensorflow (or the `backend` entry of ~/.keras/keras.json) before the "
        "first import of keras."
    )

KERAS = tuple(int(part) for part in keras.version().split(".")[:2])


def in_xla_context() -> bool:
    """Whether what is traced now will be compiled by XLA as a whole (`jit_compile=True`)."""
    if tf.executing_eagerly():
        return False
    return control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def rarely(function):
    """`function` as one operation of a plain graph, not the hundred that it is made of: even those
    of a branch that is not taken cost something."""
    if tf.executing_eagerly() or in_xla_context():
        return function
    return tf.function(function, autograph=False, experimental_attributes={NO_INLINE: True})


@functools.cache
def _either():
    # Traced once and for all, not for each reduction of each graph.
    number = tf.TensorSpec([], tf.int32)
    with tf.init_scope():
        function = tf.function(tf.bitwise.bitwise_or, autograph=False)
        return function.get_concrete_function(number, number)


def xla_reduce_or(bits):
    """Bitwise or over all elements of an int32 tensor, in a graph that XLA compiles."""
    if bits.shape.rank is None:
        bits = tf.reshape(bits, [-1])
    reducer = _either()
    reducer.add_to_graph()
    axes = list(range(bits.shape.rank))
    return gen_xla_ops.xla_variadic_reduce_v2([bits], [tf.constant(0)], axes, reducer)[0]


def is_control_flow(graph) -> bool:
    """Whether `graph` is a branch, or the condition or body of a loop."""
    return isinstance(graph, ControlFlowFuncGraph)


def creation_number(tensor) -> int:
    """A number that is larger for an eager tensor that was made later."""
    return tensor._id


def native(variable):
    """The `tf.Variable` of a `keras.Variable`; a `tf.Variable` as it is."""
    # In Keras 3.6 the variables that layers make are no `keras.Variable`.
    return variable.value if isinstance(variable, Variable) else variable


def sub_optimizers(optimizer) -> list:
    """`optimizer` and, if it is a `MultiOptimizer`, the optimizers in it."""
    return [optimizer, *getattr(optimizer, "_inner_optimizers", ())]


# What Keras' wrapper has and only the inner optimizer reads, with the defaults, which are in old
# configs of the wrapper.
UNREAD_BY_WRAPPER = {
    "weight_decay": None,
    "clipnorm": None,
    "global_clipnorm": None,
    "clipvalue": None,
    "use_ema": False,
    "ema_momentum": 0.99,
    "ema_overwrite_frequency": None,
    "loss_scale_factor": None,
    "gradient_accumulation_steps": None,
}


def check_wrapper_arguments(arguments) -> None:
    """Refuses what Keras' wrapper would not read; before 3.12 it says nothing itself.

    Args:
        arguments: dictionary of keyword arguments, beside those that the wrapper names.

    Raises:
        ValueError: one is unknown, or belongs to the inner optimizer.
    """
    unknown = [name for name in arguments if name not in {"dynamic", *UNREAD_BY_WRAPPER}]
    if unknown:
        raise ValueError(
            f"LossScaleOptimizer does not support arguments: `{'`, `'.join(unknown)}`."
        )
    for name, default in UNREAD_BY_WRAPPER.items():
        if arguments.get(name, default) != default:
            raise ValueError(
                f"LossScaleOptimizer does not support `{name}`. Instead, set `{name}` on the "
                f"`inner_optimizer`. Received: {name}={arguments[name]!r}"
            )


@contextlib.contextmanager
def together(optimizer, branch):
    """Within: Keras' optimizer fits into replicas that hold reduced gradients and must meet to
    write a variable.

    It does not all-reduce a second time, and it takes each of its own conditions with `branch`,
    because `tf.cond` inside a replica cannot hold a place where the replicas meet.

    Args:
        optimizer: Keras optimizer.
        branch: `branch(pred, yes, no, *args)`, calls `yes(*args)` or `no(*args)` on each replica.
    """
    replacements: list[tuple[Any, str, Any]] = []
    for target in sub_optimizers(optimizer):
        replacements.append((target, "_all_reduce_sum_gradients", lambda pairs: list(pairs)))
        if target.gradient_accumulation_steps or target.ema_overwrite_frequency:
            update = functools.partial(_update_with_branches, target, branch)
            replacements.append((target, "_backend_apply_gradients", update))
    with _replaced(replacements):
        yield


@contextlib.contextmanager
def apart(optimizer):
    """Within: Keras' optimizer fits into replicas that hold reduced gradients and never meet.

    It does not all-reduce a second time, and each replica writes its own copy of the variables
    that Keras would broadcast from the first one: the copies are equal, because all replicas do
    the same.
    """
    replacements: list[tuple[Any, str, Any]] = []
    for target in sub_optimizers(optimizer):
        replacements.append((target, "_all_reduce_sum_gradients", lambda pairs: list(pairs)))
        first_only = tf.VariableAggregation.ONLY_FIRST_REPLICA
        replacements += [
            (variable, "_aggregation", tf.VariableAggregation.NONE)
            for variable in map(native, target.variables)
            if "_aggregation" in variable.__dict__ and variable.aggregation == first_only
        ]
    with _replaced(replacements):
        yield


@contextlib.contextmanager
def added_rows(optimizer, change):
    """Within: what Keras' optimizer adds to some rows of a variable goes through `change` first.

    Args:
        optimizer: Keras optimizer.
        change: `change(values, nothing)` returns what to add or subtract instead of the tensor
            `values`; `nothing` is the number that leaves every other one, and its sign, as it is.
    """

    def through(assign, nothing):
        def assign_changed(variable, value, *args, **kwargs):
            if isinstance(value, tf.IndexedSlices):
                values = change(value.values, nothing)
                value = tf.IndexedSlices(values, value.indices, value.dense_shape)
            return assign(variable, value, *args, **kwargs)

        return assign_changed

    with _replaced(
        [
            (target, name, through(getattr(target, name), nothing))
            for target in sub_optimizers(optimizer)
            for name, nothing in (("assign_add", -0.0), ("assign_sub", 0.0))
        ]
    ):
        yield


@contextlib.contextmanager
def _replaced(replacements):
    """Within: each `(object, name, value)` is in force as an attribute of that very object."""
    before = [(o, name, o.__dict__.get(name, _ABSENT)) for o, name, _ in replacements]
    for target, name, value in replacements:
        object.__setattr__(target, name, value)
    try:
        yield
    finally:
        for target, name, value in before:
            if value is _ABSENT:
                object.__delattr__(target, name)
            else:
                object.__setattr__(target, name, value)


_ABSENT = object()


def _update_with_branches(optimizer, branch, grads, variables) -> None:
    """`_backend_apply_gradients` of Keras with its conditions taken by `branch`."""

    def update(grads):
        clipped = optimizer._clip_gradients(grads)
        optimizer._apply_weight_decay(variables)
        optimizer._backend_update_step(clipped, variables, optimizer.learning_rate)

    steps = optimizer.gradient_accumulation_steps
    if steps:
        accumulators = [
            optimizer._accumulated_gradients[optimizer._get_variable_index(v)] for v in variables
        ]

        def last(grads):
            update([(g + a) / steps for g, a in zip(grads, accumulators, strict=True)])
            optimizer._backend_reset_gradient_accumulators()

        def keep(grads):
            optimizer._backend_increment_gradient_accumulators(grads, accumulators)

        branch((optimizer._iterations + 1) % steps == 0, last, keep, grads)
    else:
        update(grads)
    if optimizer.use_ema:
        averaged = optimizer._trainable_variables
        optimizer._update_model_variables_moving_average(averaged)
        frequency = optimizer.ema_overwrite_frequency
        if frequency:

            def overwrite():
                for variable, average in zip(
                    averaged, optimizer._model_variables_moving_average, strict=True
                ):
                    if average is not None:
                        variable.assign(average)

            branch((optimizer.iterations + 1) % frequency == 0, overwrite, lambda: None)
    if KERAS < (3, 10):  # later it is done by the caller
        optimizer._iterations.assign_add(1)


def strategy_without_merge_call() -> bool:
    """Whether the current strategy replaces `merge_call` by collectives (XLA on GPUs, TPUs)."""
    return tf.__internal__.distribute.strategy_supports_no_merge_call()


def strategy_without_merge_call_in_clusters() -> bool:
    """Whether the current strategy does so inside of `tf.function(jit_compile=True)`."""
    mirrored = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)
    strategy = tf.distribute.get_strategy()
    return isinstance(strategy, mirrored) and all(
        "GPU" in device for device in strategy.extended.worker_devices
    )


def has_several_workers(strategy) -> bool:
    """Whether the replicas of `strategy` live in several processes."""
    several = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    return several and strategy.extended._in_multi_worker_mode()


def build_from_local_batch(model) -> None:
    """Lets `fit` build `model` from this worker's part of a batch that is spread over workers."""

    def build(iterator=None, data_batch=None):
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


def replicas_share_a_cluster() -> bool:
    """Whether all replicas here are traced into one XLA cluster: `jit_compile` round `run`."""
    several = len(tf.distribute.get_strategy().extended.worker_devices) > 1
    return several and in_xla_context() and not _has_own_graph()


def replica_can_meet() -> bool:
    """Whether `merge_call` works here: not inside of a function that each replica traces itself."""
    return tf.executing_eagerly() or not _has_own_graph()


def _has_own_graph() -> bool:
    # The graph in which the strategy started the thread of this replica is that of all of them.
    shared = getattr(threading.current_thread(), "graph", None)
    return shared is not None and tf.compat.v1.get_default_graph() is not shared


def makes_functional(args, kwargs) -> bool:
    """Whether a model's constructor with these arguments is given inputs and outputs."""
    return functional_init_arguments(args, kwargs)


def own_variables(layer, deep: bool = False) -> list:
    """The variables that `layer` itself trains; with `deep` those of the layers in it as well."""
    layers = [layer, *sub_layers(layer)] if deep else [layer]
    return [v for each in layers for v in getattr(each, "_trainable_variables", ())]


def sub_layers(layer) -> list:
    """All layers in `layer`, however deep, without itself; none where it was never initialized."""
    return list(layer._flatten_layers(include_self=False)) if hasattr(layer, "_layers") else []


def casts(layer) -> list:
    """The operations, each with a `dtype`, that cast what layers of a functional model are given.

    Since Keras 3.10 each layer casts for itself, whatever its dtype is by then.
    """
    if KERAS >= (3, 10):
        return []
    graph = layer._functional if isinstance(layer, keras.Sequential) else layer
    operations = graph.operations if isinstance(graph, Functional) else []
    return [operation for operation in operations if isinstance(operation, Cast)]


def state_variables(model) -> list:
    """The floating variables of `model` that a forward pass writes: no weights, no seeds."""
    trained = {id(v) for v in own_variables(model, deep=True)}
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.SpectralNormalization) and layer.built:
            # The one layer that writes a weight while it is called.
            trained.discard(id(layer.kernel))
    # The state of a stateful recurrent layer is not among the weights.
    carried = [
        state
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.RNN) and layer.stateful and layer.built
        for state in tf.nest.flatten(layer.states)
    ]
    return [
        v
        for v in [*model.weights, *carried]
        if id(v) not in trained and keras.backend.is_float_dtype(v.dtype)
    ]


def metric_variables(model) -> list:
    """The variables of every metric in `model`, whether `model.metrics` lists it or not."""
    metrics = [*model.metrics, *(m for layer in model._flatten_layers() for m in layer._metrics)]
    return list({id(v): v for metric in metrics for v in metric.variables}.values())


_built: weakref.WeakSet[Any] = weakref.WeakSet()


def build(model, data) -> None:
    """Makes the variables of the model, its losses and metrics that the first batch would make.

    Once after each `compile()`, because a layer that is never called is never built.
    """
    tracker = loss_tracker(model)
    if tracker not in _built:
        model._symbolic_build(data_batch=data)
        _built.add(tracker)


def forward(model, x):
    """The model's output in training mode, as Keras' train step calls it."""
    return model(x, training=True) if model._call_has_training_arg else model(x)


def compute_loss(model, x, y, y_pred, sample_weight):
    """The model's loss, whichever signature its `compute_loss` has."""
    return model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)


def whole_loss(loss):
    """What `compute_loss` gave without Keras' division by the number of replicas.

    Keras before 3.8 does not divide: the sum of its gradients is that many times as large.
    """
    replicas = 1 if KERAS < (3, 8) else tf.distribute.get_strategy().num_replicas_in_sync
    return loss * tf.cast(replicas, loss.dtype) if replicas > 1 else loss


def for_logs(count):
    """An integer tensor as the progress bar can show it: that of Keras 3.6 knows floats only."""
    return tf.cast(count, tf.float32) if KERAS < (3, 7) else count


def loss_tracker(model):
    """The metric that holds the epoch's mean loss."""
    return model._loss_tracker


def track(optimizer, variable) -> None:
    """Lists `variable` among the optimizer's own."""
    optimizer._track_variable(variable)


def tracked(optimizer) -> list:
    """The variables that an optimizer itself owns, without those of the optimizers in it."""
    return list(optimizer._variables)


def variable_key(optimizer, variable):
    """What an optimizer knows a variable by."""
    return optimizer._var_key(variable)


def excluded_from_weight_decay(optimizer) -> set:
    """Keys of the variables that `exclude_from_weight_decay` listed."""
    return getattr(optimizer, "_exclude_from_weight_decay", set())


def built_on(optimizer) -> list:
    """The variables that a built optimizer trains."""
    # Old Keras' wrapper leaves that to the optimizer in it.
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return list(optimizer._trainable_variables or inner._trainable_variables)


def set_built_on(optimizer, variables) -> None:
    """Tells Keras what an optimizer trains, past its tracker, which would list it as state."""
    object.__setattr__(optimizer, "_trainable_variables", variables)
