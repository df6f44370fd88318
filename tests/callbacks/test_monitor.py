"""What a user is shown of loss scaling while `fit` runs."""

import logging
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from runs import BATCH, BOTH, KEYS, Fault, compiled, data, events, fit, wrapped

import tfscale
from tfscale import _compat
from tfscale.callbacks import LossScaleMonitor, StallGuard, tensorboard

L = keras.layers


# What is shown.


@BOTH
def test_history_holds_one_figure_an_epoch(make):
    history = fit(make(Fault(start=1, end=3)), LossScaleMonitor(), steps=4, epochs=2)
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


def test_figures_show_from_the_first_batch_and_renew(capsys):
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


def test_compiled_models_keep_the_figures_of_a_batch():
    seen = []
    spy = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(logs["loss_scale"])
    )
    fit(compiled(Fault(start=2, end=4)), LossScaleMonitor(2), spy)
    assert seen == [1024, 1024, 512, 256, 256, 256, 256, 256]


def test_callbacks_after_it_see_the_figures(tmp_path):
    path = tmp_path / "log.csv"
    fit(wrapped(), LossScaleMonitor(), keras.callbacks.CSVLogger(str(path)), steps=2)
    assert path.read_text().startswith("epoch,loss,loss_scale,skipped_steps")


def test_validation_is_left_alone():
    history = fit(wrapped(), LossScaleMonitor(2), StallGuard(3), steps=3, validation_data=data(8))
    assert sorted(history) == ["loss", *KEYS, "val_loss"]


def test_each_look_is_logged(caplog):
    model = wrapped(Fault(start=2, end=4), L.Dense(4, name="second"))
    with caplog.at_level(logging.INFO, "tfscale"):
        fit(model, LossScaleMonitor(4))
        fit(wrapped(), LossScaleMonitor(data=data(BATCH)), steps=1)
    lines = [r.getMessage() for r in caplog.records if r.name == "tfscale.callbacks"]
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


def test_underflow_share_is_that_of_profile():
    model, batch = tiny_gradients()
    found = tfscale.profile(model, [batch], steps=1)
    model.optimizer.learning_rate = 0.0
    history = fit(model, LossScaleMonitor(data=batch), steps=1)
    assert history["underflow_share"] == [found.total.lost(1.0)]
    assert 0.1 < history["underflow_share"][0] <= 1.0

    model.compile(tfscale.wrap("sgd", tfscale.Static(2.0**20)), loss="mse", run_eagerly=True)
    model.optimizer.learning_rate = 0.0
    assert fit(model, LossScaleMonitor(data=batch), steps=1)["underflow_share"] == [0.0]


def test_all_of_the_batch_is_measured(monkeypatch):
    sizes = []
    model = wrapped()
    compute_loss = model.compute_loss

    def watched(x=None, *args, **kwargs):
        sizes.append(x.shape[0])
        return compute_loss(x, *args, **kwargs)

    monkeypatch.setattr(model, "compute_loss", watched)
    fit(model, LossScaleMonitor(data=data(100)), StallGuard(8, data=data(100)), steps=2)
    assert sizes.count(100) == 3
    assert 32 not in sizes


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_nothing_underflows_where_nothing_is_float16(dtype):
    model = wrapped(dtype=dtype, policy=tfscale.NoScaling())
    x, _ = data(BATCH)
    batch = x, np.asarray(model(x)) + 1e-7
    model.optimizer.learning_rate = 0.0
    assert tfscale.profile(model, [batch], steps=1).total.lost() > 0
    assert fit(model, LossScaleMonitor(data=batch), steps=1)["underflow_share"] == [0.0]


def test_nonfinite_or_zero_gradients_have_no_share():
    x, y = data(BATCH)
    bad = fit(wrapped(), LossScaleMonitor(data=(x, np.full_like(y, np.nan))), steps=1)
    assert math.isnan(bad["underflow_share"][0])
    model = wrapped()
    nothing = fit(model, LossScaleMonitor(data=(np.zeros_like(x), np.zeros_like(y))), steps=1,
                  arrays=(np.zeros_like(x), np.zeros_like(y)))  # fmt: skip
    assert math.isnan(nothing["underflow_share"][0])


def test_data_without_targets_raises_before_a_step():
    model = wrapped()
    with pytest.raises(ValueError, match="needs targets"):
        fit(model, LossScaleMonitor(data=data()[0]))
    assert model.optimizer.record().steps == 0


# TensorBoard.


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


def test_a_histogram_has_a_bin_for_every_exponent(tmp_path):
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
    fit(wrapped(), LossScaleMonitor(2, data=data(BATCH)), StallGuard(2), steps=3)
    assert list(tmp_path.iterdir()) == []


# Arguments, and other models.


@pytest.mark.parametrize("freq", ["batch", 0, -1, 2.0, True, None])
def test_wrong_freq_raises(freq):
    with pytest.raises(ValueError, match=r"`freq` must be .*Received: freq="):
        LossScaleMonitor(freq)


def test_wrong_folder_raises():
    with pytest.raises(ValueError, match=r"`log_dir` must be .*Received: log_dir=3"):
        LossScaleMonitor(log_dir=3)


def test_a_saved_and_a_cloned_model_are_watched_on(tmp_path):
    model, monitor = compiled(Fault(start=1, end=3)), LossScaleMonitor()
    fit(model, monitor, steps=4)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert fit(loaded, monitor, steps=2)["skipped_steps"] == [2.0]
    clone = keras.models.clone_model(model)
    clone.compile(tfscale.wrap("sgd", "dynamic"), loss="mse", run_eagerly=True)
    assert fit(clone, monitor, steps=1)["skipped_steps"] == [0.0]
