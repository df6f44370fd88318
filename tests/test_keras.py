"""A tfscale optimizer lives with Keras as a plain one does, and as Keras' own wrapper does."""

import copy
import logging
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import FIT_MODES, assert_same, multi, slow_compiled, slow_select, values

import tfscale

L = keras.layers
START = [1.0, 2.0, 3.0, 4.0]
GRADIENT = [1.0, 6.0, 7.0, 2.0]
AFTER = [0.5, -1.0, -0.5, 3.0]  # one step of SGD(0.5)
INF = [float("inf")] * 4


def data(n=16):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 4)).astype("float32")
    return x, x[:, :1] * 2 - 1


def small(deep=False, **compile_args):
    keras.utils.set_random_seed(0)
    hidden = [L.Dense(3, "tanh")] if deep else []
    model = keras.Sequential([keras.Input((4,)), *hidden, L.Dense(1)])
    # What has nothing to do with graphs is faster without one.
    model.compile(loss="mse", **{**FIT_MODES["eager"], **compile_args})
    return model


def fit(model, epochs=1, **arguments):
    x, y = data()
    arguments = {"batch_size": 4, "shuffle": False, "verbose": 0, **arguments}
    return model.fit(x, y, epochs=epochs, **arguments)


def wrapped(inner, **settings):
    """Wrapped so that nothing overflows and nothing but the wrapper differs."""
    return tfscale.wrap(inner, "dynamic", initial_scale=8.0, growth_interval=3, **settings)


# What Keras promises of its LossScaleOptimizer.


def test_config_round_trip():
    inner = keras.optimizers.SGD(0.5, momentum=0.06, nesterov=True, weight_decay=0.004)
    optimizer = tfscale.LossScaleOptimizer(inner)
    config = optimizer.get_config()
    twin = tfscale.LossScaleOptimizer.from_config(config)
    assert twin.get_config() == config
    assert twin.inner_optimizer.get_config() == inner.get_config()


def test_config_has_four_keys_at_default_settings():
    optimizer = tfscale.LossScaleOptimizer(
        keras.optimizers.SGD(0.5), initial_scale=3.0, dynamic_growth_steps=2, name="mine"
    )
    config = optimizer.get_config()
    assert set(config) == {"name", "inner_optimizer", "initial_scale", "dynamic_growth_steps"}
    assert config["name"] == "mine"
    assert config["initial_scale"] == 3.0
    assert config["dynamic_growth_steps"] == 2


def test_from_config_leaves_its_argument_alone():
    config = tfscale.wrap(keras.optimizers.SGD(0.5), 4.0).get_config()
    before = copy.deepcopy(config)
    tfscale.LossScaleOptimizer.from_config(config)
    assert config == before


@pytest.mark.parametrize("pass_variables", [True, False])
def test_finite_step(pass_variables):
    optimizer = tfscale.LossScaleOptimizer(keras.optimizers.SGD(0.5))
    variable = keras.Variable(START)
    gradient = tf.constant(GRADIENT) * optimizer.initial_scale
    if pass_variables:
        optimizer.apply([gradient], [variable])
    else:
        optimizer.build([variable])
        optimizer.apply([gradient])
    np.testing.assert_allclose(variable.numpy(), AFTER)


def test_inner_loss_scale_factor_does_not_interfere():
    optimizer = tfscale.LossScaleOptimizer(keras.optimizers.SGD(0.5, loss_scale_factor=100.0))
    variable = keras.Variable(START)
    optimizer.apply([tf.constant(GRADIENT) * optimizer.initial_scale], [variable])
    np.testing.assert_allclose(variable.numpy(), AFTER)


def test_infinite_step_changes_nothing():
    optimizer = tfscale.LossScaleOptimizer(keras.optimizers.SGD(0.5))
    variable = keras.Variable(START)
    optimizer.apply([tf.constant(INF)], [variable])
    np.testing.assert_array_equal(variable.numpy(), START)
    assert int(optimizer.iterations.numpy()) == 0


def test_an_overwriting_gradient_is_not_unscaled():
    optimizer = tfscale.LossScaleOptimizer(keras.optimizers.SGD(0.5))
    variable, other = keras.Variable(START), keras.Variable(START)
    variable.overwrite_with_gradient, other.overwrite_with_gradient = True, False
    scaled = tf.constant(GRADIENT) * optimizer.initial_scale
    optimizer.apply([tf.constant(GRADIENT), scaled], [variable, other])
    np.testing.assert_array_equal(variable.numpy(), GRADIENT)
    np.testing.assert_allclose(other.numpy(), AFTER)


def test_downscaling():
    optimizer = tfscale.LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=400.0)
    variable = keras.Variable(START)
    for _ in range(4):
        optimizer.apply([tf.constant(INF)], [variable])
    assert float(optimizer.scale_loss(1.0)) == 25.0


def test_upscaling():
    optimizer = tfscale.LossScaleOptimizer(
        keras.optimizers.SGD(0.5), initial_scale=2.0, dynamic_growth_steps=2
    )
    variable = keras.Variable(START)
    for _ in range(8):
        optimizer.apply([tf.constant(GRADIENT)], [variable])
    assert float(optimizer.scale_loss(1.0)) == 32.0


def test_iterations_count_applied_steps():
    optimizer = tfscale.LossScaleOptimizer(keras.optimizers.SGD(0.5))
    variable = keras.Variable(START)
    optimizer.build([variable])
    for step in range(3):
        assert int(optimizer.iterations.numpy()) == step
        optimizer.apply([tf.constant(GRADIENT)], [variable])


def test_dynamic_is_the_only_meaning_of_dynamic():
    tfscale.LossScaleOptimizer(keras.optimizers.SGD(0.5), dynamic=True)
    with pytest.raises(ValueError, match="dynamic=False"):
        tfscale.LossScaleOptimizer(keras.optimizers.SGD(0.5), dynamic=False)


def test_unknown_arguments_are_named():
    with pytest.raises(ValueError, match="`foo`, `bar`"):
        tfscale.LossScaleOptimizer(keras.optimizers.SGD(0.5), foo=True, bar=3)


BASE_ARGUMENTS = {
    "weight_decay": (None, 0.5),
    "clipnorm": (None, 0.5),
    "global_clipnorm": (None, 0.5),
    "clipvalue": (None, 0.5),
    "use_ema": (False, True),
    "ema_momentum": (0.99, 0.5),
    "ema_overwrite_frequency": (None, 2),
    "loss_scale_factor": (None, 0.5),
    "gradient_accumulation_steps": (None, 2),
}


@pytest.mark.parametrize("name", BASE_ARGUMENTS)
def test_arguments_of_the_inner_optimizer_go_there(name):
    with pytest.raises(ValueError, match="on the `inner_optimizer`"):
        tfscale.LossScaleOptimizer(keras.optimizers.SGD(0.5), **{name: BASE_ARGUMENTS[name][1]})


def test_old_configs_with_unused_arguments_are_read():
    unused = {name: default for name, (default, _) in BASE_ARGUMENTS.items()}
    config = {
        "name": "loss_scale_optimizer",
        **unused,
        "inner_optimizer": {
            "module": "keras.optimizers",
            "class_name": "SGD",
            "config": {"name": "SGD", "learning_rate": 0.5, **unused, "momentum": 0.0},
            "registered_name": None,
        },
        "initial_scale": 2.0,
        "dynamic_growth_steps": 2,
    }
    optimizer = tfscale.LossScaleOptimizer.from_config(config)
    assert float(optimizer.loss_scale) == 2.0
    assert float(optimizer.learning_rate.numpy()) == 0.5


def test_check_finite_looks_at_embedding_gradients():
    slices = tf.IndexedSlices(tf.constant([[float("inf")], [1.0]]), tf.constant([0, 0]))
    optimizer = tfscale.LossScaleOptimizer(keras.optimizers.SGD())
    assert not optimizer.check_finite([None, slices])
    assert optimizer.check_finite([None, tf.constant(1.0)])


# Attributes.

INNER_ATTRIBUTES = [
    (keras.optimizers.AdamW, "weight_decay", 0.25),
    (keras.optimizers.SGD, "clipnorm", 0.5),
    (keras.optimizers.SGD, "global_clipnorm", 0.5),
    (keras.optimizers.SGD, "clipvalue", 0.5),
    (keras.optimizers.Adam, "beta_1", 0.5),
    (keras.optimizers.Adam, "epsilon", 0.5),
    (keras.optimizers.Adam, "amsgrad", True),
    (keras.optimizers.SGD, "momentum", 0.5),
    (keras.optimizers.SGD, "use_ema", True),
    (keras.optimizers.SGD, "ema_momentum", 0.5),
    (keras.optimizers.SGD, "ema_overwrite_frequency", 3),
    (keras.optimizers.SGD, "gradient_accumulation_steps", 3),
]


@pytest.mark.parametrize(("kind", "name", "value"), INNER_ATTRIBUTES)
def test_an_attribute_passes_through_the_wrapper(kind, name, value):
    inner = kind()
    optimizer = tfscale.wrap(inner)
    assert getattr(optimizer, name) == getattr(inner, name)
    setattr(optimizer, name, value)
    assert getattr(inner, name) == value
    assert getattr(optimizer, name) == value


class Custom(keras.optimizers.SGD):
    """An optimizer of a user's own, with names that a wrapper could take for its own."""

    def __init__(self, learning_rate=0.5, temperature=1.0, **kwargs):
        super().__init__(learning_rate, **kwargs)
        self.temperature = temperature
        self.step_counter = 7
        self.dynamic_scale = 3.0

    @property
    def twice(self):
        return 2 * self.temperature

    def warm(self):
        return "warm"

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient * self.temperature, variable, learning_rate)


def test_custom_attributes_pass_through_the_wrapper():
    inner = Custom()
    optimizer = tfscale.wrap(inner, "none")
    optimizer.temperature = 4.0
    assert inner.temperature == 4.0
    assert optimizer.twice == 8.0
    assert optimizer.warm() == "warm"
    variable = keras.Variable(START)
    optimizer.scale_loss(0.0)
    optimizer.apply([tf.constant(GRADIENT)], [variable])
    np.testing.assert_allclose(variable.numpy(), np.array(START) - 2 * np.array(GRADIENT))


def test_wrapper_names_do_not_write_into_a_custom_one():
    inner = Custom()
    optimizer = tfscale.wrap(inner, 8.0)
    assert inner.step_counter == 7
    assert inner.dynamic_scale == 3.0
    assert float(optimizer.dynamic_scale.numpy()) == 8.0
    assert len(optimizer.variables) - len(inner.variables) == len(
        tfscale.wrap("sgd").variables
    ) - len(keras.optimizers.SGD().variables)


def test_an_unknown_attribute_is_named_in_the_error():
    optimizer = tfscale.wrap("sgd")
    with pytest.raises(AttributeError, match="no attribute 'no_such_thing'"):
        _ = optimizer.no_such_thing
    with pytest.raises(AttributeError, match="no attribute '_no_such_thing'"):
        _ = optimizer._no_such_thing
    with pytest.raises(AttributeError, match=r"For GradScaler.* optimizer\.loss_scale"):
        _ = optimizer.get_scale
    assert not hasattr(optimizer, "momentums")  # before build
    optimizer.build([keras.Variable(START)])


def test_no_loss_scale_factor_is_set_behind_the_policy():
    optimizer = tfscale.wrap("sgd")
    assert optimizer.loss_scale_factor is None
    with pytest.raises(ValueError, match=r"tfscale\.wrap\(optimizer, 8\.0\)"):
        optimizer.loss_scale_factor = 8.0


@pytest.mark.parametrize("name", ["clipnorm", "global_clipnorm", "clipvalue"])
def test_clipping_set_later_clips_unscaled_gradients(name):
    plain = keras.optimizers.SGD(0.5, **{name: 0.5})
    optimizer = tfscale.wrap(keras.optimizers.SGD(0.5), 1024.0)
    setattr(optimizer, name, 0.5)
    mine, others = keras.Variable(START), keras.Variable(START)
    plain.apply([tf.constant(GRADIENT)], [others])
    optimizer.scale_loss(0.0)
    optimizer.apply([tf.constant(GRADIENT) * 1024.0], [mine])
    np.testing.assert_array_equal(mine.numpy(), others.numpy())


def test_exclude_from_weight_decay_reaches_the_inner():
    optimizer = tfscale.wrap(keras.optimizers.SGD(0.5, weight_decay=0.1))
    kernel, bias = keras.Variable(START, name="kernel"), keras.Variable(START, name="bias")
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    optimizer.build([kernel, bias])
    optimizer.scale_loss(0.0)
    optimizer.apply([tf.zeros(4), tf.zeros(4)], [kernel, bias])
    np.testing.assert_array_equal(bias.numpy(), START)
    assert np.all(kernel.numpy() < START)


def test_initial_scale_and_growth_steps_can_be_set():
    optimizer = tfscale.LossScaleOptimizer(keras.optimizers.SGD(0.5))
    optimizer.initial_scale = 4.0
    optimizer.dynamic_growth_steps = 1
    variable = keras.Variable(START)
    assert float(optimizer.scale_loss(1.0)) == 4.0
    optimizer.apply([tf.constant(GRADIENT) * 4.0], [variable])
    np.testing.assert_allclose(variable.numpy(), AFTER)
    assert float(optimizer.loss_scale) == 8.0


def test_a_policy_refuses_what_it_does_not_have():
    optimizer = tfscale.wrap("sgd", 4.0)
    with pytest.raises(ValueError, match="Wrap the optimizer with another"):
        optimizer.dynamic_growth_steps = 3


# Learning rates.


def test_learning_rate_is_that_of_the_inner_optimizer():
    optimizer = tfscale.wrap(keras.optimizers.SGD(0.5))
    assert float(optimizer.learning_rate.numpy()) == 0.5
    optimizer.learning_rate = 0.25
    assert float(optimizer.inner_optimizer.learning_rate.numpy()) == 0.25
    optimizer.learning_rate.assign(0.125)
    assert float(optimizer.inner_optimizer.learning_rate.numpy()) == 0.125


@pytest.mark.slow
def test_callbacks_that_set_the_learning_rate():
    rates = []

    def schedule(epoch, rate):
        rates.append(rate)
        return rate / 2

    model = small(optimizer=wrapped(keras.optimizers.SGD(0.5)))
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=1e9)
    history = fit(model, 4, callbacks=[keras.callbacks.LearningRateScheduler(schedule), plateau])
    assert rates[:2] == [0.5, 0.25]
    assert float(model.optimizer.learning_rate.numpy()) < 0.5 / 16
    assert history.history["learning_rate"][0] == 0.25


def test_a_schedule_counts_applied_steps_only():
    schedule = keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.5)
    optimizer = tfscale.wrap(keras.optimizers.SGD(schedule), 4.0)
    variable = keras.Variable(START)
    for gradient in (GRADIENT, INF, INF, GRADIENT):
        optimizer.scale_loss(0.0)
        optimizer.apply([tf.constant(gradient)], [variable])
    assert float(optimizer.learning_rate) == 0.25
    with pytest.raises(TypeError, match="not settable"):
        optimizer.learning_rate = 0.5


# Variables and gradients.


def test_apply_gradients_returns_the_live_counter():
    optimizer = tfscale.wrap(keras.optimizers.SGD(0.5))
    variable = keras.Variable(START)
    optimizer.scale_loss(0.0)
    count = optimizer.apply_gradients([(tf.constant(GRADIENT), variable)])
    assert int(count.numpy()) == 1
    optimizer.scale_loss(0.0)
    optimizer.apply_gradients([(tf.constant(INF), variable)])
    assert int(count.numpy()) == 1
    optimizer.apply_gradients([(tf.constant(GRADIENT), variable)])
    assert int(count.numpy()) == 2


@pytest.mark.parametrize("update", ["cond", slow_select, slow_compiled])
def test_apply_gradients_counts_this_step_in_a_graph(update):
    optimizer = tfscale.wrap(keras.optimizers.SGD(0.5), 4.0, update=update)
    variable = keras.Variable(START)

    @tf.function(autograph=False)
    def step(gradient):
        optimizer.scale_loss(0.0)
        count = optimizer.apply_gradients([(gradient, variable)])
        return tf.convert_to_tensor(count) + 0

    counts = [int(step(tf.constant(g))) for g in (GRADIENT, INF, GRADIENT)]
    assert counts == [1, 1, 2]


def test_building_twice_changes_nothing():
    optimizer = wrapped(keras.optimizers.Adam(0.1))
    variable = keras.Variable(START)
    optimizer.build([variable])
    optimizer.scale_loss(0.0)
    optimizer.apply([tf.constant(GRADIENT)], [variable])
    before = optimizer.variables
    numbers = values(before)
    optimizer.build([variable])
    assert [id(v) for v in optimizer.variables] == [id(v) for v in before]
    assert_same(values(optimizer.variables), numbers)


def test_the_model_is_no_variable_of_the_optimizer():
    optimizer = wrapped(keras.optimizers.Adam(0.1))
    variable = keras.Variable(START)
    optimizer.build([variable])
    assert not any(v is variable for v in optimizer.variables)
    names = [v.name for v in optimizer.variables[:4]]
    assert names == ["iteration", "learning_rate", "step_counter", "dynamic_scale"]


def test_no_gradient_at_all_is_keras_own_error():
    for build in (True, False):
        optimizer = tfscale.wrap("sgd")
        variable = keras.Variable(START)
        if build:
            optimizer.build([variable])
        with pytest.raises(ValueError, match="No gradients provided for any variable"):
            optimizer.apply_gradients([(None, variable)])


@pytest.mark.parametrize("in_graph", [True, False])
def test_a_missing_gradient_warns_once_as_in_keras(in_graph):
    optimizer = tfscale.wrap(keras.optimizers.SGD(0.5), 4.0)
    used, unused = keras.Variable(START, name="used"), keras.Variable(START, name="unused")

    def step():
        optimizer.scale_loss(0.0)
        optimizer.apply([tf.constant(GRADIENT) * 4.0, None], [used, unused])

    optimizer.build([used, unused])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (tf.function(step) if in_graph else step)()
    texts = [str(w.message) for w in caught if "Gradients do not exist" in str(w.message)]
    assert len(texts) == 1
    assert "unused" in texts[0]
    np.testing.assert_allclose(used.numpy(), AFTER)
    np.testing.assert_array_equal(unused.numpy(), START)


def test_an_empty_list_is_no_step():
    optimizer = tfscale.wrap("sgd")
    optimizer.apply([])
    optimizer.apply([], [])
    assert not optimizer.built
    assert int(optimizer.skipped_steps) == 0


def test_an_unknown_variable_is_keras_own_error():
    optimizer = tfscale.wrap("sgd", 4.0)
    optimizer.build([keras.Variable(START)])
    optimizer.scale_loss(0.0)
    with pytest.raises(ValueError, match="Unknown variable"):
        optimizer.apply_gradients([(tf.constant(GRADIENT), keras.Variable(START))])


def test_gradients_and_variables_must_match():
    optimizer = tfscale.wrap("sgd")
    gradient, variable = tf.constant(GRADIENT), keras.Variable(START)
    with pytest.raises(ValueError, match=r"needs a built optimizer"):
        optimizer.apply([gradient])
    with pytest.raises(ValueError, match="2 gradients and 1 variables"):
        optimizer.apply([gradient, gradient], [variable])
    assert not optimizer.built
    optimizer.build([variable])
    with pytest.raises(ValueError, match="2 gradients and 1 variables"):
        optimizer.apply([gradient, gradient])


def test_a_subset_of_variables_is_updated_as_in_keras():
    plain, mine = (
        keras.optimizers.SGD(0.5, momentum=0.9),
        wrapped(keras.optimizers.SGD(0.5, momentum=0.9)),
    )
    results = []
    for optimizer in (plain, mine):
        variables = [keras.Variable(START), keras.Variable(START)]
        optimizer.build(variables)
        for _ in range(2):
            scale = optimizer.scale_loss(tf.constant(1.0))
            optimizer.apply([tf.constant(GRADIENT) * scale], variables[1:])
        results.append(values(variables))
    assert_same(*results)


def test_constraints_are_kept():
    variable = keras.Variable(START)
    variable.constraint = keras.constraints.NonNeg()
    optimizer = tfscale.wrap(keras.optimizers.SGD(0.5), 4.0)
    optimizer.scale_loss(0.0)
    optimizer.apply([tf.constant(GRADIENT) * 4.0], [variable])
    np.testing.assert_allclose(variable.numpy(), np.maximum(AFTER, 0.0))


def test_tf_variables_are_trained_as_well():
    optimizer = tfscale.wrap(keras.optimizers.SGD(0.5), 4.0)
    variable = tf.Variable(START)
    optimizer.scale_loss(0.0)
    optimizer.apply_gradients([(tf.constant(GRADIENT) * 4.0, variable)])
    np.testing.assert_allclose(variable.numpy(), AFTER)


# Serialization.


def test_keras_get_serialize_and_deserialize():
    optimizer = tfscale.wrap(keras.optimizers.Adam(0.1), tfscale.Dynamic(64.0, hysteresis=2))
    assert keras.optimizers.get(optimizer) is optimizer
    config = keras.optimizers.serialize(optimizer)
    for twin in (
        keras.optimizers.get(copy.deepcopy(config)),
        keras.optimizers.deserialize(copy.deepcopy(config)),
        keras.saving.deserialize_keras_object(config),
    ):
        assert type(twin) is tfscale.LossScaleOptimizer
        assert twin.policy == optimizer.policy
        assert twin.get_config() == optimizer.get_config()
        assert float(twin.loss_scale) == 64.0


@pytest.mark.parametrize(
    "arguments",
    [
        {"policy": "auto"},
        {"policy": "dynamic"},
        {"policy": "none"},
        {"policy": tfscale.NoScaling(False)},
        {"policy": 8.0},
        {"policy": tfscale.Static(8.0, skip_nonfinite=False)},
        {"policy": tfscale.Dynamic(8.0, 4.0, 0.25, 7, 2.0, 16.0, 3)},
        {"policy": tfscale.Auto(8.0)},
        {"update": "select"},
        {"master_weights": False},
    ],
    ids=str,
)
def test_every_setting_survives_a_round_trip(arguments):
    optimizer = tfscale.wrap(keras.optimizers.Adam(0.1), **arguments)
    config = optimizer.get_config()
    twin = tfscale.LossScaleOptimizer.from_config(config)
    assert twin.policy == optimizer.policy
    assert twin.get_config() == config


def test_custom_objects_find_a_custom_inner_optimizer():
    config = tfscale.wrap(Custom(), 4.0).get_config()
    config["inner_optimizer"]["module"] = "elsewhere"
    twin = tfscale.LossScaleOptimizer.from_config(config, custom_objects={"Custom": Custom})
    assert type(twin.inner_optimizer) is Custom


@pytest.mark.slow
def test_a_cloned_model_trains_with_a_cloned_optimizer():
    model = small(optimizer=wrapped(keras.optimizers.Adam(0.1)))
    fit(model)
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    optimizer = model.optimizer
    copied = type(optimizer).from_config(optimizer.get_config())
    clone.compile(optimizer=copied, loss="mse", run_eagerly=True)
    assert clone.optimizer.inner_optimizer is not optimizer.inner_optimizer
    fit(clone)
    assert int(optimizer.iterations.numpy()) == int(clone.optimizer.iterations.numpy()) == 4


# `fit`.

MODES = {**FIT_MODES, "four steps an execution": {**FIT_MODES["graph"], "steps_per_execution": 4}}
INNER = {
    "adam": lambda: keras.optimizers.Adam(0.1),
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.01, clipnorm=0.5),
    "ema": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3),
    "accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
}


@pytest.mark.parametrize(
    ("inner", "mode"),
    [
        ("adam", "eager"),
        *[
            pytest.param(*more, marks=pytest.mark.slow)
            for more in [
                *[(inner, "eager") for inner in INNER if inner != "adam"],
                ("ema", "graph"),
                ("adam", "four steps an execution"),
                ("accumulation", "jit"),
            ]
        ],
    ],
)
def test_fit_equals_keras_wrapper_bit_for_bit(inner, mode):
    results = []
    of_keras = keras.optimizers.LossScaleOptimizer(INNER[inner](), 8.0, dynamic_growth_steps=3)
    for optimizer in (of_keras, wrapped(INNER[inner]())):
        model = small(optimizer=optimizer, **MODES[mode])
        history = fit(model, 2)
        scale = optimizer.dynamic_scale.numpy()
        inner_state = values(optimizer.inner_optimizer.variables)
        results.append([*values(model.variables), *inner_state, scale, history.history["loss"]])
    assert_same(*results)
    assert results[0][-2] == 32.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("update", "mode"), [("select", "graph"), ("compiled", "graph"), ("cond", "jit")]
)
def test_fit_takes_the_same_steps_in_every_update_mode(update, mode):
    results = []
    plain, mine = keras.optimizers.Adam(0.1), wrapped(keras.optimizers.Adam(0.1), update=update)
    for optimizer, how in ((plain, "eager"), (mine, mode)):
        model = small(optimizer=optimizer, **MODES[how])
        fit(model, 2)
        results.append(values(model.variables))
    for mine, plain in zip(*results, strict=True):
        np.testing.assert_allclose(mine, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_two_fits_are_as_good_as_one():
    results = []
    for epochs in ([3], [1, 2]):
        model = small(optimizer=wrapped(keras.optimizers.Adam(0.1)))
        for n in epochs:
            fit(model, n)
        results.append(values(model.variables + model.optimizer.variables))
    assert_same(*results)


@pytest.mark.slow
def test_average_replaces_the_weights_when_fit_ends():
    results = []
    make = lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)  # noqa: E731
    for optimizer in (make(), wrapped(make())):
        model = small(optimizer=optimizer)
        fit(model)
        results.append(values(model.variables))
    assert_same(*results)


@pytest.mark.slow
def test_keras_callback_that_swaps_averages_in():
    model = small(optimizer=wrapped(keras.optimizers.SGD(0.1, use_ema=True)))
    fit(model, 2, callbacks=[keras.callbacks.SwapEMAWeights(swap_on_epoch=True)])


@pytest.mark.slow
def test_several_optimizers_in_one():
    results = []
    for optimizer in (multi(), wrapped(multi())):
        model = small(optimizer=optimizer)
        fit(model, 2)
        results.append(values(model.variables))
    for mine, plain in zip(*results, strict=True):
        np.testing.assert_allclose(mine, plain, rtol=1e-5, atol=1e-6)
    assert float(optimizer.loss_scale) == 32.0


def test_several_optimizers_have_no_learning_rate():
    optimizer = wrapped(multi())
    with pytest.raises(AttributeError, match="sub-optimizers"):
        _ = optimizer.learning_rate
    assert len(optimizer.optimizers) == 2


@pytest.mark.slow
def test_freezing_by_a_second_compile_trains_as_plain():
    results = []
    for optimizer in (keras.optimizers.Adam(0.1), wrapped(keras.optimizers.Adam(0.1))):
        model = small(deep=True, optimizer=optimizer)
        fit(model)
        model.layers[0].trainable = False
        frozen = values(model.layers[0].variables)
        model.compile(optimizer=optimizer, loss="mse", run_eagerly=True)
        fit(model)
        assert_same(values(model.layers[0].variables), frozen)
        results.append(values(model.variables))
    assert_same(*results)


@pytest.mark.slow
def test_layers_thawed_by_a_second_compile_raise():
    for optimizer in (keras.optimizers.Adam(0.1), wrapped(keras.optimizers.Adam(0.1))):
        model = small(deep=True, optimizer=optimizer)
        model.layers[0].trainable = False
        model.compile(optimizer=optimizer, loss="mse", run_eagerly=True)
        fit(model)
        model.layers[0].trainable = True
        model.compile(optimizer=optimizer, loss="mse", run_eagerly=True)
        with pytest.raises(ValueError, match="Unknown variable"):
            fit(model)


def test_a_model_without_weights_is_keras_own_warning():
    model = small(optimizer=wrapped(keras.optimizers.Adam(0.1)))
    model.trainable = False
    model.compile(optimizer=model.optimizer, loss="mse")
    with pytest.warns(UserWarning, match="does not have any trainable weights"):
        fit(model)


@pytest.mark.slow
def test_class_and_sample_weights_and_validation():
    x, y = data()
    model = small(optimizer=wrapped(keras.optimizers.Adam(0.1)), metrics=["mae"])
    history = fit(model, sample_weight=np.ones(16), validation_data=(x, y))
    assert {"loss", "val_loss", "mae", "val_mae"} <= set(history.history)
    logs = model.train_on_batch(x, y, return_dict=True)
    assert logs["loss"] < 100


# What `fit` says when it ends.


def linear(policy, **settings):
    """A model whose gradient is the target times the scale, and which never moves."""
    model = keras.Sequential([keras.Input((4,)), L.Dense(1, kernel_initializer="zeros")])
    optimizer = tfscale.wrap(keras.optimizers.SGD(0.0), policy, **settings)
    loss = lambda y, p: tf.reduce_mean(y * p)  # noqa: E731
    model.compile(optimizer=optimizer, loss=loss, run_eagerly=True)
    return model


def batches(*targets):
    """A batch of four for each number, which is the target of all its samples."""
    y = np.repeat(np.array(targets, "float32"), 4)[:, None]
    return np.ones((len(y), 4), "float32"), y


def fit_messages(model, *targets, epochs=1):
    """The warnings, and the lines of the log in parentheses."""
    data = tf.data.Dataset.from_tensor_slices(batches(*targets)).batch(4)
    logged, logger = [], logging.getLogger("tfscale")
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(f"({record.getMessage()})")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(data, verbose=0, epochs=epochs)
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    assert not [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]
    return [str(w.message) for w in caught if w.category is tfscale.LossScaleWarning] + logged


BAD = 1e36  # overflows float32 as long as the scale is above 340


def test_fit_warns_once_of_skips_with_their_number():
    model = linear("dynamic", initial_scale=2.0**15)
    shown = fit_messages(model, 1.0, BAD, 1.0, 1.0, epochs=2)
    assert len(shown) == 1
    assert shown[0].startswith("(2 of 8 training steps were skipped")
    assert "loss scale 8192" in shown[0]
    assert "need not do anything" in shown[0]


def test_no_warning_without_a_skip():
    assert fit_messages(linear("dynamic"), 1.0, 1.0) == []


@pytest.mark.slow
def test_old_skips_do_not_warn_again():
    model = linear("dynamic")
    assert len(fit_messages(model, 1.0, BAD)) == 1
    assert fit_messages(model, 1.0, 1.0) == []
    shown = fit_messages(model, 1.0, BAD, 1.0)
    assert len(shown) == 1
    assert shown[0].startswith("(1 of 3 training steps was skipped")


def test_many_skips_come_with_what_to_do():
    model = linear(2.0**15)
    shown = fit_messages(model, BAD, BAD, BAD, epochs=3)
    assert len(shown) == 1
    assert shown[0].startswith("3 of 3")  # after the first epoch, and not again
    assert "take a smaller scale" in shown[0]
    assert "the loss itself may be too large" in shown[0]


def test_a_short_fit_within_the_search_is_normal():
    model = linear("dynamic")
    fits = [*[[BAD]] * 6, [1.0] * 9]
    said = [line for targets in fits for line in fit_messages(model, *targets)]
    assert len(said) == 6
    assert all(s.startswith("(1 of 1 training steps was skipped; ") for s in said)
    assert all(s.endswith("is being found. You need not do anything.)") for s in said)
    assert "Normal" in str(model.optimizer.record())


@pytest.mark.parametrize(
    ("steps_before", "quiet"), [(0, 20), pytest.param(500, 24, marks=pytest.mark.slow)]
)
def test_short_fits_that_apply_nothing_warn(steps_before, quiet):
    model = linear("dynamic", initial_scale=2.0**24, backoff_factor=0.9)
    if steps_before:
        model.run_eagerly, model.jit_compile = False, False  # many steps are worth a trace
        fit_messages(model, *[0.0] * steps_before)
    short = [5, 5, 5, *[1] * (quiet - 15)]  # as many steps as are quiet
    said = [line for steps in [*short, 1] for line in fit_messages(model, *[BAD] * steps)]
    assert [line.startswith("(") for line in said] == [True] * len(short) + [False]
    assert said[-1].startswith("1 of 1 training steps was skipped; loss scale ")


def test_a_fit_longer_than_the_search_warns():
    (said,) = fit_messages(linear("dynamic", initial_scale=2.0**24), *[BAD] * 6)
    assert said.startswith("6 of 6 training steps were skipped")
    assert "No step was applied" in said


def test_a_second_fit_may_name_the_learning_rate():
    model = linear(2.0**15)
    assert fit_messages(model, 1.0) == []
    (shown,) = fit_messages(model, BAD, BAD, BAD)
    assert "3 of 3" in shown
    assert "lower the learning rate" in shown


def test_a_scale_that_begins_at_its_floor_warns():
    model = linear("dynamic", initial_scale=2.0**10, min_scale=2.0**10)
    (shown,) = fit_messages(model, 1.0, *[BAD] * 7)
    assert "7 of 8" in shown
    assert "floor" in shown


def test_nan_gradients_are_not_put_on_the_range_alone():
    inputs = keras.Input((4,))
    outputs = keras.ops.sqrt(keras.layers.Dense(1, use_bias=False)(inputs))
    model = keras.Model(inputs, outputs)
    model.compile(tfscale.wrap("sgd", "dynamic", initial_scale=4.0), loss="mse", run_eagerly=True)
    with pytest.warns(tfscale.LossScaleWarning) as caught:
        model.fit(np.zeros((16, 4)), np.ones((16, 1)), batch_size=4, verbose=0)
    shown = str(caught[0].message)
    assert "4 of 4" in shown
    assert "look for sqrt, log, norm or a division at 0" in shown
    assert "lower the learning rate" not in shown


def test_a_scale_at_its_floor_warns_with_the_fix():
    model = linear("dynamic", initial_scale=2.0**12, min_scale=2.0**10)
    shown = fit_messages(model, 1.0, BAD, BAD, BAD)
    assert len(shown) == 1
    assert "3 of 4" in shown[0]
    assert "loss scale 1024" in shown[0]
    assert "floor" in shown[0]
    assert "float32" in shown[0]


def test_a_bad_loss_is_distinguished_from_an_overflow():
    model = linear("dynamic", initial_scale=2.0**15)
    shown = fit_messages(model, 1.0, float("nan"), 1.0)
    assert len(shown) == 1
    assert "1 of 3" in shown[0]
    assert "loss that was not finite" in shown[0]
    assert "loss scale 32768" in shown[0]
    # A later fit with another fault speaks of that one alone.
    shown = fit_messages(model, 1.0, BAD, 1.0)
    assert len(shown) == 1
    assert "loss that was not finite" not in shown[0]


def test_skips_without_scaling_warn_too():
    shown = fit_messages(linear("none"), 1.0, float("nan"), 1.0)
    assert len(shown) == 1
    assert "1 of 3" in shown[0]
