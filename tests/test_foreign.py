"""Code in the shape of others': it trains in float16, and every report fits it."""

import warnings

import keras
import numpy as np
import own_steps
import pytest
import tensorflow as tf

import tfscale
from tfscale.model_optimizers import optimizers_of

pytestmark = pytest.mark.slow

L = keras.layers
QUIET = {"verbose": 0, "shuffle": False}
MAKERS = [
    own_steps.adversaries,
    own_steps.cycle,
    own_steps.contrastive,
    own_steps.autoencoder,
    own_steps.distiller,
    own_steps.diffusion,
]
COMPILED = [own_steps.adversaries, own_steps.distiller]  # by XLA, as `fit` does by default
IN_A_GRAPH = [*COMPILED, own_steps.contrastive]


@pytest.fixture(autouse=True)
def _float16():
    keras.config.set_dtype_policy("mixed_float16")


def several(batch, times=4):
    return tf.data.Dataset.from_tensors(batch).repeat(times)


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_an_example_trains_and_is_examined(make):
    model, batch = make(), own_steps.batch_of(make)
    model.jit_compile = make in COMPILED
    model.run_eagerly = make not in IN_A_GRAPH
    names = list(optimizers_of(model))
    assert not tfscale.lint(model)
    monitor = tfscale.LossScaleMonitor(data=batch)
    guard = tfscale.StallGuard(data=batch)
    history = model.fit(several(batch), epochs=2, **QUIET, callbacks=[monitor, guard]).history
    keys = [f"{name}_loss_scale" for name in names] if len(names) > 1 else ["loss_scale"]
    assert all(len(history[key]) == 2 for key in keys)
    assert all(np.all(np.isfinite(values)) for values in history.values())
    assert all(o.record().applied >= 6 for o in optimizers_of(model).values())
    before = own_steps.everything_of(model)
    report = tfscale.find_nonfinite(model, batch)
    assert report.clean
    assert np.isfinite(report.loss)
    profile = tfscale.profile(model, several(batch), steps=1)
    assert all(r.nonzero or r.zeros for r in profile.variables)
    for a, b in zip(before, own_steps.everything_of(model), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.filterwarnings("ignore:Not finite after skipped steps")  # BatchNorm's, in one of them
@pytest.mark.parametrize("make", MAKERS[:4], ids=lambda make: make.__name__)
def test_an_example_on_nan_data_is_not_silent(make):
    model = make()
    model.run_eagerly = True
    x, *labels = batch = own_steps.batch_of(make)
    bad = (x * np.nan, *labels) if isinstance(batch, tuple) else batch * np.nan
    with pytest.warns(tfscale.LossScaleWarning, match="4 of 4 training steps were skipped"):
        model.fit(several(bad), **QUIET)
    assert tfscale.find_nonfinite(model, bad).inputs


@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed")  # by keras-hub
def test_keras_hub_model_trains_and_points_at_the_user():
    hub = pytest.importorskip("keras_hub")  # only in the extra `foreign`
    backbone = hub.models.BertBackbone(
        vocabulary_size=16, num_layers=1, num_heads=2, hidden_dim=8, intermediate_dim=8
    )
    model = hub.models.BertTextClassifier(backbone, num_classes=2, preprocessor=None)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=tfscale.wrap("adam"), loss=loss)
    x = {
        "token_ids": np.ones((4, 5), "int32"),
        "segment_ids": np.zeros((4, 5), "int32"),
        "padding_mask": np.ones((4, 5), "int32"),
    }
    y = np.arange(4) % 2
    with warnings.catch_warnings():
        warnings.simplefilter("error", tfscale.LossScaleWarning)
        model.fit(x, y, batch_size=2, verbose=0)
    assert model.optimizer.record().applied == 2
    assert tfscale.find_nonfinite(model, (x, y)).clean
    kernel = model.trainable_weights[-2]
    kernel.assign(tf.fill(kernel.shape, np.nan))
    with pytest.warns(tfscale.LossScaleWarning, match="2 of 2") as caught:
        model.fit(x, y, batch_size=2, verbose=0)
    assert {w.filename for w in caught if w.category is tfscale.LossScaleWarning} == {__file__}


def test_keras_tuner_searches_over_loss_scales(tmp_path):
    tuner_module = pytest.importorskip("keras_tuner")  # only in the extra `foreign`

    def build(choices):
        model = keras.Sequential([keras.Input((4,)), L.Dense(8), L.Dense(1, dtype="float32")])
        scale = choices.Choice("initial_scale", [1024.0, 32768.0])
        optimizer = tfscale.wrap("adam", tfscale.Dynamic(initial_scale=scale))
        return tfscale.compile(model, optimizer, loss="mse")

    tuner = tuner_module.GridSearch(build, "val_loss", directory=tmp_path, project_name="scales")
    x = own_steps.data()
    y = x[:, :1]
    callbacks = [tfscale.LossScaleMonitor(), tfscale.StallGuard(data=(x, y))]
    tuner.search(x, y, validation_data=(x, y), verbose=0, callbacks=callbacks)
    assert {model.optimizer.initial_scale for model in tuner.get_best_models(2)} == {
        1024.0,
        32768.0,
    }
