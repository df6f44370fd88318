"""A run that is stalled is not silent, and its cause is named."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from runs import BATCH, BOTH, Fault, compiled, data, fit, network, wrapped

import tfscale
from tfscale.callbacks import StallGuard, diagnosis

L = keras.layers


# A run that does not learn is not silent.


def test_nan_data_is_named_as_the_cause():
    x, y = data()
    y[:] = np.nan
    guard = StallGuard(3, "raise", data=(x[:BATCH], y[:BATCH]))
    with pytest.raises(RuntimeError, match="The data is not finite: NaN or infinity in y") as error:
        fit(wrapped(), guard, arrays=(x, y))
    assert "No step was applied for 3 steps in a row; loss scale 1024." in str(error.value)
    assert "y: 4 NaN of 4 values" in str(error.value)


@BOTH
def test_a_forward_overflow_names_the_layer(make):
    big = L.Dense(
        4, name="big", dtype="mixed_float16", kernel_initializer=keras.initializers.Constant(6e4)
    )
    x, y = data()
    guard = StallGuard(3, "raise", data=(100 * x[:BATCH], y[:BATCH]))
    with pytest.raises(RuntimeError, match="forward pass overflows float16 in layer 'big'"):
        fit(make(big), guard, arrays=(100 * x, y))


def test_too_high_a_learning_rate_names_the_weight():
    model = wrapped(optimizer=keras.optimizers.SGD(1e6))
    with pytest.raises(RuntimeError, match=r"The learning rate is too high \(1e\+06\)") as error:
        fit(model, StallGuard(3, "raise"))
    assert re.search("largest weight, in .*(first|head)/(kernel|bias), is", str(error.value))
    assert "Load weights from before" in str(error.value)


@pytest.mark.parametrize("rate", [1e2, 1e3])
def test_a_batch_does_not_hide_too_high_a_learning_rate(rate):
    model = wrapped(optimizer=keras.optimizers.SGD(rate))
    with pytest.raises(RuntimeError, match=r"The learning rate is too high") as error:
        fit(model, StallGuard(3, "raise", data=data(BATCH)))
    assert str(error.value).count("learning rate is too high") == 1
    assert "look for NaN" not in str(error.value)


def test_too_high_a_learning_rate_names_the_layer_too():
    model = wrapped(optimizer=keras.optimizers.SGD(1e6))
    guard = StallGuard(3, "raise", data=data(BATCH))
    with pytest.raises(
        RuntimeError, match=r"learning rate is too high .* shows first in (layer|the)"
    ):
        fit(model, guard)


def test_bad_losses_without_a_batch_name_both_causes():
    with pytest.raises(RuntimeError, match="either the data holds NaN or infinity, or the forward"):
        fit(wrapped(Fault("loss")), StallGuard(3, "raise"))
    with pytest.raises(RuntimeError, match="or a layer divides by zero"):
        fit(wrapped(Fault("loss"), dtype="float32"), StallGuard(3, "raise"))


def test_a_fine_batch_points_to_those_in_training():
    x, y = data()
    x[:] = np.inf
    with pytest.raises(RuntimeError, match="loss of the batches in training is not"):
        fit(wrapped(), StallGuard(3, "raise", data=data(BATCH)), arrays=(x, y))


def test_an_overflow_names_variables_next_to_the_loss():
    policy = tfscale.Dynamic(initial_scale=4.0)
    model = wrapped(L.Dense(4, name="second"), Fault(), policy=policy)
    with pytest.raises(RuntimeError, match="The scale is at its floor") as error:
        fit(model, StallGuard(6, "raise"))
    names = re.search("the gradients of (.*) were not", str(error.value))[1]
    assert "head" not in names
    assert names.index("second/kernel") < names.index("first/bias")


def test_an_overflow_names_the_layer_of_a_batch():
    model = wrapped(policy=tfscale.Dynamic(initial_scale=2.0**24, growth_interval=100))
    with pytest.raises(RuntimeError, match="The gradient overflows in layer 'first'") as error:
        fit(model, StallGuard(3, "raise", data=data(BATCH)))
    assert 'run it in float32 (dtype="float32"), scale down the loss itself' in str(error.value)


def test_what_float32_does_not_fix_is_no_overflow():
    model = wrapped(L.Dense(4, name="second"), Fault(name="fault"))
    with pytest.raises(RuntimeError, match=r"not finite in layer 'fault' .* does not fix") as error:
        fit(model, StallGuard(3, "raise", data=data(BATCH)))
    assert "look for sqrt, log, norm or a division at 0" in str(error.value)
    assert "learning rate" not in str(error.value)


def test_a_gradient_of_float32_is_not_sent_to_float32():
    model = wrapped(Fault(name="fault"), dtype="float32")
    with pytest.raises(RuntimeError, match=r"not finite in layer 'fault' .* at 0, or") as error:
        fit(model, StallGuard(3, "raise", data=data(BATCH)))
    assert "run it in float32" not in str(error.value)


@pytest.mark.parametrize(
    ("policy", "advice"),
    [
        (tfscale.Dynamic(initial_scale=1024.0), "The scale went from 1024 to 128 and may still"),
        (tfscale.Dynamic(initial_scale=4.0), "The scale is at its floor"),
        (tfscale.Dynamic(initial_scale=1.0), "The scale is at its floor"),
        (tfscale.Static(1024.0), r"constant: .* tfscale.wrap\(optimizer, 64\)"),
        (tfscale.NoScaling(), "There is no loss scale to lower"),
    ],
)
def test_remedy_of_an_overflow_depends_on_the_policy(policy, advice):
    with pytest.raises(RuntimeError, match=advice) as error:
        fit(wrapped(Fault(), policy=policy), StallGuard(3, "raise"))
    # NaN has another remedy, and a learning rate that was never used is not the cause.
    assert "look for sqrt, log, norm or a division at 0" in str(error.value)
    assert "the loss itself may be too large" in str(error.value)
    assert "lower the learning rate" not in str(error.value)


def test_learning_rate_is_a_cause_once_one_was_applied():
    with pytest.raises(RuntimeError, match="lower the learning rate"):
        fit(wrapped(Fault(start=1)), StallGuard(3, "raise"))
    policy = tfscale.Dynamic(initial_scale=2.0**24, growth_interval=100)
    guard = StallGuard(3, "raise", data=data(BATCH))
    model = wrapped(policy=policy)
    model.optimizer.scale_loss(1.0)
    model.optimizer.apply_gradients([(tf.zeros_like(v), v) for v in model.trainable_variables])
    with pytest.raises(RuntimeError, match=r"overflows in layer .* lower the learning rate"):
        fit(model, guard)


def test_float32_under_auto_has_no_scale_to_lower():
    # A graph, which shows what `Fault` computes in; eager code does not.
    model = wrapped(Fault(), policy=tfscale.Auto(), dtype="float32", run_eagerly=False)
    with pytest.raises(RuntimeError, match="There is no loss scale to lower"):
        fit(model, StallGuard(3, "raise"))


def test_weights_that_are_not_finite_are_named_first():
    model = wrapped()
    model.get_layer("head").bias.assign([np.nan])
    with pytest.raises(RuntimeError, match=r"Weights are not finite: .*head/bias. No step"):
        fit(model, StallGuard(3, "raise", data=data(BATCH)))


def test_nonfinite_statistics_are_named_with_a_guard():
    x, y = data()
    x[:] = np.nan

    def stall_of(make, **arguments):
        model = make(L.BatchNormalization(name="norm", dtype="float32"))
        with pytest.raises(RuntimeError) as error:
            fit(model, StallGuard(2, "raise", **arguments), arrays=(x, y))
        return str(error.value)

    ruined = stall_of(wrapped)
    assert "the weights are finite" not in ruined
    assert "the trained weights are finite" in ruined
    assert re.search("Not finite either: .*norm/moving_mean, .*norm/moving_variance, ", ruined)
    assert "tfscale.compile(model, optimizer, ...) keeps a skipped step from writing" in ruined
    assert "Not finite either" in stall_of(wrapped, data=(x[:BATCH], y[:BATCH]))
    sound = stall_of(compiled)
    assert "the weights are finite" in sound
    assert "Not finite either" not in sound


def test_a_finite_optimizer_points_to_the_linked_one():
    first, second = tfscale.wrap("sgd", "dynamic"), tfscale.wrap("sgd", "dynamic")
    model = network(dtype="float32")
    model.compile(first, loss="mse")
    linked = tfscale.link(first, second)
    other = tf.Variable(1.0)
    before = first.record()
    one = tf.ones([])
    linked.apply_gradients(
        [(first.scale_loss(tf.zeros_like(v)), v) for v in model.trainable_variables],
        [(second.scale_loss(one) * np.inf, other)],
    )
    text = diagnosis.explain(model, before, first.record())
    assert "linked optimizer" in text


@pytest.mark.slow
def test_overflows_at_the_floor_need_not_be_in_a_row():
    class EveryOther(Fault):
        def call(self, x, training=False):
            bad = self.calls % 2 == 0
            self.calls.assign_add(1)
            factor = tf.where(bad, tf.constant(np.inf, x.dtype), tf.ones([], x.dtype))

            @tf.custom_gradient
            def amplified(x, factor):
                return tf.identity(x), lambda dy: (dy * factor, tf.zeros_like(factor))

            return amplified(x, factor)

    policy = tfscale.Dynamic(initial_scale=4.0)
    model = wrapped(EveryOther(), policy=policy)
    with pytest.warns(tfscale.LossScaleWarning, match="overflows with the loss scale at its floor"):
        fit(model, StallGuard(4), steps=24)
    # Where the scale cannot fall, a skip now and then is none.
    fit(wrapped(EveryOther(), policy=tfscale.Static(4.0)), StallGuard(4), steps=24)


# What is done about it.


def test_warn_continues_and_warns_once_a_stall():
    model = wrapped(Fault("loss", end=6))
    with pytest.warns(tfscale.LossScaleWarning) as caught:
        fit(model, StallGuard(2), steps=5, epochs=2)
    assert len(caught) == 1
    assert model.optimizer.record().steps == 10

    model = wrapped(Fault("loss", end=3), Fault("loss", start=6, end=10))
    with pytest.warns(tfscale.LossScaleWarning) as caught:
        fit(model, StallGuard(2), steps=6, epochs=2)
    assert len(caught) == 2


def test_stop_ends_fit_and_warns():
    model = wrapped(Fault("loss"))
    with pytest.warns(tfscale.LossScaleWarning, match="No step was applied for 3 steps in a row"):
        history = fit(model, StallGuard(3, "stop"), epochs=5)
    assert len(history["loss"]) == 1
    assert model.optimizer.record().steps == 4  # the one that was about to begin


def test_raise_ends_before_the_next_batch():
    model = wrapped(Fault("loss"))
    with pytest.raises(RuntimeError):
        fit(model, StallGuard(3, "raise"))
    assert model.optimizer.record().steps == 3


def test_a_stall_across_epochs_is_one():
    with pytest.raises(RuntimeError, match="for 9 steps in a row"):
        fit(wrapped(Fault("loss")), StallGuard(9, "raise"), steps=2, epochs=6)


def test_skips_that_find_the_scale_are_no_stall():
    fit(wrapped(Fault(start=0, end=5)), StallGuard(6, "raise"), steps=8)


def test_skips_of_an_earlier_fit_are_not_counted():
    model = wrapped(Fault("loss", end=6))
    fit(model, steps=4)
    fit(model, StallGuard(4, "raise"), steps=2, epochs=3)


def test_the_guard_serves_a_second_fit():
    guard = StallGuard(3)
    for _ in range(2):
        with pytest.warns(tfscale.LossScaleWarning) as caught:
            fit(wrapped(Fault("loss")), guard, steps=4)
        assert len(caught) == 1


def test_replicas_in_a_stall_are_not_silent():
    devices = tf.distribute.ReductionToOneDevice()
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], devices)
    x, y = data()
    y[2::BATCH] = np.nan  # one replica only
    with strategy.scope():
        model = wrapped()
    with pytest.raises(RuntimeError, match="NaN or infinity in y"):
        fit(model, StallGuard(2, "raise", data=(x[:BATCH], y[:BATCH])), arrays=(x, y))


# Arguments.


@pytest.mark.parametrize("patience", [0, -1, 2.0, True, None, "3"])
def test_wrong_patience_raises(patience):
    with pytest.raises(ValueError, match=r"`patience` must be .*Received: "):
        StallGuard(patience)


def test_wrong_action_raises():
    with pytest.raises(ValueError, match=r"`action` must be one of .*Received: action='print'"):
        StallGuard(3, "print")
