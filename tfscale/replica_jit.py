"""XLA on each GPU of a strategy.

Keras' `jit_compile` puts all replicas into one XLA cluster, which fails. Here each replica compiles
its own train step, inside `strategy.run`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfscale import _compat, replicas

# Most bytes of the tables whose sparse gradients XLA sums as dense ones. Two H200 sum that much in
# about 1 ms, and it takes three times that memory.
_TABLES = 256 * 2**20


def _unable(model: keras.Model) -> list[str]:
    """The names of the layers that XLA cannot compile."""
    layers = [model, *_compat.sub_layers(model)]
    return [layer.name for layer in layers if not layer.supports_jit]


def check(
    model: keras.Model, *, jit_compile: Any = "auto", run_eagerly: Any = False, **_: Any
) -> bool | str:
    """The `jit_compile` among the keyword arguments of `model.compile`.

    Raises:
        ValueError: XLA should compile the train step of `model` on each replica but cannot.
    """
    strategy = model.distribute_strategy
    on_gpus = _compat.strategy_without_merge_call_in_clusters(strategy)
    # With one replica that is not a GPU, Keras' own way works.
    if jit_compile is not True or (strategy.num_replicas_in_sync == 1 and not on_gpus):
        return jit_compile
    unable = _unable(model)
    for right, expected, received in (
        (on_gpus, "every replica on a GPU", f"{strategy.extended.worker_devices}"),
        (not run_eagerly, "a step that is traced", f"run_eagerly={run_eagerly!r}"),
        (not unable, "layers that support XLA", f"{', '.join(unable)} without `supports_jit`"),
    ):
        if not right:
            raise ValueError(
                f"jit_compile=True under a strategy needs {expected}. Received: {received}. Leave "
                "`jit_compile` at its default."
            )
    return True


def compiled(
    model: keras.Model, step: Callable[[Any], Any], jit_compile: bool | str
) -> Callable[[Any], Any]:
    """The step to run on each replica: `step`, compiled if a strategy of GPUs allows it.

    Args:
        model: a compiled `keras.Model`.
        step: its train step.
        jit_compile: as given to `model.compile`. "auto" compiles only on the GPUs of one process,
            batches of one shape, and a model without large tables.
    """
    strategy, auto = model.distribute_strategy, jit_compile == "auto"
    if not (jit_compile and _compat.strategy_without_merge_call_in_clusters(strategy)):
        return step
    several_workers = _compat.has_several_workers(strategy)
    if auto and (several_workers or _unable(model)):
        return step
    model.jit_compile = False  # it would put all replicas into one cluster
    combines = strategy.num_replicas_in_sync > 1 and not several_workers

    def traced(data: Any) -> Any:
        _compat.drop_collective_keys()  # also those of layers
        logs = step(data)
        if not (combines and logs):
            return logs
        values = [tf.convert_to_tensor(value) for value in tf.nest.flatten(logs)]
        return tf.nest.pack_sequence_as(logs, replicas.mean(values))

    function = tf.function(traced, autograph=False, jit_compile=True)

    def run(data: Any) -> Any:
        if tf.executing_eagerly() or (auto and not _is_worth_it(model, data)):
            return step(data)
        # Keras would take the mean of what each replica returns, and the host would wait for it.
        return replicas.of_first(function(data)) if combines else function(data)

    return tf.autograph.experimental.do_not_convert(run)


def _is_worth_it(model: keras.Model, data: Any) -> bool:
    """Whether all batches have one shape and the tables are small.

    For another shape a replica compiles again while the others wait, and XLA ends a process that
    waits for too long.
    """
    tables = [la for la in _compat.sub_layers(model) if isinstance(la, keras.layers.Embedding)]
    variables = [variable for table in tables for variable in table.trainable_variables]
    if sum(4 * math.prod(variable.shape) for variable in variables) > _TABLES:
        return False
    parts = [part for part in tf.nest.flatten(data) if part is not None]
    return all(isinstance(p, tf.Tensor) and p.shape.is_fully_defined() for p in parts)
