"""Graphs, XLA and distribution strategies answer what `tfscale._compat` asks them."""

import functools
import threading

import numpy as np
import pytest
import tensorflow as tf

from tfscale import _compat
from tfscale._compat.tensorflow import NO_INLINE


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_in_xla_context(jit_compile: bool, nested: bool) -> None:
    answers = []

    def ask() -> None:
        answers.append(_compat.in_xla_context())

    @tf.function(jit_compile=jit_compile, autograph=False)
    def step(x: tf.Tensor) -> tf.Tensor:
        (tf.function(ask) if nested else ask)()
        tf.cond(x > 0, lambda: ask() or x, lambda: x)
        return x

    step.get_concrete_function(tf.constant(1.0))
    assert answers == [jit_compile] * 2
    assert not _compat.in_xla_context()


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4)])
def test_xla_reduce_or(shape: tuple[int, ...]) -> None:
    bits = tf.constant(np.random.default_rng(0).choice([0, 1, 6, 1 << 30], shape), tf.int32)
    reduced = tf.function(_compat.xla_reduce_or, jit_compile=True, autograph=False)(bits)
    assert int(reduced) == np.bitwise_or.reduce(bits.numpy(), axis=None)


def test_no_inline_is_an_attribute_of_functions() -> None:
    function = tf.function(tf.abs, experimental_attributes={NO_INLINE: True})
    definition = function.get_concrete_function(tf.TensorSpec([])).function_def
    assert definition.attr[NO_INLINE].b


def test_outlined_makes_one_operation() -> None:
    @tf.function(autograph=False)
    def function(x: tf.Tensor) -> tf.Tensor:
        return _compat.outlined(lambda: tf.exp(tf.sin(x)))()

    operations = [
        op.type for op in function.get_concrete_function(tf.TensorSpec([])).graph.get_operations()
    ]
    assert "PartitionedCall" in operations
    assert not {"Exp", "Sin"} & set(operations)
    assert float(function(tf.constant(0.0))) == float(_compat.outlined(lambda: tf.constant(1.0))())


def test_branches_and_loops_are_control_flow() -> None:
    found = {}

    def note(name: str) -> tf.Tensor:
        found[name] = _compat.is_control_flow(tf.compat.v1.get_default_graph())
        return tf.constant(1)

    @tf.function(autograph=False)
    def function(x: tf.Tensor) -> None:
        note("function")
        tf.function(lambda: note("nested"), autograph=False)()
        tf.cond(x > 0, lambda: note("then"), lambda: note("else"))
        tf.switch_case(x, [lambda: note("case"), lambda: note("other case")])
        tf.while_loop(lambda i: note("condition") > i, lambda i: i + note("body"), [0])

    function(tf.constant(1))
    inside = ["then", "else", "case", "other case", "condition", "body"]
    assert found == {"function": False, "nested": False, **dict.fromkeys(inside, True)}


def test_a_tensor_is_recorded_while_its_tape_is_active() -> None:
    x = tf.constant(1.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = 2.0 * x
        assert _compat.is_recorded(y)
        assert not _compat.is_recorded(tf.constant(1.0))
    assert not _compat.is_recorded(y)
    with tf.GradientTape():
        assert not _compat.is_recorded(y)


def test_later_tensors_have_larger_numbers() -> None:
    first = tf.constant(1.0)
    second = first + 1.0
    third = tf.function(lambda x: x * 2.0)(first)
    numbers = list(map(_compat.creation_number, (first, second, third)))
    assert numbers == sorted(set(numbers))


def test_no_strategy_has_no_replicas() -> None:
    strategy = tf.distribute.get_strategy()
    assert not _compat.strategy_without_merge_call_in_clusters(strategy)
    assert not _compat.has_several_workers(strategy)


def test_single_worker_is_not_several() -> None:
    assert not _compat.has_several_workers(tf.distribute.MultiWorkerMirroredStrategy())


def test_shared_cluster_is_found_by_the_thread(two_replicas: tf.distribute.Strategy) -> None:
    answers = []

    def replica() -> tf.Tensor:
        graph = getattr(threading.current_thread(), "graph", None)
        answers.append((graph is not None, _compat.replicas_share_a_cluster()))
        return tf.constant(1.0)

    for jit_compile in (False, True):
        run = functools.partial(two_replicas.run, replica)
        tf.function(run, jit_compile=jit_compile, autograph=False).get_concrete_function()
    assert answers == [(True, False)] * 2 + [(True, True)] * 2
    with two_replicas.scope():
        assert not _compat.strategy_without_merge_call()
        assert not _compat.strategy_without_merge_call_in_clusters(two_replicas)  # on CPUs


def test_collectives_without_keys_ask_for_none() -> None:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    launch = strategy.extended._replica_ctx_all_reduce  # as in a cluster, without `merge_call`

    def asked(drop: bool) -> int:
        def sums() -> tf.Tensor:
            if drop:
                _compat.drop_collective_keys()
            return tf.while_loop(lambda x: x < 4.0, lambda x: add(x), [tf.constant(1.0)])[0]

        def add(x: tf.Tensor) -> list[tf.Tensor]:
            return [x + launch(tf.distribute.ReduceOp.SUM, x)]

        step = tf.function(lambda: strategy.run(sums), autograph=False)
        return len(step.get_concrete_function().graph.deferred_external_captures)

    assert [asked(drop) for drop in (False, True, False)] == [1, 0, 1]


def test_replicas_with_own_functions_cannot_meet(two_replicas: tf.distribute.Strategy) -> None:
    answers = []

    def ask() -> tf.Tensor:
        answers.append(_compat.merge_call_works())
        return tf.constant(1.0)

    def traced() -> tf.Tensor:
        return tf.function(ask, autograph=False)()

    for replica in (ask, traced):
        step = tf.function(functools.partial(two_replicas.run, replica), autograph=False)
        step.get_concrete_function()
    assert answers[:2] == [True, True]
    assert set(answers[2:]) == {False}
    assert _compat.merge_call_works()
