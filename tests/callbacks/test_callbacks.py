"""What a user is shown of loss scaling while `fit` runs, and that a stalled run is not silent."""

import copy
import logging
import math
import pickle
import re
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfscale
from tfscale import _compat
from tfscale.callbacks import LossScaleMonitor, StallGuard, diagnosis, tensorboard

L = keras.layers
KEYS = ["loss_scale", "skipped_steps"]
BATCH = 4


@keras.saving.register_keras_serializable(package="tests.callbacks")
class Fault(L.Layer):
    """Passes its input on; `kind` goes wrong from the call number `start` to `end` on.

    Kinds: "gradient" (infinite), "loss" (the output is infinite).
    """

    def __init__(self, kind="gradient", start=0, end=10**6, **kwargs):
        super().__init__(**kwargs)
        self.kind, self.start, self.end = kind, start, end

    def build(self, shape):
        # An integer is no state that a skipped step takes back.
        self.calls = self.add_weight(name="calls", dtype="int64", trainable=False)

    def call(self, x, training=False):
        bad = (self.calls >= self.start) & (self.calls < self.end) & bool(training)
        if training:
            self.calls.assign_add(1)
        factor = tf.where(bad, tf.constant(np.inf, x.dtype), tf.ones([], x.dtype))
        if self.kind == "loss":
            return x * factor

        @tf.custom_gradient
        def amplified(x, factor):
            return tf.identity(x), lambda dy: (dy * factor, tf.zeros_like(factor))

        return amplified(x, factor)


def data(n=32, width=3, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, width)).astype("float32"), rng.normal(size=(n, 1)).astype("float32")


def network(*layers, dtype="mixed_float16"):
    return keras.Sequential(
        [
            keras.Input((3,)),
            L.Dense(4, name="first", dtype=dtype),
            *layers,
            L.Dense(1, dtype="float32", name="head"),
        ]
    )


def wrapped(*layers, optimizer="sgd", policy=None, dtype="mixed_float16", **arguments):
    """wrap and plain fit"""
    model = network(*layers, dtype=dtype)
    policy = policy or tfscale.Dynamic(initial_scale=1024.0, growth_interval=100)
    model.compile(tfscale.wrap(optimizer, policy), loss="mse", **arguments)
    return model


def compiled(*layers, **kwargs):
    """tfscale.compile"""
    model = wrapped(*layers, **kwargs)
    return tfscale.compile(model, model.optimizer, loss="mse")


BOTH = pytest.mark.parametrize("make", [wrapped, compiled], ids=["wrap", "compile"])


def fit(model, *callbacks, steps=8, epochs=1, arrays=None, **arguments):
    """The history of `steps` batches an epoch; the advice of the end of `fit` is not looked at."""
    batches = tf.data.Dataset.from_tensor_slices(arrays or data(steps * BATCH)).batch(BATCH)
    # A tuner that is left behind in the middle of an epoch is waited for, a second each.
    options = tf.data.Options()
    options.autotune.enabled = False
    arguments = {"verbose": 0, "shuffle": False, **arguments}
    with mock.patch.object(tfscale.LossScaleOptimizer, "_tell", return_value=None):
        return model.fit(
            batches.with_options(options), epochs=epochs, callbacks=list(callbacks), **arguments
        ).history


class Reads:
    """Counts what is read from the device, and after how many batches."""

    def __init__(self, monkeypatch):
        self.steps = []
        record = tfscale.LossScaleOptimizer.record

        def counted(optimizer):
            found = record(optimizer)
            self.steps.append(found.steps)
            return found

        monkeypatch.setattr(tfscale.LossScaleOptimizer, "record", counted)


@pytest.fixture
def reads(monkeypatch):
    return Reads(monkeypatch)


# What is shown.


@BOTH
def test_history_holds_one_figure_an_epoch(make):
    history = fit(make(Fault(start=2, end=4)), LossScaleMonitor(), epochs=2)
    assert history["loss_scale"] == [256.0, 256.0]
    assert history["skipped_steps"] == [2.0, 2.0]
    assert "underflow_share" not in history


@BOTH
@pytest.mark.parametrize("freq", ["epoch", 3])
def test_progress_bar_shows_them(make, freq, capsys):
    if freq == 3 and _compat.KERAS < (3, 11):
        pytest.skip(f"the progress bar of Keras {keras.version()} ends with means of the epoch")
    model = make(Fault(start=2, end=4))
    fit(model, LossScaleMonitor(freq), verbose=1 if freq == 3 else 2)
    last = capsys.readouterr().out.replace("\b", "").strip().splitlines()[-1]
    assert "loss_scale: 256.0000" in last
    assert "skipped_steps: 2.0000" in last


def test_figures_of_batches_are_shown_from_the_first_one_and_renewed(capsys):
    model = wrapped(Fault(start=2, end=4))
    seen = []
    spy = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(logs.get("loss_scale"))
    )
    fit(model, LossScaleMonitor(2), spy)
    assert seen == [1024, 1024, 1024, 1024, 256, 256, 256, 256]
    seen.clear()
    fit(model, LossScaleMonitor(), spy)
    assert seen == [None] * 8


def test_compiled_models_keep_the_figures_of_each_batch():
    seen = []
    spy = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(logs["loss_scale"])
    )
    fit(compiled(Fault(start=2, end=4)), LossScaleMonitor(2), spy)
    assert seen == [1024, 1024, 512, 256, 256, 256, 256, 256]


def test_callbacks_after_it_see_the_figures(tmp_path):
    path = tmp_path / "log.csv"
    fit(wrapped(), LossScaleMonitor(), keras.callbacks.CSVLogger(str(path)))
    assert path.read_text().startswith("epoch,loss,loss_scale,skipped_steps")


def test_validation_is_left_alone():
    history = fit(wrapped(), LossScaleMonitor(2), StallGuard(3), validation_data=data(8))
    assert sorted(history) == ["loss", *KEYS, "val_loss"]


def test_each_look_is_logged(caplog):
    model = wrapped(Fault(start=2, end=4), L.Dense(4, name="second"))
    with caplog.at_level(logging.INFO, "tfscale"):
        fit(model, LossScaleMonitor(4))
        fit(wrapped(), LossScaleMonitor(data=data(BATCH)))
    lines = [record.getMessage() for record in caplog.records]
    assert lines[:3] == [
        "step 0: loss scale 1024, 0 skipped",
        "step 4: loss scale 256, 2 skipped",
        "step 8: loss scale 256, 2 skipped",
    ]
    assert lines[3] == "step 0: loss scale 1024, 0 skipped, 0 % of the gradients underflow"


# The share that underflows.


def tiny_gradients():
    """A batch whose gradients are around 2**-25 of those of the others."""
    model = wrapped(policy=tfscale.Static(1.0))
    x, _ = data(BATCH)
    return model, (x, np.asarray(model(x)) + 1e-7)


def test_underflow_share_is_what_profile_finds_at_the_scale_in_force():
    model, batch = tiny_gradients()
    found = tfscale.profile(model, [batch], steps=1)
    model.optimizer.learning_rate = 0.0
    history = fit(model, LossScaleMonitor(data=batch))
    assert history["underflow_share"] == [found.total.lost(1.0)]
    assert 0.1 < history["underflow_share"][0] <= 1.0

    model.compile(tfscale.wrap("sgd", tfscale.Static(2.0**20)), loss="mse")
    model.optimizer.learning_rate = 0.0
    assert fit(model, LossScaleMonitor(data=batch))["underflow_share"] == [0.0]


def test_all_of_the_batch_is_measured(monkeypatch):
    sizes = []
    model = wrapped()
    compute_loss = model.compute_loss

    def watched(x=None, *args, **kwargs):
        sizes.append(x.shape[0])
        return compute_loss(x, *args, **kwargs)

    monkeypatch.setattr(model, "compute_loss", watched)
    fit(model, LossScaleMonitor(data=data(100)), StallGuard(8, data=data(100)))
    assert sizes.count(100) == 3
    assert 32 not in sizes


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_nothing_underflows_where_nothing_is_float16(dtype):
    model = wrapped(dtype=dtype, policy=tfscale.NoScaling())
    x, _ = data(BATCH)
    batch = x, np.asarray(model(x)) + 1e-7
    model.optimizer.learning_rate = 0.0
    assert tfscale.profile(model, [batch], steps=1).total.lost() > 0
    assert fit(model, LossScaleMonitor(data=batch))["underflow_share"] == [0.0]


def test_gradients_that_are_not_finite_or_all_zero_have_no_share():
    x, y = data(BATCH)
    bad = fit(wrapped(), LossScaleMonitor(data=(x, np.full_like(y, np.nan))))
    assert math.isnan(bad["underflow_share"][0])
    model = wrapped()
    nothing = fit(model, LossScaleMonitor(data=(np.zeros_like(x), np.zeros_like(y))), steps=1,
                  arrays=(np.zeros_like(x), np.zeros_like(y)))  # fmt: skip
    assert math.isnan(nothing["underflow_share"][0])


def test_data_without_targets_raises_before_the_first_step():
    model = wrapped()
    with pytest.raises(ValueError, match="needs targets"):
        fit(model, LossScaleMonitor(data=data()[0]))
    assert model.optimizer.record().steps == 0


# TensorBoard.


def events(folder):
    """Tags, steps, plugins and values of all event files in a folder."""
    found = {}
    for path in sorted(folder.glob("events*")):
        for raw in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(raw.numpy())
            for value in event.summary.value:
                plugin = value.metadata.plugin_data.plugin_name
                tag = found.setdefault(value.tag, {"plugin": plugin, "values": {}})
                tag["values"][event.step] = tf.make_ndarray(value.tensor)
    return found


def test_tensorboard_reads_what_happened(tmp_path):
    batch = data(BATCH)
    model = wrapped(Fault(start=2, end=4))
    fit(model, LossScaleMonitor(4, data=batch, log_dir=tmp_path / "logs"))
    found = events(tmp_path / "logs")
    assert sorted(found) == [
        "tfscale/gradient_exponents",
        "tfscale/loss_scale",
        "tfscale/skipped_steps",
        "tfscale/underflow_share",
    ]
    assert found["tfscale/loss_scale"]["values"] == {0: 1024.0, 4: 256.0, 8: 256.0}
    assert found["tfscale/skipped_steps"]["values"] == {0: 0.0, 4: 2.0, 8: 2.0}
    assert {tag: f["plugin"] for tag, f in found.items()} == {
        tag: "histograms" if "exponents" in tag else "scalars" for tag in found
    }
    now = tfscale.profile(model, [batch], steps=1).total.histogram()
    bins = found["tfscale/gradient_exponents"]["values"][8]
    assert {int(low): int(n) for low, high, n in bins if n} == now
    assert all(high == low + 1 for low, high, _ in bins)
    assert np.array_equal(bins[1:, 0], bins[:-1, 1])


def test_a_histogram_has_a_bin_for_every_exponent_between(tmp_path):
    writer = tf.summary.create_file_writer(str(tmp_path))
    tensorboard.write(writer, 7, {}, {"some": {-3: 2, 0: 5}, "none": {}})
    assert list(events(tmp_path)) == ["some"]
    bins = events(tmp_path)["some"]["values"][7]
    assert bins.tolist() == [[-3, -2, 2], [-2, -1, 0], [-1, 0, 0], [0, 1, 5]]


def test_a_second_fit_writes_on(tmp_path):
    model, monitor = wrapped(), LossScaleMonitor(log_dir=str(tmp_path))
    for _ in range(2):
        fit(model, monitor, steps=2)
    assert list(events(tmp_path)["tfscale/loss_scale"]["values"]) == [0, 2, 4]


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fit(wrapped(), LossScaleMonitor(2, data=data(BATCH)), StallGuard(2))
    assert list(tmp_path.iterdir()) == []


# When is the device read?


def test_monitor_reads_at_the_begin_every_n_batches_and_at_the_end(reads):
    fit(wrapped(), LossScaleMonitor(3), epochs=2)
    assert reads.steps == [0, 3, 6, 8, 11, 14, 16]
    reads.steps.clear()
    fit(wrapped(), LossScaleMonitor(np.int64(100)), epochs=2)
    assert reads.steps == [0, 8, 16]


def test_monitor_of_epochs_reads_once_an_epoch(reads):
    fit(wrapped(), LossScaleMonitor(), epochs=2)
    assert reads.steps == [0, 8, 16]


def test_guard_reads_when_a_stall_could_be_there(reads):
    fit(wrapped(), StallGuard(3), epochs=2)
    assert reads.steps == [0, 3, 6, 8, 11, 14, 16]
    reads.steps.clear()
    # At 4 it finds two skips in a row: the earliest stall of 4 would be after two more batches.
    fit(wrapped(Fault(start=2, end=5)), StallGuard(4), steps=12)
    assert reads.steps == [0, 4, 6, 10, 12]


def test_a_guard_of_one_that_stalls_at_every_other_step_is_the_most_that_is_read(reads):
    fit(wrapped(), StallGuard(50), steps=100)
    assert len(reads.steps) <= 4


def test_several_steps_in_one_execution(reads):
    model = wrapped(Fault(start=2, end=4), steps_per_execution=4)
    history = fit(model, LossScaleMonitor(2))
    assert reads.steps == [0, 4, 8]
    assert history["skipped_steps"] == [2.0]
    guarded = wrapped(Fault(kind="loss"), steps_per_execution=4)
    with pytest.raises(RuntimeError, match="for 4 steps in a row"):
        fit(guarded, StallGuard(3, "raise"))


# The training is the same.


@BOTH
def test_weights_are_the_same_with_and_without(make, tmp_path):
    def run(*callbacks):
        keras.utils.set_random_seed(1)
        layers = L.BatchNormalization(), L.Dropout(0.5), Fault(start=3, end=5)
        model = make(*layers, optimizer="adam")
        history = fit(model, *callbacks, epochs=3)
        variables = [*model.variables, *model.optimizer.variables]
        return list(map(keras.ops.convert_to_numpy, variables)), history

    plain, losses = run()
    batch = data(BATCH, seed=5)
    watched, same = run(
        LossScaleMonitor(2, data=batch, log_dir=tmp_path), StallGuard(3, data=batch)
    )
    for a, b in zip(plain, watched, strict=True):
        np.testing.assert_array_equal(a, b)
    assert losses["loss"] == same["loss"]


# A run that does not learn is not silent.


def test_data_that_is_nan_is_told_from_a_fault_of_the_model():
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


def test_a_learning_rate_that_is_too_high_names_the_weight():
    model = wrapped(optimizer=keras.optimizers.SGD(1e6))
    with pytest.raises(RuntimeError, match=r"The learning rate is too high \(1e\+06\)") as error:
        fit(model, StallGuard(3, "raise"))
    assert re.search("largest weight, in .*(first|head)/(kernel|bias), is", str(error.value))
    assert "Load weights from before" in str(error.value)


def test_a_learning_rate_that_is_too_high_names_the_layer_as_well():
    model = wrapped(optimizer=keras.optimizers.SGD(1e6))
    guard = StallGuard(3, "raise", data=data(BATCH))
    with pytest.raises(
        RuntimeError, match=r"learning rate is too high .* shows first in (layer|the)"
    ):
        fit(model, guard)


def test_bad_losses_without_a_batch_name_both_causes_and_how_to_tell_them_apart():
    with pytest.raises(RuntimeError, match="either the data holds NaN or infinity, or the forward"):
        fit(wrapped(Fault("loss")), StallGuard(3, "raise"))
    with pytest.raises(RuntimeError, match="or a layer divides by zero"):
        fit(wrapped(Fault("loss"), dtype="float32"), StallGuard(3, "raise"))


def test_a_fine_batch_points_to_those_in_training():
    x, y = data()
    x[:] = np.inf
    with pytest.raises(RuntimeError, match="loss of the batches in training is not"):
        fit(wrapped(), StallGuard(3, "raise", data=data(BATCH)), arrays=(x, y))


def test_an_overflow_of_the_gradients_names_the_variables_nearest_to_the_loss():
    policy = tfscale.Dynamic(initial_scale=4.0)
    model = wrapped(L.Dense(4, name="second"), Fault(), policy=policy)
    with pytest.raises(RuntimeError, match="The scale is at its floor") as error:
        fit(model, StallGuard(6, "raise"))
    names = re.search("the gradients of (.*) were not", str(error.value))[1]
    assert "head" not in names
    assert names.index("second/kernel") < names.index("first/bias")


def test_an_overflow_of_the_gradients_names_the_layer_of_a_batch():
    model = wrapped(policy=tfscale.Dynamic(initial_scale=2.0**24, growth_interval=100))
    with pytest.raises(RuntimeError, match="The gradient overflows in layer 'first'") as error:
        fit(model, StallGuard(3, "raise", data=data(BATCH)))
    assert 'run it in float32 (dtype="float32"), scale down the loss itself' in str(error.value)


def test_a_gradient_that_float32_does_not_fix_is_no_overflow():
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
        (tfscale.Dynamic(initial_scale=1024.0), "The scale fell from 1024 to 128 and may still"),
        (
            tfscale.Dynamic(initial_scale=4.0),
            "The scale is at its floor and they are still not finite",
        ),
        (tfscale.Dynamic(initial_scale=1.0), "The scale did not fall"),
        (tfscale.Static(1024.0), r"constant: .* tfscale.wrap\(optimizer, 64\)"),
        (tfscale.NoScaling(), "There is no loss scale to lower"),
    ],
)
def test_the_remedy_of_an_overflow_depends_on_the_policy(policy, advice):
    with pytest.raises(RuntimeError, match=advice) as error:
        fit(wrapped(Fault(), policy=policy), StallGuard(3, "raise"))
    # NaN has another remedy, and a learning rate that was never used is not the cause.
    assert "look for sqrt, log, norm or a division at 0" in str(error.value)
    assert "the loss itself may be too large" in str(error.value)
    assert "lower the learning rate" not in str(error.value)


def test_the_learning_rate_may_be_the_cause_once_a_step_was_applied():
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
    model = wrapped(Fault(), policy=tfscale.Auto(), dtype="float32")
    with pytest.raises(RuntimeError, match="There is no loss scale to lower"):
        fit(model, StallGuard(3, "raise"))


def test_weights_that_are_not_finite_are_named_first():
    model = wrapped()
    model.get_layer("head").bias.assign([np.nan])
    with pytest.raises(RuntimeError, match=r"Weights are not finite: .*head/bias. No step"):
        fit(model, StallGuard(3, "raise", data=data(BATCH)))


def test_statistics_that_are_not_finite_are_named_with_what_guards_them():
    x, y = data()
    x[:] = np.nan

    def stall_of(make, **arguments):
        model = make(L.BatchNormalization(name="norm", dtype="float32"))
        with pytest.raises(RuntimeError) as error:
            fit(model, StallGuard(3, "raise", **arguments), arrays=(x, y))
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


def test_an_optimizer_with_finite_gradients_points_to_the_one_it_is_linked_with():
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
    text = diagnosis.explain(model, diagnosis.largest_weight(model), before, first.record())
    assert "linked optimizer" in text


def test_overflows_that_go_on_at_the_floor_are_a_stall_though_not_in_a_row():
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
        fit(model, StallGuard(4), steps=40)
    # Where the scale cannot fall, a skip now and then is none.
    fit(wrapped(EveryOther(), policy=tfscale.Static(4.0)), StallGuard(4), steps=40)


# What is done about it.


def test_warn_goes_on_and_says_it_once_a_stall():
    model = wrapped(Fault("loss", end=6))
    with pytest.warns(tfscale.LossScaleWarning) as caught:
        fit(model, StallGuard(2), epochs=2)
    assert len(caught) == 1
    assert model.optimizer.record().steps == 16

    model = wrapped(Fault("loss", end=3), Fault("loss", start=8, end=12))
    with pytest.warns(tfscale.LossScaleWarning) as caught:
        fit(model, StallGuard(2), epochs=2)
    assert len(caught) == 2


def test_stop_ends_fit_and_says_why():
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
    fit(wrapped(Fault(start=0, end=5)), StallGuard(6, "raise"), steps=20)


def test_skips_of_an_earlier_fit_are_not_counted():
    model = wrapped(Fault("loss", end=10))
    fit(model)
    fit(model, StallGuard(4, "raise"), steps=2, epochs=3)


def test_the_guard_serves_a_second_fit():
    guard = StallGuard(3)
    for _ in range(2):
        with pytest.warns(tfscale.LossScaleWarning) as caught:
            fit(wrapped(Fault("loss")), guard)
        assert len(caught) == 1


# Several replicas.


@pytest.mark.slow
@BOTH
def test_replicas_agree_on_one_figure(make, tmp_path):
    devices = tf.distribute.ReductionToOneDevice()
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], devices)

    def run(*callbacks):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = make(L.BatchNormalization(), Fault(start=2, end=4))
        return model, fit(model, *callbacks, epochs=2)

    plain, losses = run()
    batch = data(BATCH, seed=5)
    monitor = LossScaleMonitor(3, data=batch, log_dir=tmp_path)
    model, history = run(monitor, StallGuard(3, data=batch))
    # To the last bit but one: the sums of the replicas are put back as one.
    np.testing.assert_allclose(history["loss"], losses["loss"], rtol=1e-6)
    for a, b in zip(plain.variables, model.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    assert history["skipped_steps"] == [plain.optimizer.record().skipped] * 2
    assert events(tmp_path)["tfscale/loss_scale"]["values"][16] == history["loss_scale"][-1]


def test_replicas_in_a_stall_are_not_silent():
    devices = tf.distribute.ReductionToOneDevice()
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], devices)
    x, y = data()
    y[2::BATCH] = np.nan  # one replica only
    with strategy.scope():
        model = wrapped()
    with pytest.raises(RuntimeError, match="NaN or infinity in y"):
        fit(model, StallGuard(3, "raise", data=(x[:BATCH], y[:BATCH])), arrays=(x, y))


# Arguments.


@pytest.mark.parametrize("freq", ["batch", 0, -1, 2.0, True, None])
def test_wrong_freq_raises(freq):
    with pytest.raises(ValueError, match=r"`freq` must be .*Received: freq="):
        LossScaleMonitor(freq)


def test_wrong_folder_raises():
    with pytest.raises(ValueError, match=r"`log_dir` must be .*Received: log_dir=3"):
        LossScaleMonitor(log_dir=3)


@pytest.mark.parametrize("patience", [0, -1, 2.0, True, None, "3"])
def test_wrong_patience_raises(patience):
    with pytest.raises(ValueError, match=r"`patience` must be .*Received: "):
        StallGuard(patience)


def test_wrong_action_raises():
    with pytest.raises(ValueError, match=r"`action` must be one of .*Received: action='print'"):
        StallGuard(3, "print")


@pytest.mark.parametrize("make", [LossScaleMonitor, lambda data: StallGuard(3, data=data)])
def test_a_data_set_is_no_batch(make):
    several = tf.data.Dataset.from_tensor_slices(data()).batch(4)
    for wrong in (several, iter(several), (1, 2, 3, 4)):
        with pytest.raises(TypeError, match="`data` must be one batch"):
            make(data=wrong)


@pytest.mark.parametrize("callback", [LossScaleMonitor(), StallGuard(3)], ids=["monitor", "guard"])
@pytest.mark.parametrize("dtype", ["float32", "mixed_float16"])
def test_an_optimizer_that_is_not_of_tfscale_is_told_what_to_do(callback, dtype):
    keras.config.set_dtype_policy(dtype)  # under float16 Keras wraps by itself
    model = network(dtype=dtype)
    model.compile("sgd", loss="mse")
    with pytest.raises(TypeError, match=r"tfscale.compile\(model, .*tfscale.wrap\(optimizer\)"):
        fit(model, callback)


@pytest.mark.parametrize(
    "callback", [LossScaleMonitor(2, data=data(BATCH)), StallGuard(3, data=data(BATCH))]
)
def test_callbacks_can_be_copied_and_pickled(callback):
    for twin in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        fit(wrapped(), twin)
        assert twin.data[0].shape == (BATCH, 3)


def test_a_saved_and_a_cloned_model_are_watched_on(tmp_path):
    model, monitor = compiled(Fault(start=2, end=4)), LossScaleMonitor()
    fit(model, monitor)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert fit(loaded, monitor)["skipped_steps"] == [2.0]
    clone = keras.models.clone_model(model)
    clone.compile(tfscale.wrap("sgd", "dynamic"), loss="mse")
    assert fit(clone, monitor, steps=2)["skipped_steps"] == [0.0]
