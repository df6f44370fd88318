"""Private names of TensorFlow: graphs, XLA and distribution strategies."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfscale._compat.lookup import find, needs_private_names

NO_INLINE = find("tensorflow.python.eager.polymorphic_function.attributes:NO_INLINE")
_graph_or_parents_in_xla_context = find(
    "tensorflow.python.ops.control_flow_util:GraphOrParentsInXlaContext"
)
_ControlFlowFuncGraph = find(
    "tensorflow.python.ops.control_flow_v2_func_graphs:ControlFlowFuncGraph"
)
_xla_variadic_reduce = find("tensorflow.compiler.tf2xla.ops.gen_xla_ops:xla_variadic_reduce_v2")
_should_record_backprop = find("tensorflow.python.eager.record:should_record_backprop")


def in_xla_context() -> bool:
    """Whether XLA will compile the whole graph that is being built (`jit_compile=True`)."""
    if tf.executing_eagerly():
        return False
    return _graph_or_parents_in_xla_context(tf.compat.v1.get_default_graph())


def outlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `function` a single operation of a plain graph instead of a hundred.

    Operations cost time even in a branch that is not taken.
    """
    if tf.executing_eagerly() or in_xla_context() or not isinstance(NO_INLINE, str):
        return function
    return tf.function(function, autograph=False, experimental_attributes={NO_INLINE: True})


@functools.cache
def _bitwise_or() -> Any:
    # Traced once per process, not for each reduction of each graph.
    number = tf.TensorSpec([], tf.int32)
    with tf.init_scope():
        function = tf.function(tf.bitwise.bitwise_or, autograph=False)
        return function.get_concrete_function(number, number)


def xla_reduce_or(bits: tf.Tensor) -> tf.Tensor:
    """Bitwise or over all elements of an int32 tensor, in a graph that XLA compiles."""
    if bits.shape.rank is None:
        bits = tf.reshape(bits, [-1])
    reducer = _bitwise_or()
    reducer.add_to_graph()
    axes = list(range(bits.shape.rank))
    return _xla_variadic_reduce([bits], [tf.constant(0)], axes, reducer)[0]


def is_control_flow(graph: tf.Graph) -> bool:
    """Whether `graph` is a branch, or the condition or body of a loop."""
    return isinstance(graph, _ControlFlowFuncGraph)


def creation_number(tensor: tf.Tensor) -> int:
    """A number that grows with the time at which an eager tensor was made."""
    return tensor._id


def is_recorded(tensor: tf.Tensor) -> bool:
    """Whether an active tape records an eager `tensor`."""
    return _should_record_backprop([tensor])


def strategy_without_merge_call() -> bool:
    """Whether the current strategy replaces `merge_call` by collectives (XLA on GPUs, TPUs)."""
    return tf.__internal__.distribute.strategy_supports_no_merge_call()


def strategy_without_merge_call_in_clusters(strategy: tf.distribute.Strategy) -> bool:
    """Whether `strategy` does that inside `tf.function(jit_compile=True)`."""
    mirrored = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)
    return isinstance(strategy, mirrored) and all(
        "GPU" in device for device in strategy.extended.worker_devices
    )


def drop_collective_keys() -> None:
    """Lets collectives in the function that is traced now do without a key for each call.

    XLA reads none, and TensorFlow cannot pass one into a loop round the function.
    """
    graph = tf.compat.v1.get_default_graph()
    while is_control_flow(graph):
        graph = graph.outer_graph
    capture = type(graph).capture_call_time_value

    def captured(closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        if closure.__name__ == "_next_instance_key":
            return tf.constant(0)
        return capture(graph, closure, *args, **kwargs)

    graph.capture_call_time_value = captured


@needs_private_names
def has_several_workers(strategy: tf.distribute.Strategy) -> bool:
    """Whether the replicas of `strategy` live in several processes."""
    several = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    return several and strategy.extended._in_multi_worker_mode()


def replicas_share_a_cluster() -> bool:
    """Whether all replicas are traced into one XLA cluster: `jit_compile` around `run`."""
    several = len(tf.distribute.get_strategy().extended.worker_devices) > 1
    return several and in_xla_context() and not _has_own_graph()


def merge_call_works() -> bool:
    """Whether `merge_call` works here: not inside a function that each replica traces alone."""
    return tf.executing_eagerly() or not _has_own_graph()


def _has_own_graph() -> bool:
    # All replicas share the graph in which the strategy started this replica's thread.
    shared = getattr(threading.current_thread(), "graph", None)
    return shared is not None and tf.compat.v1.get_default_graph() is not shared
