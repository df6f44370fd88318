"""Of a model with several optimizers each one is shown and guarded, by its name."""

import keras
import numpy as np
import own_steps
import pytest
import tensorflow as tf

import tfscale
from tfscale.callbacks import LossScaleMonitor, StallGuard

X = own_steps.data(8)
EAGER = {"run_eagerly": True}
ARGUMENTS = {"batch_size": 8, "verbose": 0}


def nan_batches():
    """So many batches that the run is looked at within the epoch."""
    return {"x": X[:1].repeat(52, axis=0) * np.nan, "batch_size": 1, "verbose": 0}


def test_logs_are_named_by_the_attribute():
    model = own_steps.adversaries(**EAGER)
    history = model.fit(X, **ARGUMENTS, callbacks=[LossScaleMonitor(data=X)]).history
    assert history["d_optimizer_loss_scale"] == history["g_optimizer_loss_scale"] == [32768.0]
    assert history["d_optimizer_skipped_steps"] == [0.0]
    assert "loss_scale" not in history
    assert 0 <= history["underflow_share"][0] < 1


def test_the_smallest_scale_decides_what_underflows():
    keras.config.set_dtype_policy("mixed_float16")
    model = own_steps.Adversaries()
    scales = map(tfscale.Static, (1.0, 2.0**-30))
    model.compile(*(tfscale.wrap(keras.optimizers.SGD(0.0), s) for s in scales), **EAGER)
    history = model.fit(X, **ARGUMENTS, callbacks=[LossScaleMonitor(data=X)]).history
    assert history["underflow_share"][0] > 0.9


def test_an_optimizer_out_of_reach_is_given():
    hidden = own_steps.wrap()

    class Hides(own_steps.Autoencoder):
        def train_step(self, x):
            with tf.GradientTape() as tape:
                scaled = hidden.scale_loss(keras.ops.mean(self.encoder(x) ** 2))
            own_steps.update(hidden, tape, scaled, self.encoder)
            return {"loss": scaled}

    model = Hides()
    model.compile(None, **EAGER)
    with pytest.raises(TypeError, match="pass `optimizer=`"):
        model.fit(X, **ARGUMENTS, callbacks=[LossScaleMonitor()])
    callbacks = [LossScaleMonitor(optimizer=hidden), StallGuard(optimizer=hidden)]
    history = model.fit(X, **ARGUMENTS, callbacks=callbacks).history
    assert history["loss_scale"] == [32768.0]
    with pytest.raises(TypeError, match="`optimizer` must be a tfscale optimizer"):
        StallGuard(optimizer="adam")


def test_a_guard_names_the_optimizer_that_stalls():
    guard = StallGuard(3, "raise", data=X[:1] * np.nan)
    with pytest.raises(RuntimeError, match=r"^d_optimizer: No step .*The data is not finite"):
        own_steps.adversaries(**EAGER).fit(**nan_batches(), callbacks=[guard])


def test_fit_names_the_optimizer_whose_steps_are_skipped():
    optimizers = [tfscale.wrap("sgd", "dynamic") for _ in range(2)]
    model = own_steps.Adversaries()
    model.discriminator = own_steps.mlp("discriminator", 4, 1)
    model.generator = own_steps.mlp("generator", 3, 4)
    model.compile(*optimizers, run_eagerly=False, jit_compile=False)
    # Else the step is traced twice.
    model.d_optimizer.build(model.discriminator.trainable_variables)
    model.g_optimizer.build(model.generator.trainable_variables)
    for _ in range(2):  # the second one traces nothing
        with pytest.warns(tfscale.LossScaleWarning) as caught:
            model.fit(**nan_batches())
        (text,) = [str(w.message) for w in caught]
        assert text.startswith("d_optimizer: 50 of 50 training steps were skipped")
        assert caught[0].filename == __file__
