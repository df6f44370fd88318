"""`wrap` takes whatever names an optimizer, never scales twice, and turns nonsense away at once."""

import copy
import importlib
import re
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfscale


def steady_name(value):
    """The same in every process: no address."""
    return re.sub(r" at 0x\w+", "", repr(value))


SCHEDULE = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.9)


def trained(optimizer, steps=2):
    """`optimizer` after `steps` steps on one variable, which is returned as well."""
    variable = keras.Variable([1.0, 2.0])
    for _ in range(steps):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(variable**2))
        optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])
    return variable


def overflow(optimizer, variable):
    optimizer.scale_loss(tf.constant(1.0))
    optimizer.apply_gradients([(tf.constant([float("inf"), 0.0]), variable)])


# What an optimizer may be given as.


@pytest.mark.parametrize(
    "given",
    [
        keras.optimizers.SGD,
        lambda: "sgd",
        lambda: "SGD",
        lambda: {"class_name": "SGD", "config": {"learning_rate": 0.5}},
        lambda: keras.optimizers.serialize(keras.optimizers.SGD(0.5)),
        lambda: keras.optimizers.SGD(SCHEDULE),
    ],
    ids=["instance", "name", "name in capitals", "config", "serialized", "schedule"],
)
def test_an_optimizer_in_any_form_is_wrapped(given):
    optimizer = tfscale.wrap(given())
    assert isinstance(optimizer, tfscale.LossScaleOptimizer)
    assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    assert type(optimizer.inner_optimizer) is keras.optimizers.SGD
    assert optimizer.policy == tfscale.Auto()


def test_an_instance_is_kept_and_not_copied():
    inner = keras.optimizers.Adam(1e-3)
    assert tfscale.wrap(inner).inner_optimizer is inner


@pytest.mark.parametrize(
    "config",
    [
        {"class_name": "SGD", "config": {"learning_rate": 0.5}},
        keras.optimizers.serialize(keras.optimizers.SGD(SCHEDULE)),
        keras.optimizers.serialize(
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=8.0)
        ),
        keras.optimizers.serialize(tfscale.wrap(keras.optimizers.SGD(), 4.0)),
    ],
    ids=["plain", "schedule", "keras", "tfscale"],
)
def test_a_config_is_left_as_it_was(config):
    before = copy.deepcopy(config)
    tfscale.wrap(config)
    assert config == before


def test_a_loss_scale_optimizer_config_is_taken_over():
    inner = keras.optimizers.SGD(0.5)
    of_keras = keras.optimizers.LossScaleOptimizer(inner, 8.0, dynamic_growth_steps=3)
    optimizer = tfscale.wrap(keras.optimizers.serialize(of_keras))
    assert type(optimizer.inner_optimizer) is keras.optimizers.SGD
    assert optimizer.policy == tfscale.Dynamic(initial_scale=8.0, growth_interval=3)
    again = tfscale.wrap(keras.optimizers.serialize(optimizer))
    assert type(again) is tfscale.LossScaleOptimizer
    assert type(again.inner_optimizer) is keras.optimizers.SGD
    assert again.policy == optimizer.policy


# Which policy.


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, tfscale.Auto()),
        ({"policy": "AUTO"}, tfscale.Auto()),
        ({"policy": "dynamic"}, tfscale.Dynamic()),
        ({"policy": "none"}, tfscale.NoScaling()),
        ({"policy": 1024}, tfscale.Static(1024.0)),
        ({"policy": np.float32(1024)}, tfscale.Static(1024.0)),
        ({"policy": tfscale.Dynamic(hysteresis=2)}, tfscale.Dynamic(hysteresis=2)),
        ({"growth_interval": 5}, tfscale.Dynamic(growth_interval=5)),
        ({"policy": "auto", "growth_interval": 5}, tfscale.Dynamic(growth_interval=5)),
        ({"policy": "Auto", "growth_interval": 5}, tfscale.Dynamic(growth_interval=5)),
        ({"dynamic_growth_steps": 5}, tfscale.Dynamic(growth_interval=5)),
        ({"initial_scale": 4.0}, tfscale.Dynamic(initial_scale=4.0)),
        ({"policy": "static", "scale": 3}, tfscale.Static(3.0)),
        ({"policy": "none", "skip_nonfinite": False}, tfscale.NoScaling(False)),
    ],
    ids=str,
)
def test_arguments_mean_a_policy(arguments, expected):
    optimizer = tfscale.wrap("sgd", **arguments)
    assert optimizer.policy == expected
    assert float(optimizer.loss_scale) == expected.initial_scale


def test_a_loss_scale_factor_becomes_a_static_scale():
    inner = keras.optimizers.SGD(loss_scale_factor=64.0)
    with pytest.warns(tfscale.LossScaleWarning, match="loss_scale_factor=64.0.*Static") as caught:
        optimizer = tfscale.wrap(inner)
    assert caught[0].filename == __file__
    assert optimizer.policy == tfscale.Static(64.0)
    assert inner.loss_scale_factor is None  # or the gradients would be divided twice


def test_a_loss_scale_factor_gives_way_to_a_policy():
    with pytest.warns(tfscale.LossScaleWarning, match="replaced by policy=Dynamic"):
        optimizer = tfscale.wrap(keras.optimizers.SGD(loss_scale_factor=64.0), "dynamic")
    assert optimizer.policy == tfscale.Dynamic()


# Taking over from Keras.


def test_a_fresh_keras_wrapper_is_replaced():
    inner = keras.optimizers.SGD()
    of_keras = keras.optimizers.LossScaleOptimizer(inner, 8.0, dynamic_growth_steps=3)
    optimizer = tfscale.wrap(of_keras)
    assert optimizer.inner_optimizer is inner
    assert not optimizer.built
    assert optimizer.policy == tfscale.Dynamic(initial_scale=8.0, growth_interval=3)


def test_a_trained_keras_wrapper_goes_on():
    inner = keras.optimizers.Adam(0.1)
    of_keras = keras.optimizers.LossScaleOptimizer(inner, 8.0, dynamic_growth_steps=3)
    variable = trained(of_keras, steps=4)
    optimizer = tfscale.wrap(of_keras)
    assert optimizer.inner_optimizer is inner
    assert optimizer.built
    assert float(optimizer.loss_scale) == 16.0
    assert int(optimizer.step_counter.numpy()) == 1
    assert int(optimizer.iterations.numpy()) == 4
    before = variable.numpy()
    overflow(optimizer, variable)
    assert float(optimizer.loss_scale) == 8.0
    np.testing.assert_array_equal(variable.numpy(), before)
    assert int(optimizer.iterations.numpy()) == 4


def test_another_policy_keeps_slots_but_not_the_scale():
    of_keras = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1), 8.0)
    trained(of_keras)
    optimizer = tfscale.wrap(of_keras, 4.0)
    assert float(optimizer.loss_scale) == 4.0
    assert int(optimizer.iterations.numpy()) == 2


def test_a_scale_that_only_keras_allows_is_taken_over():
    for scale in (0.25, 2.0**40):
        of_keras = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), scale)
        assert float(tfscale.wrap(of_keras).loss_scale) == scale


# Never twice.


def test_a_tfscale_optimizer_comes_back_as_it_is():
    optimizer = tfscale.wrap("sgd", 4.0)
    assert tfscale.wrap(optimizer) is optimizer


def test_another_policy_remakes_a_tfscale_optimizer():
    first = tfscale.wrap(keras.optimizers.Adam(0.1), initial_scale=8.0, growth_interval=1)
    variable = trained(first)
    with pytest.raises(ValueError, match="scale"):
        tfscale.wrap(first, 0.0)  # not "as before"
    second = tfscale.wrap(first, 4.0)
    assert second.inner_optimizer is first.inner_optimizer
    assert second.policy == tfscale.Static(4.0)
    assert float(second.loss_scale) == 4.0
    trained_on = variable.numpy()
    second.scale_loss(tf.constant(1.0))
    second.apply_gradients([(tf.constant([4.0, 4.0]), variable)])
    assert int(second.iterations.numpy()) == 3
    assert not np.array_equal(variable.numpy(), trained_on)


@pytest.mark.parametrize("policy", ["auto", "dynamic", tfscale.Dynamic(8.0, hysteresis=2), 8.0])
def test_another_update_mode_changes_nothing_else(policy):
    first = tfscale.wrap(keras.optimizers.Adam(0.1), policy)
    variable = trained(first, steps=3)
    with pytest.warns(tfscale.LossScaleWarning) if policy == "" else _nothing():
        overflow(first, variable)
    second = tfscale.wrap(first, update="select")
    assert second is not first
    assert second.policy == first.policy
    for mine, others in zip(second.variables, first.variables, strict=True):
        np.testing.assert_array_equal(mine.numpy(), others.numpy(), err_msg=mine.path)
    assert int(second.skipped_steps) == 1
    assert second.get_config()["update"] == "select"


class _nothing:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def test_a_restored_scale_survives_another_update_mode():
    first = tfscale.wrap("sgd", initial_scale=8.0)
    first.dynamic_scale.assign(32.0)
    assert float(tfscale.wrap(first, update="select").loss_scale) == 32.0


def test_another_update_mode_keeps_assumes_scaled():
    # Keras' meaning: what is given to `apply` is scaled, whoever scaled it.
    first = tfscale.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=8.0)
    second = tfscale.wrap(first, update="select")
    variable = keras.Variable([1.0])
    second.apply([tf.constant([8.0])], [variable])
    np.testing.assert_array_equal(variable.numpy(), [0.0])


def test_a_wrapped_optimizer_cannot_be_wrapped_by_hand():
    for inner in (
        tfscale.wrap("sgd"),
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
    ):
        with pytest.raises(TypeError, match=r"scaled twice.*tfscale\.wrap"):
            tfscale.LossScaleOptimizer(inner)


@pytest.mark.parametrize("policy", ["mixed_float16", "float32", "mixed_bfloat16"])
def test_compile_leaves_the_optimizer_alone(policy):
    keras.config.set_dtype_policy(policy)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = tfscale.wrap("sgd")
    model.compile(optimizer=optimizer, loss="mse")
    assert model.optimizer is optimizer


# Nonsense.

NO_OPTIMIZER = [
    object(),
    None,
    3,
    True,
    ["adam"],
    b"adam",
    lambda: 1,
    keras.optimizers.Adam,
    tfscale.LossScaleOptimizer,
    keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.9),
    "nonsense",
    "",
    {},
    {"config": {}},
    {"class_name": 3, "config": {}},
    {"class_name": "Dense", "config": {}},
]


@pytest.mark.parametrize("nonsense", NO_OPTIMIZER, ids=steady_name)
def test_what_is_no_optimizer_is_refused(nonsense):
    with pytest.raises((TypeError, ValueError)) as caught:
        tfscale.wrap(nonsense)
    text = str(caught.value)
    assert "optimizer" in text
    assert "name" in text
    assert "config" in text
    assert f"Received: {nonsense!r}" in text


def test_a_class_is_refused_with_the_remedy():
    with pytest.raises(TypeError, match=re.escape("tfscale.wrap(Adam(...))")):
        tfscale.wrap(keras.optimizers.Adam)


def test_what_an_optimizer_itself_refuses_is_passed_on():
    with pytest.raises(ValueError, match="not recognized"):
        tfscale.wrap({"class_name": "Adam", "config": {"foo": 1}})


def test_unknown_class_in_a_config_is_named():
    schedule = {"module": "mine", "class_name": "Warmup", "config": {}, "registered_name": "Warmup"}
    with pytest.raises((TypeError, ValueError), match="Warmup") as caught:
        tfscale.wrap({"class_name": "Adam", "config": {"learning_rate": schedule}})
    assert "`optimizer` must be" not in str(caught.value)


NO_POLICY = [
    True,
    "foo",
    "1024",
    "",
    b"auto",
    1j,
    [],
    (1,),
    object(),
    np.array([1.0, 2.0]),
    tf.constant([1.0]),
    {"name": "foo"},
    keras.optimizers.SGD(),
]


@pytest.mark.parametrize("nonsense", NO_POLICY, ids=steady_name)
def test_what_is_no_policy_is_refused(nonsense):
    with pytest.raises((TypeError, ValueError)) as caught:
        tfscale.wrap("sgd", nonsense)
    text = str(caught.value)
    for allowed in ('"auto"', '"dynamic"', '"none"', "a number", "tfscale.Dynamic()"):
        assert allowed in text
    assert "Received: policy=" in text


SETTINGS = [
    ({"policy": float("nan")}, "scale=nan"),
    ({"policy": float("inf")}, "scale=inf"),
    ({"policy": 1e39}, "scale=1e+39"),
    ({"policy": 0}, "scale=0"),
    ({"policy": -1}, "scale=-1"),
    ({"policy": "static"}, "needs its scale"),
    ({"policy": tfscale.Static}, "must be an instance"),
    ({"policy": tfscale.Dynamic}, "must be an instance"),
    ({"policy": {"name": "static"}}, "needs its scale"),
    ({"policy": {"foo": 1}}, "'foo'"),
    ({"policy": "none", "initial_scale": 2.0}, "'initial_scale'"),
    ({"policy": 2.0, "growth_factor": 3.0}, "'growth_factor'"),
    ({"policy": tfscale.Dynamic(), "initial_scale": 4.0}, "put them into the policy"),
    ({"policy": "auto", "scale": 3}, "'scale'"),
    ({"initial_scale": 0}, "initial_scale=0"),
    ({"initial_scale": True}, "initial_scale=True"),
    ({"initial_scale": None}, "initial_scale=None"),
    ({"initial_scale": 2.0**30}, "max_scale"),
    ({"growth_factor": 1}, "growth_factor=1"),
    ({"growth_factor": "2"}, "growth_factor='2'"),
    ({"backoff_factor": 1.0}, "backoff_factor=1.0"),
    ({"backoff_factor": 0}, "backoff_factor=0"),
    ({"growth_interval": 0}, "growth_interval=0"),
    ({"growth_interval": 2.5}, "growth_interval=2.5"),
    ({"dynamic_growth_steps": 0}, "growth_interval=0"),
    ({"growth_interval": 2, "dynamic_growth_steps": 3}, "twice"),
    ({"hysteresis": 0}, "hysteresis=0"),
    ({"min_scale": 0.0}, "min_scale=0.0"),
    ({"min_scale": 8.0, "max_scale": 2.0}, "min_scale=8.0"),
    ({"foo": 1}, "'foo'"),
    ({"name": "x"}, "'name'"),
    ({"dynamic": False}, "'dynamic'"),
    ({"update": "foo"}, "update='foo'"),
    ({"update": None}, "update=None"),
    ({"update": ["auto"]}, r"update=['auto']"),
    ({"master_weights": "foo"}, "master_weights='foo'"),
    ({"master_weights": 1}, "master_weights=1"),
    ({"master_weights": []}, "master_weights=[]"),
]


@pytest.mark.parametrize(("arguments", "text"), SETTINGS, ids=lambda x: str(x))
def test_settings_out_of_range_are_refused(arguments, text):
    with pytest.raises((TypeError, ValueError), match=re.escape(text)):
        tfscale.wrap("sgd", **arguments)


@pytest.mark.parametrize(("arguments", "text"), SETTINGS[-9:], ids=lambda x: str(x))
def test_loss_scale_optimizers_refuse_settings_too(arguments, text):
    for optimizer in (
        tfscale.wrap("sgd"),
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
    ):
        with pytest.raises((TypeError, ValueError), match=re.escape(text)):
            tfscale.wrap(optimizer, **arguments)


def test_nonsense_leaves_the_optimizer_as_it_was():
    inner = keras.optimizers.SGD(loss_scale_factor=64.0)
    with pytest.raises(ValueError, match="update='foo'"):
        tfscale.LossScaleOptimizer(inner, update="foo")
    assert inner.loss_scale_factor == 64.0


# Another backend.


def test_another_backend_is_refused_with_the_remedy(monkeypatch):
    # Said by hand, because no other backend need be installed here.
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    for name in [name for name in sys.modules if name.partition(".")[0] == "tfscale"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match="tfscale needs Keras on the TensorFlow") as error:
        importlib.import_module("tfscale")
    assert "'jax'" in str(error.value)
    assert "KERAS_BACKEND=tensorflow" in str(error.value)
