"""Models whose `fit` uses `train_step`: `compile` for any Keras model, `Model` to subclass.

The step itself is in `transaction`. Files, clones and copies of such a model keep it.
"""

from __future__ import annotations

import functools
from typing import Any

import keras

from tfscale import _compat, replica_fit, replica_jit
from tfscale.optimizer import LossScaleOptimizer
from tfscale.transaction import check_retry, train_step
from tfscale.warnings import warn
from tfscale.wrapping import wrap


def compile(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer | str | dict[str, Any] = "rmsprop",
    *args: Any,
    retry: int = 0,
    **compile_arguments: Any,
) -> keras.Model:
    """Compiles any Keras model so that `fit` applies or skips each step as a whole.

    For functional, Sequential and subclassed models, also trained and loaded ones. Files, clones
    and copies of the model keep the step; `model.compile` with a plain optimizer removes it.

    Args:
        model: a `keras.Model` without a custom `train_step`.
        optimizer: as in `tfscale.wrap`.
        *args: further positional arguments of `model.compile`.
        retry: how often a step runs a batch again, at the lowered scale, after an overflow; 0
            skips the batch.
        **compile_arguments: keyword arguments of `model.compile`. Under a strategy of GPUs
            `jit_compile=True` compiles the step on each replica, which Keras cannot; "auto" does
            so if XLA supports all layers, batches have one shape and `Embedding` tables are small.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is not a Keras model.
        ValueError: `model` has a custom `train_step`, or `jit_compile=True` is not possible.

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
    check_retry(retry)
    if isinstance(model, Model):
        model.compile(optimizer, *args, retry=retry, **compile_arguments)
        return model
    if type(model).train_step is not keras.Model.train_step:
        raise ValueError(
            f"{type(model).__name__} has a custom train_step, which compile() would replace. "
            "Compile the model with a wrapped optimizer instead:\n"
            "    model.compile(optimizer=tfscale.wrap(optimizer), ...)\n"
            "If the custom step computes its own loss, scale that loss in it:\n"
            "    with tf.GradientTape() as tape:\n"
            "        loss = ...\n"
            "        scaled = self.optimizer.scale_loss(loss)\n"
            "    gradients = tape.gradient(scaled, self.trainable_variables)\n"
            "    self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))\n"
            "If it uses the loss given to compile(), call tfscale's step, which computes it:\n"
            "    def train_step(self, data):\n"
            "        logs = tfscale.train_step(self, data)\n"
            "        return logs"
        )
    jit_compile = replica_jit.check(model, **compile_arguments)
    with model.distribute_strategy.scope():  # for variables of optimizer and metrics
        model.compile(wrap(optimizer), *args, **compile_arguments)
    WholeStep(retry, jit_compile).install(model)
    return model


@keras.saving.register_keras_serializable(package="tfscale")
class WholeStep:
    """The step that `compile` gives a model.

    Keras loads or copies the model's class, which has no such step. So the optimizer saves this
    object, and installs the step again when it is built.

    Args:
        retry: see `compile`.
        jit_compile: as given to `compile`.
    """

    def __init__(self, retry: int = 0, jit_compile: bool | str = "auto") -> None:
        """See the class."""
        self.retry = retry
        self.jit_compile = jit_compile
        self._is_installed = False

    def get_config(self) -> dict[str, Any]:
        """The arguments of the constructor."""
        return {"retry": self.retry, "jit_compile": self.jit_compile}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> WholeStep:
        """The inverse of `get_config`."""
        return cls(**config)

    def install(self, model: keras.Model) -> None:
        """Makes this the train step of `model`."""
        self._is_installed = True
        step = functools.partial(train_step, model, retry=self.retry)
        self._step = replica_jit.compiled(model, step, self.jit_compile)
        model.optimizer.whole_step = self
        model.train_step = functools.partial(self._take, model)
        _prepare(model)

    def restore(self, optimizer: LossScaleOptimizer) -> None:
        """Installs the step in a loaded or copied model, or warns if Keras' step already runs."""
        model = None if self._is_installed else _compat.model_of(optimizer)
        if model is None or type(model).train_step is not keras.Model.train_step:
            return
        if not optimizer.handoff.has_loss:
            self.install(model)
            return
        warn(
            f"{model.name} was compiled by tfscale.compile, but now Keras' own train step runs, "
            "which a skip does not undo completely. The reason: the model was not built when it "
            "was loaded or copied. Compile it again: tfscale.compile(model, model.optimizer, "
            f"retry={self.retry}, loss=...)"
        )

    def _take(self, model: keras.Model, data: Any) -> dict[str, Any]:
        if not isinstance(model.optimizer, LossScaleOptimizer):
            return type(model).train_step(model, data)  # compiled again, without tfscale
        model.optimizer.whole_step = self  # it may have been replaced
        return self._step(data)


def _prepare(model: keras.Model) -> None:
    """Adapts Keras' trainer to the step and its logs."""
    _compat.hide_from_lists(model, ["loss_scale", "skipped_steps"])
    _compat.patch_fit(model)
    replica_fit.use_for(model)


@keras.saving.register_keras_serializable(package="tfscale")
class Model(keras.Model):
    """A `keras.Model` whose `train_step` is `tfscale.train_step` and whose optimizer is wrapped.

    Subclass it, or call it with inputs and outputs, like `keras.Model`. Files keep its optimizer
    and its `retry`.

    Example:
    >>> import keras, tfscale
    >>> inputs = keras.Input((3,))
    >>> model = tfscale.Model(inputs, keras.layers.Dense(1)(inputs))
    >>> model.compile("sgd", loss="mse")
    >>> isinstance(model.optimizer, tfscale.LossScaleOptimizer)
    True
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes a functional model of inputs and outputs, as in Keras."""
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
        check_retry(retry)
        if retry and type(self).train_step is not Model.train_step:
            raise ValueError(
                f"{type(self).__name__} has a custom train_step, which ignores `retry`. "
                f"Call tfscale.train_step(self, data, retry={retry}) in it instead."
            )
        self._jit = replica_jit.check(self, **kwargs)
        with self.distribute_strategy.scope():
            super().compile(wrap(optimizer), *args, **kwargs)
        self._retry = retry
        self.__dict__.pop("train_step", None)  # of an earlier call
        self.__dict__["train_step"] = replica_jit.compiled(self, self.train_step, self._jit)
        _prepare(self)

    def get_compile_config(self) -> dict[str, Any] | None:
        """As in Keras, with `retry`, and `jit_compile` as it was given."""
        config = super().get_compile_config()
        return {**config, "retry": self._retry, "jit_compile": self._jit} if config else config

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """As in Keras, which does nothing for a class with its own `compile`."""
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
    """Replaces `Model` by `Functional` among the bases of `cls`.

    Keras does the same with its classes. But it would change `Model` itself, and so every subclass
    that is not made of inputs and outputs.
    """
    if issubclass(cls, Functional):
        return
    for base in cls.__bases__:
        if base is not Model and issubclass(base, Model):
            _make_functional(base)
    cls.__bases__ = tuple(Functional if base is Model else base for base in cls.__bases__)
