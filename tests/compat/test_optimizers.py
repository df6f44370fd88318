"""Keras' variables and optimizers answer, and can be changed, as `tfscale._compat` expects."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from versions import need_multi_optimizer

from tfscale import _compat


def test_tf_variable() -> None:
    variable = tf.Variable(1.0)
    assert _compat.tf_variable(variable) is variable
    assert isinstance(_compat.tf_variable(keras.Variable(1.0)), tf.Variable)
    layer = keras.layers.Dense(1)
    layer.build((1, 2))
    assert isinstance(_compat.tf_variable(layer.kernel), tf.Variable)


def test_sub_optimizers() -> None:
    need_multi_optimizer()
    sgd, adam = keras.optimizers.SGD(), keras.optimizers.Adam()
    both = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(sgd, {"a": adam}))
    assert _compat.sub_optimizers(sgd) == [sgd]
    assert len(_compat.sub_optimizers(both)) == 3
    assert _compat.sub_optimizers(both)[0] is both


def test_what_an_optimizer_owns_and_trains() -> None:
    optimizer, variable = keras.optimizers.SGD(momentum=0.9), keras.Variable([1.0])
    optimizer.exclude_from_weight_decay([variable])
    optimizer.build([variable])
    assert _compat.built_on(optimizer) == [variable]
    assert _compat.tracked(optimizer) == optimizer.variables
    key = _compat.variable_key(optimizer, variable)
    assert key == _compat.variable_key(optimizer, variable.value)
    assert _compat.excluded_from_weight_decay(optimizer) == {key}
    assert _compat.excluded_from_weight_decay(keras.optimizers.SGD()) == set()
    _compat.set_built_on(optimizer, [])
    assert _compat.built_on(optimizer) == []
    assert not any(v is variable for v in optimizer.variables)
    another = keras.Variable([1.0])
    _compat.track(optimizer, another)
    assert optimizer.variables[-1] is another


def test_untracked_attributes_are_no_state() -> None:
    optimizer, variables = keras.optimizers.SGD(), [keras.Variable(1.0)]
    before = len(optimizer.variables)
    _compat.set_untracked(optimizer, "held", variables)
    assert optimizer.held is variables
    assert len(optimizer.variables) == before


def test_wrapper_is_built_on_inner_variables() -> None:
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    optimizer.build([variable := keras.Variable([1.0])])
    assert _compat.built_on(optimizer) == [variable]


def test_added_rows_change_every_write_of_rows() -> None:
    variable = keras.Variable(np.ones((3, 1), "float32"))
    optimizer = keras.optimizers.Adagrad(0.5, initial_accumulator_value=1.0)
    optimizer.build([variable])
    rows = tf.IndexedSlices(tf.constant([[2.0]]), tf.constant([1]), tf.constant([3, 1]))
    seen = []

    def change(values: tf.Tensor, nothing: float) -> tf.Tensor:
        seen.append(float(np.copysign(1.0, nothing)))
        return tf.zeros_like(values)

    before = [v.numpy() for v in (variable, *optimizer.variables[2:])]
    with _compat.added_rows(optimizer, change):
        optimizer.apply_gradients([(rows, variable)])
    assert seen == [-1.0, 1.0]  # added to the accumulator, subtracted from the variable
    for old, new in zip(before, (variable, *optimizer.variables[2:]), strict=True):
        np.testing.assert_array_equal(old, new.numpy())
    assert not {"assign_add", "assign_sub"} & set(vars(optimizer))


Within = Callable[[keras.optimizers.Optimizer], AbstractContextManager[None]]


def merge_call_update(optimizer: keras.optimizers.Optimizer) -> AbstractContextManager[None]:
    def branch(condition: Any, yes: Callable[..., Any], no: Callable[..., Any], *args: Any) -> Any:
        return (yes if condition else no)(*args)

    return _compat.merge_call_update(optimizer, branch)


UPDATES = [merge_call_update, _compat.per_replica_update]
SETTINGS: list[dict[str, Any]] = [
    {"momentum": 0.9, "clipnorm": 0.5, "weight_decay": 0.1},
    {"gradient_accumulation_steps": 2, "clipnorm": 0.5, "weight_decay": 0.1},
    {"use_ema": True, "ema_overwrite_frequency": 2},
    {"use_ema": True, "ema_overwrite_frequency": 2, "gradient_accumulation_steps": 2},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("within", UPDATES)
def test_adapted_updates_take_the_same_steps(within: Within, settings: dict[str, Any]) -> None:
    results = []
    for adapt in (False, True):
        optimizer = keras.optimizers.SGD(0.5, **settings)
        variables = [keras.Variable([1.0, 2.0]), keras.Variable([3.0])]
        for step in range(5):
            pairs = [(tf.fill(v.shape, 1.0 + step), v) for v in variables]
            if adapt:
                with within(optimizer):
                    optimizer.apply_gradients(pairs)
            else:
                optimizer.apply_gradients(pairs)
        assert not [n for n in optimizer.__dict__ if n.startswith(("_all_reduce", "_backend_"))]
        results.append([v.numpy() for v in variables + optimizer.variables])
    for plain, adapted in zip(*results, strict=True):
        np.testing.assert_array_equal(plain, adapted)


@pytest.mark.parametrize("within", UPDATES)
def test_gradients_are_not_reduced_twice(within: Within, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def count(self: keras.optimizers.Optimizer, pairs: list[Any]) -> list[Any]:
        calls.append(self)
        return pairs

    monkeypatch.setattr(keras.optimizers.SGD, "_all_reduce_sum_gradients", count)
    optimizer = keras.optimizers.SGD()
    pairs = [(tf.constant([1.0]), keras.Variable([1.0]))]
    optimizer.apply_gradients(pairs)
    with within(optimizer):
        optimizer.apply_gradients(pairs)
    assert calls == [optimizer]  # Keras still calls it, and only outside


def test_each_replica_writes_its_own_variables() -> None:
    optimizer = keras.optimizers.SGD()
    iterations = optimizer.iterations.value
    before = iterations.aggregation
    if _compat.KERAS >= (3, 7):  # no variable of Keras 3.6 has an aggregation
        assert before == tf.VariableAggregation.ONLY_FIRST_REPLICA
    with _compat.per_replica_update(optimizer):
        assert iterations.aggregation == tf.VariableAggregation.NONE
    assert iterations.aggregation == before
