"""Private names of Keras' variables and optimizers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfscale._compat.lookup import KERAS, fail, find, needs_private_names

Variable = keras.Variable
if KERAS < (3, 7):  # the variables of layers are not instances of `keras.Variable`
    Variable = find("keras.src.backend.tensorflow.core:Variable")

Branch = Callable[..., Any]
"""`branch(pred, yes, no, *args)` calls `yes(*args)` or `no(*args)` on each replica."""
Change = Callable[[tf.Tensor, float], tf.Tensor]
Context = contextlib.AbstractContextManager[None]
Replacement = tuple[Any, str, Any]  # an object, the name of an attribute, and its value meanwhile


def tf_variable(variable: keras.Variable | tf.Variable) -> tf.Variable:
    """The `tf.Variable` of a `keras.Variable`; a `tf.Variable` unchanged."""
    return variable.value if isinstance(variable, Variable) else variable


def sub_optimizers(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """`optimizer` and, if it is a `MultiOptimizer`, its inner optimizers."""
    return [optimizer, *getattr(optimizer, "_inner_optimizers", ())]


# What an optimizer owns and trains.


@needs_private_names
def track(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> None:
    """Adds `variable` to those that the optimizer owns."""
    optimizer._track_variable(variable)


@needs_private_names
def tracked(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The variables that an optimizer itself owns, without those of its inner optimizers."""
    return list(optimizer._variables)


@needs_private_names
def variable_key(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable | tf.Variable
) -> Any:
    """The key under which an optimizer stores what belongs to a variable."""
    return optimizer._var_key(variable)


def excluded_from_weight_decay(optimizer: keras.optimizers.Optimizer) -> set[Any]:
    """Keys of the variables that `exclude_from_weight_decay` listed."""
    return getattr(optimizer, "_exclude_from_weight_decay", set())


@needs_private_names
def built_on(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The variables that a built optimizer trains."""
    # In old versions of Keras, only a wrapper's inner optimizer knows them.
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return list(optimizer._trainable_variables or inner._trainable_variables)


def set_built_on(
    optimizer: keras.optimizers.Optimizer, variables: Iterable[keras.Variable]
) -> None:
    """Sets what an optimizer trains; the trackers would list it as the optimizer's state."""
    set_untracked(optimizer, "_trainable_variables", variables)


def set_untracked(obj: Any, name: str, value: Any) -> None:
    """Sets an attribute without Keras' and TensorFlow's trackers.

    The trackers wrap lists and dictionaries and list the variables in them as state of `obj`.
    """
    object.__setattr__(obj, name, value)


# Arguments that Keras' wrapper accepts but only the inner optimizer reads, with their defaults,
# which old configs of the wrapper contain.
UNREAD_BY_WRAPPER: dict[str, Any] = {
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


# Updates under a distribution strategy.


def merge_call_update(optimizer: keras.optimizers.Optimizer, branch: Branch) -> Context:
    """Adapts Keras' optimizer to replicas that hold reduced gradients and write by `merge_call`.

    Within the context it does not all-reduce a second time, and it evaluates its own conditions
    with `branch`, because a `merge_call` is impossible inside a replica's `tf.cond`.
    """
    replacements: list[Replacement] = []
    for target in sub_optimizers(optimizer):
        replacements.append((target, "_all_reduce_sum_gradients", list))
        if target.gradient_accumulation_steps or target.ema_overwrite_frequency:
            update = functools.partial(_update_with_branches, target, branch)
            replacements.append((target, "_backend_apply_gradients", update))
    return _replaced(replacements)


def per_replica_update(optimizer: keras.optimizers.Optimizer) -> Context:
    """Adapts Keras' optimizer to replicas that hold reduced gradients and never synchronize.

    Within the context it does not all-reduce a second time, and each replica writes its own copy of
    the variables that Keras would broadcast from the first one. The copies are equal, because all
    replicas compute the same.
    """
    replacements: list[Replacement] = []
    for target in sub_optimizers(optimizer):
        replacements.append((target, "_all_reduce_sum_gradients", list))
        first_only = tf.VariableAggregation.ONLY_FIRST_REPLICA
        replacements += [
            (variable, "_aggregation", tf.VariableAggregation.NONE)
            for variable in map(tf_variable, target.variables)
            if "_aggregation" in variable.__dict__ and variable.aggregation == first_only
        ]
    return _replaced(replacements)


def added_rows(optimizer: keras.optimizers.Optimizer, change: Change) -> Context:
    """Within the context, `change` edits what Keras' optimizer adds to some rows of a variable.

    `change(values, nothing)` returns what to add or subtract instead of the tensor `values`; adding
    or subtracting the number `nothing` leaves every number and its sign unchanged.
    """

    def through(assign: Callable[..., Any], nothing: float) -> Callable[..., Any]:
        def assign_changed(variable: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(value, tf.IndexedSlices):
                values = change(value.values, nothing)
                value = tf.IndexedSlices(values, value.indices, value.dense_shape)
            return assign(variable, value, *args, **kwargs)

        return assign_changed

    return _replaced(
        [
            (target, name, through(getattr(target, name), nothing))
            for target in sub_optimizers(optimizer)
            for name, nothing in (("assign_add", -0.0), ("assign_sub", 0.0))
        ]
    )


@contextlib.contextmanager
def _replaced(replacements: list[Replacement]) -> Iterator[None]:
    """Within the context, sets each `(object, name, value)` on exactly that object."""
    with contextlib.ExitStack() as restore:
        for target, name, value in replacements:
            if not hasattr(target, name):
                fail(f"no `{name}` in {type(target).__name__}")
            if name in vars(target):
                restore.callback(set_untracked, target, name, vars(target)[name])
            else:
                restore.callback(object.__delattr__, target, name)
            set_untracked(target, name, value)
        yield


@needs_private_names
def _update_with_branches(
    optimizer: keras.optimizers.Optimizer,
    branch: Branch,
    grads: list[tf.Tensor],
    variables: list[keras.Variable],
) -> None:
    """Keras' `_backend_apply_gradients`, with its conditions evaluated by `branch`."""

    def update(grads: list[tf.Tensor]) -> None:
        clipped = optimizer._clip_gradients(grads)
        optimizer._apply_weight_decay(variables)
        optimizer._backend_update_step(clipped, variables, optimizer.learning_rate)

    steps = optimizer.gradient_accumulation_steps
    if steps:
        accumulators = [
            optimizer._accumulated_gradients[optimizer._get_variable_index(v)] for v in variables
        ]

        def last(grads: list[tf.Tensor]) -> None:
            update([(g + a) / steps for g, a in zip(grads, accumulators, strict=True)])
            optimizer._backend_reset_gradient_accumulators()

        def keep(grads: list[tf.Tensor]) -> None:
            optimizer._backend_increment_gradient_accumulators(grads, accumulators)

        branch((optimizer._iterations + 1) % steps == 0, last, keep, grads)
    else:
        update(grads)
    if optimizer.use_ema:
        averaged = optimizer._trainable_variables
        optimizer._update_model_variables_moving_average(averaged)
        frequency = optimizer.ema_overwrite_frequency
        if frequency:

            def overwrite() -> None:
                for variable, average in zip(
                    averaged, optimizer._model_variables_moving_average, strict=True
                ):
                    if average is not None:
                        variable.assign(average)

            branch((optimizer.iterations + 1) % frequency == 0, overwrite, lambda: None)
    if KERAS < (3, 10):  # later the caller counts
        optimizer._iterations.assign_add(1)
