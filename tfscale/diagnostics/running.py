"""Run a model on one batch eagerly, record it, and leave the model as it was.

A custom `train_step` computes its loss itself. So that step runs, with optimizers that update
nothing, and its own tapes compute the gradients.
"""

from __future__ import annotations

import collections
import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfscale import _compat, gradients
from tfscale.diagnostics.batches import as_tensors
from tfscale.diagnostics.layers import (
    ForwardPass,
    TapedLoss,
    float_tensors,
    recorded_events,
    replaced_method,
)
from tfscale.model_optimizers import own_train_step

LossLike: TypeAlias = str | keras.losses.Loss | Callable[[Any, Any], Any] | None


def resolve_loss(model: keras.Model, loss: LossLike) -> keras.losses.Loss | None:
    """Return `loss` as a Keras loss; None, for the loss of `compile`, stays None.

    Raises:
        TypeError: `model` is not a Keras model.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"`model` must be a keras.Model. Received: {model!r}")
    found = keras.losses.get(loss)
    is_loss = found is None or isinstance(found, keras.losses.Loss)
    return found if is_loss else _FunctionLoss(found)


class _FunctionLoss(keras.losses.Loss):
    """A function of (y_true, y_pred), reduced over the batch as by `compile`."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        super().__init__(name=getattr(function, "__name__", "loss"))
        self.function = function

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return self.function(y_true, y_pred)


def has_own_step(model: keras.Model, loss: LossLike) -> bool:
    """Whether the loss to examine is that of a model's own `train_step`."""
    return loss is None and own_train_step(model) is not None


def run_eagerly(
    model: keras.Model,
    batch: Any,
    loss: keras.losses.Loss | None = None,
    forward_only: bool = False,
) -> ForwardPass:
    """Run `model` in training mode on one batch, eagerly, and record it.

    Afterwards every variable of the model is as before. A model without variables is built first,
    by a call on `x` in inference mode.

    Args:
        model: a Keras model.
        batch: as in `fit`.
        loss: what `resolve_loss` returned; None stands for the loss of `compile`.
        forward_only: whether to leave out the loss.
    """
    x, y, weight = as_tensors(keras.utils.unpack_x_y_sample_weight(batch))
    if not model.built:
        with _preserved_state(model):
            model(x, training=False)
    with _preserved_state(model), tf.GradientTape(persistent=True) as tape:
        with recorded_events(model) as events:
            predicted = model(x, training=True)
        # A model may be compiled without a loss and add its own when it is called.
        adds_own = model.compiled and getattr(model, "loss", None) is None
        losses: tuple[TapedLoss, ...] = ()
        if not forward_only and (y is not None or (loss is None and adds_own)):
            if loss is None:
                parts = [model.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=weight)]
            else:
                parts = [loss(y, predicted, sample_weight=weight), *model.losses]
            total = tf.add_n([tf.reduce_sum(tf.cast(part, tf.float32)) for part in parts])
            losses = (TapedLoss(tape, total, current_scale(getattr(model, "optimizer", None))),)
    return ForwardPass(tuple(events), losses, float_tensors(predicted))


def run_step(model: keras.Model, batch: Any) -> ForwardPass:
    """Like `run_eagerly`, but with the model's own `train_step`, whose optimizers update nothing.

    Raises:
        ValueError: no loss was seen in it.
    """
    batch = as_tensors(batch)
    if not all(layer.built for layer in _compat.sub_layers(model)):
        with _updating_nothing():
            tf.function(model.train_step).get_concrete_function(batch)  # which builds them
    with _preserved_state(model), recorded_events(model) as events, _updating_nothing() as losses:
        model.train_step(batch)
    if not losses:
        raise ValueError(
            f"The train_step of {model.name!r} must differentiate a loss with respect to variables."
            " Received none. If a concrete function computes it, call the Python function instead, "
            "or pass `loss=`, such as loss='mse', to examine the model with that loss."
        )
    return ForwardPass(tuple(events), tuple(losses), ())


class _LinkedUpdate(BaseException):
    """Ends a step where linked optimizers would update together."""


@contextlib.contextmanager
def _updating_nothing() -> Iterator[list[TapedLoss]]:
    """Within the context, optimizers only scale and unscale; yields the losses of all tapes.

    The context ends early where linked optimizers would update together. What a tape differentiates
    with respect to variables is a loss; a gradient penalty uses tensors.
    """
    losses: list[TapedLoss] = []
    scaled: dict[int, tuple[tf.Tensor, tf.Tensor, float]] = {}  # from the scaled loss to the loss

    def scale_loss(original: Any, optimizer: Any, loss: Any) -> Any:
        scale = current_scale(optimizer)

        def times_scale(part: Any) -> tf.Tensor:
            wide = gradients.upcast_half(tf.convert_to_tensor(part))
            result = wide * tf.cast(scale, wide.dtype)
            scaled[id(result)] = result, wide, scale
            return result

        return tf.nest.map_structure(times_scale, loss)

    def unscale(original: Any, optimizer: Any, grads: Any) -> Any:
        scale = tf.constant(current_scale(optimizer))
        return tf.nest.map_structure(lambda g: gradients.unscale(g, scale), grads)

    def end_step(*args: Any, **kwargs: Any) -> None:
        raise _LinkedUpdate

    def always_persistent(
        original: Any, tape: Any, persistent: bool = False, watch_accessed_variables: bool = True
    ) -> None:
        original(tape, True, watch_accessed_variables)

    def gradient(original: Any, tape: Any, target: Any, sources: Any, *args: Any, **kw: Any) -> Any:
        variables = [_compat.tf_variable(s) for s in tf.nest.flatten(sources)]
        ids = frozenset(id(v) for v in variables if isinstance(v, tf.Variable))
        for part in tf.nest.flatten(target) if ids else ():
            _, value, scale = scaled.get(id(part), (part, part, 1.0))
            losses.append(TapedLoss(tape, value, scale, ids))
        return original(tape, target, sources, *args, **kw)

    optimizer_methods: dict[str, Callable[..., Any]] = {
        "scale_loss": scale_loss,
        "unscale": unscale,
        "apply": lambda *args, **kwargs: None,
        "apply_gradients": lambda original, optimizer, *args, **kwargs: optimizer.iterations,
        "apply_or_skip": lambda *args, **kwargs: tf.constant(True),
        "make_step": end_step,
    }
    with contextlib.suppress(_LinkedUpdate), contextlib.ExitStack() as stack:
        base = keras.optimizers.Optimizer
        for cls in (*base.__mro__[1:], *_with_subclasses(base)):
            for name in set(vars(cls)) & set(optimizer_methods):
                stack.enter_context(replaced_method(cls, name, optimizer_methods[name]))
        stack.enter_context(replaced_method(tf.GradientTape, "__init__", always_persistent))
        stack.enter_context(replaced_method(tf.GradientTape, "gradient", gradient))
        yield losses


def _with_subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    yield cls
    for sub in cls.__subclasses__():
        yield from _with_subclasses(sub)


@contextlib.contextmanager
def _preserved_state(model: keras.Model) -> Iterator[None]:
    """Restores, after the context, every variable that `model` holds."""
    # Replica by replica: each may hold another part of a metric's sum.
    replicas = model.distribute_strategy.experimental_local_results
    variables = _variables_in(model)
    saved = [(copy, copy.numpy()) for v in variables.values() for copy in replicas(v)]
    try:
        yield
    finally:
        for variable, value in saved:
            variable.assign(value)
        for metric in model.metrics:  # the loss makes its own on its first call
            if any(id(_compat.tf_variable(v)) not in variables for v in metric.variables):
                metric.reset_state()


def _variables_in(root: Any) -> dict[int, tf.Variable]:
    """Every variable in attributes and containers of `root` and of what they hold, by its id."""
    seen: dict[int, Any] = {}  # the parts too: a freed one would leave its id to another
    waiting = [root]
    while waiting:
        part = _compat.tf_variable(waiting.pop())
        if id(part) in seen or isinstance(part, _OUTSIDE):
            continue
        seen[id(part)] = part
        if isinstance(part, tf.Variable):
            continue
        if isinstance(part, dict):
            waiting.extend(part.values())
        elif isinstance(part, list | tuple | set | frozenset | collections.deque):
            waiting.extend(part)
        waiting.extend(getattr(part, "__dict__", {}).values())
    return {key: part for key, part in seen.items() if isinstance(part, tf.Variable)}


# They lead out of the model, to everything that was imported or traced.
_OUTSIDE = (type, types.ModuleType, tf.Graph, tf.types.experimental.Callable)


def current_scale(optimizer: Any) -> float:
    """The current loss scale: of tfscale's optimizer, of Keras' wrapper, or a constant factor."""
    with tf.init_scope():  # a step may be traced
        scale = getattr(optimizer, "loss_scale", None)
        if scale is None and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            scale = optimizer.dynamic_scale if optimizer.built else optimizer.initial_scale
        if scale is None:
            scale = getattr(optimizer, "loss_scale_factor", None) or 1.0
        return float(scale)
