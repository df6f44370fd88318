"""`fit` on several GPUs, without waiting for them inside a step."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import keras
import tensorflow as tf

from tfscale import replicas


def use_for(model: keras.Model) -> None:
    """Makes `fit` call a `_TrainFunction` if a `MirroredStrategy` has several replicas.

    Args:
        model: a compiled model; one with a method `make_train_function` of its own keeps that.
    """
    strategy = model.distribute_strategy
    mirrored = isinstance(strategy, tf.distribute.MirroredStrategy)
    own = type(model).make_train_function is not keras.Model.make_train_function
    if own or not mirrored or strategy.num_replicas_in_sync == 1:
        return

    def make_train_function(force: bool = False) -> None:
        keras.Model.make_train_function(model, force)
        in_graph = not (model.run_eagerly or model.jit_compile)  # compiled again, without tfscale
        if in_graph and not isinstance(model.train_function, _TrainFunction):
            model.train_function = _TrainFunction(model)

    model.make_train_function = make_train_function


class _TrainFunction:
    """Does what Keras' train function does, but the step in it returns no numbers.

    The results of a `tf.function` depend on all of its replicas. Where one GPU depends on another,
    TensorFlow waits until that one has computed, and only then prepares the next step. So the step
    writes the numbers among its logs to a variable, which is read once for `steps_per_execution`
    steps. It returns all other logs, such as vectors.

    Args:
        model: its `train_function` is that of Keras.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._from_keras = model.train_function
        with tf.device(model.distribute_strategy.extended.worker_devices[0]):
            zeros = tf.zeros([0], tf.float64)
            self._numbers = tf.Variable(zeros, trainable=False, shape=[None])
        self._step = tf.function(self._run, reduce_retracing=True, autograph=False)

    def __call__(self, iterator: Any) -> Any:
        if not isinstance(iterator, tf.distribute.DistributedIterator):
            return self._from_keras(iterator)  # the batch of `train_on_batch`
        logs = self._step(iterator)
        with contextlib.suppress(tf.errors.OutOfRangeError):  # the epoch ends before the last one
            for _ in range(self._model.steps_per_execution - 1):
                logs = self._step(iterator)
        numbers = iter(self._numbers.numpy())
        return tf.nest.map_structure(lambda log: next(numbers) if log is None else log, logs)

    def _run(self, iterator: Any) -> Any:
        """Takes a step and returns its logs, with None in the place of each number."""
        strategy = self._model.distribute_strategy
        logs = strategy.run(self._model.train_step, args=(iterator.get_next(),))
        logs = tf.nest.map_structure(functools.partial(replicas.mean_of_parts, strategy), logs)
        numbers = [tf.cast(log, tf.float64) for log in tf.nest.flatten(logs) if _is_number(log)]
        self._numbers.assign(tf.stack(numbers) if numbers else tf.zeros([0], tf.float64))
        return tf.nest.map_structure(lambda log: None if _is_number(log) else log, logs)


def _is_number(log: tf.Tensor) -> bool:
    return log.shape.rank == 0 and (log.dtype.is_floating or log.dtype.is_integer)
