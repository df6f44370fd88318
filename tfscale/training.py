"""The train step as one transaction: on a skip, nothing of the model has changed.

An optimizer can only guard what it owns. A step that it skips has still written BatchNorm's moving
statistics in its forward pass, and its loss still goes into the epoch's mean. Here the whole step
is taken back.
"""

from __future__ import annotations

import functools
import numbers
import warnings
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfscale import _compat, gradients, policies, replicas
from tfscale.optimizer import LossScaleOptimizer
from tfscale.warnings import warn
from tfscale.wrapping import wrap

do_not_convert = tf.autograph.experimental.do_not_convert


@do_not_convert
def train_step(model: keras.Model, data: Any, retry: int = 0) -> dict[str, Any]:
    """One training step that is applied as a whole or leaves no trace.

    Forward pass, loss, scaled loss, gradients, then either everything is applied or everything is
    as before: variables and optimizer, BatchNorm's statistics and every other non-trainable
    floating state, loss tracker and metrics. Only seed generators and tfscale's counters go on.
    If the loss is not finite, a skip does not lower the scale; if its gradients are finite all the
    same, the step is applied and the batch stays out of the epoch's loss and metrics.

    Args:
        model: a compiled `keras.Model` whose optimizer is a `tfscale.LossScaleOptimizer`.
        data: a batch: `x`, `(x, y)` or `(x, y, sample_weight)`.
        retry: how often the batch is run again at the lowered scale after an overflow.

    Returns:
        The logs of Keras' train step, and `loss_scale` and `skipped_steps` (scalar tensors).

    Raises:
        TypeError: the model's optimizer is not tfscale's.
        ValueError: the model has no loss.

    Example:
    >>> import keras, tfscale
    >>> class MyModel(keras.Model):
    ...     def train_step(self, data):
    ...         return {**tfscale.train_step(self, data), "mine": 1.0}
    """
    _check_retry(retry)
    optimizer = model.optimizer
    if not isinstance(optimizer, LossScaleOptimizer):
        raise TypeError(
            "train_step() needs a model that is compiled with a tfscale optimizer: write "
            "tfscale.compile(model, optimizer, ...) or "
            "model.compile(optimizer=tfscale.wrap(optimizer), ...). "
            f"Received: optimizer={optimizer!r}"
        )
    if tf.executing_eagerly():
        # In a graph TensorFlow traces again once all variables exist; here they have to exist now,
        # or there would be nothing to put back.
        _compat.build(model, data)
    logs, overflowed = _attempt(model, data)
    if retry and isinstance(optimizer.policy, policies.Dynamic):
        logs = _again(model, data, retry, logs, overflowed)
    return {
        **logs,
        "loss_scale": optimizer.loss_scale,
        "skipped_steps": _compat.for_logs(optimizer.skipped_steps),
    }


def _attempt(model: keras.Model, data: Any) -> tuple[dict[str, Any], tf.Tensor]:
    """Runs the batch once; returns the logs and whether it may be worth another try."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    optimizer = model.optimizer
    tracker = _compat.loss_tracker(model)
    own = set(map(id, tracker.variables))
    state = _Saved(_compat.state_variables(model))
    # Here, because those of the single losses are written while the loss is computed.
    metrics = _Saved(v for v in _compat.metric_variables(model) if id(v) not in own)
    with tf.GradientTape() as tape:
        y_pred = _compat.forward(model, x)
        loss = _compat.compute_loss(model, x, y, y_pred, sample_weight)
        scaled = optimizer.scale_loss(loss)
    finite = gradients.all_finite([loss])
    weights = model.trainable_weights
    if weights:
        pairs = zip(tape.gradient(scaled, weights), weights, strict=True)
        applied = optimizer.apply_or_skip(pairs)
    else:
        warnings.warn("The model does not have any trainable weights.")
        applied = finite
    state.restore_unless(applied)
    # A loss that is not finite would stay in the epoch's mean, although its step may be applied.
    counts = tf.logical_and(applied, finite)
    batch = tf.shape(next(part for part in tf.nest.flatten(x) if part is not None))[0]
    loss = _compat.undo_replica_mean(loss)
    tracker.update_state(
        tf.where(counts, loss, tf.zeros_like(loss)), sample_weight=tf.where(counts, batch, 0)
    )
    logs = model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
    # Where nothing was counted yet, a mean over nothing would read 0, the best loss that there is:
    # then the logs say what this batch was like.
    empty = tf.equal(tf.convert_to_tensor(tracker.count), 0)
    if metrics:
        metrics.restore_unless(counts)
        as_it_is, clean = tf.logical_or(counts, empty), model.get_metrics_result()
        logs = {
            name: tf.where(as_it_is, value, clean[name]) if name in clean else value
            for name, value in logs.items()
        }
    if tracker.name in logs:
        logs[tracker.name] = tf.where(empty, tf.cast(loss, tf.float32), logs[tracker.name])
    return logs, tf.logical_and(tf.logical_not(applied), finite)


def _again(
    model: keras.Model, data: Any, retry: int, logs: dict[str, Any], overflowed: Any
) -> dict[str, Any]:
    """Repeats a batch that overflowed, at most `retry` times; returns the logs of the last try."""
    if replicas.active() and not _compat.strategy_without_merge_call():
        raise ValueError(
            "`retry` does not work under a tf.distribute strategy of several replicas, where a "
            f"step cannot be repeated inside a graph. Received: retry={retry}. Leave it at 0."
        )
    optimizer = model.optimizer

    def once_more(tries: tf.Tensor, _: Any, logs: dict[str, Any]) -> tuple[Any, ...]:
        optimizer.reports.count_retry()
        new, overflowed = _attempt(model, data)
        return tries + 1, overflowed, tf.nest.pack_sequence_as(logs, tf.nest.flatten(new))

    return tf.while_loop(
        lambda tries, overflowed, logs: tf.logical_and(overflowed, tries < retry),
        once_more,
        (tf.constant(0), overflowed, logs),
    )[2]


class _Saved:
    """The values that variables have now."""

    def __init__(self, variables: Iterable[Any]) -> None:
        self._pairs = [(v, tf.convert_to_tensor(v)) for v in variables]

    def __len__(self) -> int:
        return len(self._pairs)

    def restore_unless(self, keep: tf.Tensor) -> None:
        """Gives the variables these values again, unless the scalar bool tensor is True."""
        if tf.executing_eagerly() and keep:
            return
        for variable, value in self._pairs:
            variable.assign(tf.where(keep, tf.convert_to_tensor(variable), value))


def _check_retry(retry: Any) -> None:
    if not isinstance(retry, numbers.Integral) or isinstance(retry, bool) or retry < 0:
        raise ValueError(f"`retry` must be an integer of at least 0. Received: retry={retry!r}")


def compile(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer | str | dict[str, Any] = "rmsprop",
    *args: Any,
    retry: int = 0,
    **compile_arguments: Any,
) -> keras.Model:
    """Compiles any Keras model so that `fit` takes each step as one transaction.

    Serves functional, Sequential and subclassed models, trained ones and loaded ones. Files, clones
    and copies of the model keep the step; Keras' `model.compile` with a plain optimizer ends it.

    Args:
        model: a `keras.Model` with Keras' own `train_step`.
        optimizer: whatever `tfscale.wrap` takes.
        *args: further positional arguments of `model.compile`.
        retry: how often a batch that overflowed is run again at the lowered scale, inside the
            same step. 0 skips it.
        **compile_arguments: keyword arguments of `model.compile`.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is no Keras model.
        ValueError: `model` has a `train_step` of its own.

    Example:
    >>> import numpy as np, keras, tfscale
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    >>> _ = tfscale.compile(model, "sgd", loss="mse")
    >>> history = model.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0)
    >>> sorted(history.history)
    ['loss', 'loss_scale', 'skipped_steps']
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"`model` must be a keras.Model. Received: {model!r}")
    _check_retry(retry)
    own_step = type(model).train_step is not keras.Model.train_step
    if own_step and not isinstance(model, Model):
        raise ValueError(
            f"{type(model).__name__} has a train_step of its own, which compile() would replace. "
            "Compile the model with a wrapped optimizer instead:\n"
            "    model.compile(optimizer=tfscale.wrap(optimizer), ...)\n"
            "If the own step computes a loss of its own, keep it and scale that loss in it:\n"
            "    with tf.GradientTape() as tape:\n"
            "        loss = ...\n"
            "        scaled = self.optimizer.scale_loss(loss)\n"
            "    gradients = tape.gradient(scaled, self.trainable_variables)\n"
            "    self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))\n"
            "If the loss is the one given to compile(), call tfscale's step, which computes it:\n"
            "    def train_step(self, data):\n"
            "        logs = tfscale.train_step(self, data)\n"
            "        return logs"
        )
    if isinstance(model, Model):
        model.compile(optimizer, *args, retry=retry, **compile_arguments)
    else:
        with replicas.scope_of(model):
            model.compile(wrap(optimizer), *args, **compile_arguments)
        WholeStep(retry).install(model)
    return model


@keras.saving.register_keras_serializable(package="tfscale")
class WholeStep:
    """The step that `compile` gives a model. Its optimizer carries it into files and copies.

    Keras' files and copies are of the model's class, which knows no such step; but they build their
    optimizer.

    Args:
        retry: see `compile`.
    """

    def __init__(self, retry: int = 0) -> None:
        """See the class."""
        self.retry = retry
        self._is_installed = False

    def get_config(self) -> dict[str, Any]:
        """The arguments of the constructor."""
        return {"retry": self.retry}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> WholeStep:
        """The inverse of `get_config`."""
        return cls(**config)

    def install(self, model: keras.Model) -> None:
        """Gives `model` the step."""
        self._is_installed = True
        model.optimizer.whole_step = self
        model.train_step = functools.partial(self._take, model)
        _prepare(model)

    def restore(self, optimizer: LossScaleOptimizer) -> None:
        """Gives the step to a loaded or copied model, or warns if Keras' own is running already."""
        model = None if self._is_installed else _compat.model_of(optimizer)
        if model is None or type(model).train_step is not keras.Model.train_step:
            return
        if not optimizer.handoff.has_loss:
            self.install(model)
            return
        warn(
            f"{model.name} was compiled by tfscale.compile before it was saved or copied, but now "
            "Keras' own train step runs, which a skip does not take back: the model was not built "
            "when it was loaded. Get the whole step back with tfscale.compile(model, "
            f"model.optimizer, retry={self.retry}, loss=...)"
        )

    def _take(self, model: keras.Model, data: Any) -> dict[str, Any]:
        if not isinstance(model.optimizer, LossScaleOptimizer):
            return type(model).train_step(model, data)  # compiled again, without tfscale
        model.optimizer.whole_step = self  # it may be another one since
        return train_step(model, data, retry=self.retry)


def _prepare(model: keras.Model) -> None:
    """Adapts Keras' trainer to the step and its logs."""
    _compat.hide_from_lists(model, ["loss_scale", "skipped_steps"])
    _compat.patch_fit(model)


@keras.saving.register_keras_serializable(package="tfscale")
class Model(keras.Model):
    """A `keras.Model` whose `train_step` is `tfscale.train_step` and whose optimizer is wrapped.

    To be subclassed, or made of inputs and outputs, like `keras.Model`. It is saved and loaded with
    its optimizer and its `retry`.

    Example:
    >>> import keras, tfscale
    >>> inputs = keras.Input((3,))
    >>> model = tfscale.Model(inputs, keras.layers.Dense(1)(inputs))
    >>> model.compile("sgd", loss="mse")
    >>> isinstance(model.optimizer, tfscale.LossScaleOptimizer)
    True
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes a functional model if there are inputs and outputs, as in Keras."""
        functional = cls is Model and _compat.makes_functional(args, kwargs)
        return super().__new__(Functional if functional else cls, *args, **kwargs)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See the class."""
        if _compat.makes_functional(args, kwargs):
            _make_functional(type(self))
        super().__init__(*args, **kwargs)

    def compile(
        self, optimizer: Any = "rmsprop", *args: Any, retry: int = 0, **kwargs: Any
    ) -> None:
        """As `tfscale.compile`, for this model."""
        _check_retry(retry)
        if retry and type(self).train_step is not Model.train_step:
            raise ValueError(
                f"{type(self).__name__} has a train_step of its own, which ignores "
                f"`retry`: call tfscale.train_step(self, data, retry={retry}) in it instead."
            )
        with replicas.scope_of(self):
            super().compile(wrap(optimizer), *args, **kwargs)
        self._retry = retry
        _prepare(self)

    def get_compile_config(self) -> dict[str, Any] | None:
        """As in Keras, with `retry`."""
        config = super().get_compile_config()
        return {**config, "retry": self._retry} if config else config

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """As in Keras, which leaves a class alone that has a `compile` of its own."""
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.built:
            self.optimizer.build(self.trainable_variables)

    def train_step(self, data: Any) -> dict[str, Any]:
        """Calls `tfscale.train_step` with the `retry` of `compile`."""
        return train_step(self, data, retry=self._retry)


@keras.saving.register_keras_serializable(package="tfscale")
class Functional(Model, _compat.Functional):
    """What `tfscale.Model(inputs, outputs)` makes."""


def _make_functional(cls: type) -> None:
    """Puts `Functional` in the place of `Model` among the bases of `cls`.

    Keras does the same with its own classes; it would change `Model` itself, and with it every
    subclass that is not made of inputs and outputs.
    """
    if issubclass(cls, Functional):
        return
    for base in cls.__bases__:
        if base is not Model and issubclass(base, Model):
            _make_functional(base)
    cls.__bases__ = tuple(Functional if base is Model else base for base in cls.__bases__)
