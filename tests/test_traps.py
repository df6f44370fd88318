"""What is easily done and would ruin a run in silence."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfscale


def made():
    return tfscale.wrap(keras.optimizers.SGD(1.0), "dynamic"), keras.Variable([0.0])


def scaled_gradients(optimizer, variable, slope):
    with tf.GradientTape() as tape:
        scaled = optimizer.scale_loss(tf.reduce_sum(variable * slope))
    return tape.gradient(scaled, [variable.value])


@pytest.mark.parametrize("graph", [False, True])
def test_gradients_still_scaled_are_not_applied(graph):
    optimizer, variable = made()

    def step():
        grads = scaled_gradients(optimizer, variable, 1.0)
        tf.linalg.global_norm(optimizer.unscale(grads))
        optimizer.apply_gradients(zip(grads, [variable], strict=True))

    with pytest.raises(ValueError, match="unscale"):
        (tf.function(step, autograph=False) if graph else step)()
    assert variable.numpy() == 0


@pytest.mark.parametrize("graph", [False, True])
def test_applied_in_two_parts_is_divided_once(graph):
    optimizer, a = made()
    b = keras.Variable([0.0])
    optimizer.build([a, b])

    def step():
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(tf.reduce_sum(a + b))
        first, second = optimizer.unscale(tape.gradient(scaled, [a.value, b.value]))
        optimizer.apply_gradients([(first, a)])
        optimizer.apply_gradients([(second, b)])

    (tf.function(step, autograph=False) if graph else step)()
    assert (a.numpy(), b.numpy()) == (-1, -1)


@pytest.mark.parametrize("graph", [False, True])
def test_an_overflow_clipped_in_an_earlier_part_skips(graph):
    optimizer, variable = made()
    total = tf.Variable([0.0])

    def part(slope, last):
        (grad,) = optimizer.unscale(scaled_gradients(optimizer, variable, slope))
        total.assign_add(tf.clip_by_value(grad, -5, 5))
        if last:
            optimizer.apply_gradients([(total.read_value(), variable)])

    run = tf.function(part, autograph=False) if graph else part
    optimizer.build([variable])
    run(tf.constant(3e38), False)
    run(tf.constant(1.0), True)
    assert variable.numpy() == 0
    assert int(optimizer.skipped_steps) == 1


@pytest.mark.filterwarnings("ignore::tfscale.LossScaleWarning")
@pytest.mark.parametrize("eager", [False, True])
def test_an_epoch_of_skips_does_not_look_perfect(eager):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    tfscale.compile(model, "sgd", loss="mse", metrics=["mae"], run_eagerly=eager)
    x, y = np.full((4, 3), np.nan, "float32"), np.zeros((4, 1), "float32")
    history = model.fit(x, y, batch_size=2, verbose=0).history
    assert np.isnan(history["loss"]).all()
    assert np.isnan(history["mae"]).all()
    assert history["skipped_steps"] == [2]


def test_all_steps_skipped_is_not_called_normal():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(tfscale.wrap("sgd", 2.0**100), loss="mse", run_eagerly=True)
    x = np.full((4, 3), 1e15, "float32")
    with pytest.warns(tfscale.LossScaleWarning, match="2 of 2 .* No step was applied"):
        model.fit(x, np.zeros((4, 1), "float32"), batch_size=2, verbose=0)


def test_a_bad_batch_does_not_stay_in_a_stateful_layer():
    model = keras.Sequential(
        [
            keras.Input(batch_shape=(2, 3, 2)),
            keras.layers.SimpleRNN(1, stateful=True, unroll=True),
        ]
    )
    tfscale.compile(model, "sgd", loss="mse", jit_compile=False)
    x, y = np.ones((2, 3, 2), "float32"), np.ones((2, 1), "float32")
    for batch in (x, x * np.nan, x, x):
        logs = model.train_on_batch(batch, y, return_dict=True)
    assert logs["skipped_steps"] == 1


def test_wrapping_again_keeps_what_was_asked_for():
    optimizer = tfscale.wrap("sgd", master_weights=False, update="select")
    config = tfscale.wrap(optimizer, "dynamic").get_config()
    assert (config["master_weights"], config["update"]) == (False, "select")
