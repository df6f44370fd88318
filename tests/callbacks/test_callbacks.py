"""Callbacks read the device only when it is due, and the training is the same with them."""

import copy
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf
from runs import BATCH, BOTH, Fault, compiled, data, events, fit, network, wrapped

import tfscale
from tfscale.callbacks import LossScaleMonitor, StallGuard

L = keras.layers


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


# When is the device read?


def test_monitor_reads_every_n_batches_and_at_ends(reads):
    fit(wrapped(), LossScaleMonitor(3), epochs=2)
    assert reads.steps == [0, 3, 6, 8, 11, 14, 16]
    reads.steps.clear()
    fit(wrapped(), LossScaleMonitor(np.int64(100)), steps=2, epochs=2)
    assert reads.steps == [0, 2, 4]


def test_monitor_of_epochs_reads_once_an_epoch(reads):
    fit(wrapped(), LossScaleMonitor(), steps=3, epochs=2)
    assert reads.steps == [0, 3, 6]


def test_guard_reads_when_a_stall_could_be_there(reads):
    fit(wrapped(), StallGuard(3), epochs=2)
    assert reads.steps == [0, 3, 6, 8, 11, 14, 16]
    reads.steps.clear()
    # At 4 it finds two skips in a row: the earliest stall of 4 would be after two more batches.
    fit(wrapped(Fault(start=2, end=5)), StallGuard(4), steps=12)
    assert reads.steps == [0, 4, 6, 10, 12]


@pytest.mark.slow
def test_a_guard_reads_at_most_every_other_step(reads):
    fit(wrapped(), StallGuard(24), steps=48)
    assert len(reads.steps) <= 4


@pytest.mark.slow
def test_several_steps_in_one_execution(reads):
    model = wrapped(Fault(start=2, end=4), Fault("loss", start=8), steps_per_execution=4)
    history = fit(model, LossScaleMonitor(2))
    assert reads.steps == [0, 4, 8]
    assert history["skipped_steps"] == [2.0]
    with pytest.raises(RuntimeError, match="for 4 steps in a row"):
        fit(model, StallGuard(3, "raise"))


# The training is the same.


@pytest.mark.slow
@BOTH
def test_weights_are_the_same_with_and_without(make, tmp_path):
    def run(*callbacks):
        keras.utils.set_random_seed(1)
        layers = L.BatchNormalization(), L.Dropout(0.5), Fault(start=3, end=5)
        model = make(*layers, optimizer=keras.optimizers.SGD(0.01, momentum=0.9))
        history = fit(model, *callbacks, steps=6)
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


# Several replicas.


@pytest.mark.slow
def test_replicas_agree_on_one_figure(tmp_path):
    devices = tf.distribute.ReductionToOneDevice()
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], devices)

    def run(*callbacks):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = compiled(L.BatchNormalization(), Fault(start=2, end=4))
        return model, fit(model, *callbacks, steps=4, epochs=2)

    plain, losses = run()
    batch = data(BATCH, seed=5)
    monitor = LossScaleMonitor(3, data=batch, log_dir=tmp_path)
    model, history = run(monitor, StallGuard(3, data=batch))
    # To the last bit but one: the sums of the replicas are put back as one.
    np.testing.assert_allclose(history["loss"], losses["loss"], rtol=1e-6)
    for a, b in zip(plain.variables, model.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    assert history["skipped_steps"] == [plain.optimizer.record().skipped] * 2
    assert events(tmp_path)["tfscale/loss_scale"]["values"][8] == history["loss_scale"][-1]


# Arguments.


@pytest.mark.parametrize("make", [LossScaleMonitor, lambda data: StallGuard(3, data=data)])
def test_a_data_set_is_no_batch(make):
    several = tf.data.Dataset.from_tensor_slices(data()).batch(4)
    for wrong in (several, iter(several), (1, 2, 3, 4)):
        with pytest.raises(TypeError, match="`data` must be one batch"):
            make(data=wrong)


@pytest.mark.parametrize("callback", [LossScaleMonitor(), StallGuard(3)], ids=["monitor", "guard"])
@pytest.mark.parametrize("dtype", ["float32", "mixed_float16"])
def test_a_plain_optimizer_raises_with_the_fix(callback, dtype):
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
        fit(wrapped(), twin, steps=2)
        assert twin.data[0].shape == (BATCH, 3)
