"""Of a model with a step of its own that step is examined, and nothing is written."""

import collections
import types

import keras
import numpy as np
import own_steps
import pytest
import tensorflow as tf

import tfscale
from tfscale.diagnostics.nonfinite import find_nonfinite
from tfscale.diagnostics.profiling import profile
from tfscale.model_optimizers import optimizers_of

L = keras.layers
X = own_steps.data(8)
MAKERS = [
    own_steps.adversaries,
    own_steps.contrastive,
    own_steps.autoencoder,
    own_steps.diffusion,
]


@pytest.fixture(autouse=True)
def _float16():
    keras.config.set_dtype_policy("mixed_float16")


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_a_step_is_examined_and_nothing_written(make):
    model, batch = make(), own_steps.batch_of(make, 8)
    profiled = profile(model, iter([batch]), steps=1)
    before = own_steps.everything_of(model)
    report = find_nonfinite(model, batch)
    assert np.isfinite(report.loss)
    assert "own train_step was run, without its updates" in str(report)
    assert {r.name.split("/")[0] for r in profiled.variables} <= {m.name for m in model.layers}
    assert profiled.variables
    assert profiled.activations
    after = own_steps.everything_of(model)
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not any(o.built for o in optimizers_of(model).values())


def test_a_gradient_is_seen_at_the_scale_of_its_own_optimizer():
    model = own_steps.Adversaries()
    model.compile(own_steps.wrap(initial_scale=1.0), own_steps.wrap(initial_scale=2.0**24))
    report = find_nonfinite(model, X)
    assert report.forward is None
    assert report.scale == 2.0**24
    # The discriminator has its own loss at scale 1, and that of the generator at 2**24.
    assert report.backward.layer.startswith(("discriminator/", "generator/"))
    assert report.backward.finite_in_float32


def test_an_optimizer_of_keras_updates_nothing_either():
    model = own_steps.Adversaries()
    model.compile(own_steps.wrap(), keras.optimizers.Adam(1.0))
    before = own_steps.everything_of(model)
    assert find_nonfinite(model, X).clean
    for a, b in zip(before, own_steps.everything_of(model), strict=True):
        np.testing.assert_array_equal(a, b)


def test_only_the_gradients_that_the_step_asks_for_count():
    model = own_steps.distiller()
    names = {r.name.split("/")[0] for r in profile(model, (X, np.arange(8) % 2)).variables}
    assert names == {"student"}


def test_a_bad_layer_of_a_step_is_named():
    model = own_steps.autoencoder()
    model.decoder.layers[0].kernel.assign(np.full((2, 8), 6e4))
    report = find_nonfinite(model, 100 * X)
    assert report.forward.layer == "decoder/decoder_0"
    assert report.forward.finite_in_float32


def test_linked_optimizers_are_not_run():
    first, second = own_steps.wrap(), own_steps.wrap()

    class Linked(own_steps.Autoencoder):
        def train_step(self, x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self.decoder(self.encoder(x)[:, :2]) ** 2)
                scaled = first.scale_loss(loss)
            encoder, decoder = self.encoder.trainable_weights, self.decoder.trainable_weights
            grads = tape.gradient(scaled, encoder + decoder)
            n = len(encoder)
            tfscale.link(first, second).apply_gradients(
                zip(grads[:n], encoder, strict=True), zip(grads[n:], decoder, strict=True)
            )
            return {"loss": loss}

    model = Linked()
    model.compile(None)
    assert find_nonfinite(model, X).clean
    assert not any(optimizer.built for optimizer in (first, second))


def test_a_step_with_a_gradient_penalty_has_one_loss():
    class Penalized(own_steps.Autoencoder):
        def train_step(self, x):
            with tf.GradientTape() as tape:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    encoded = self.encoder(x)
                slope = tf.cast(inner.gradient(encoded, x), tf.float32)
                loss = tf.reduce_mean(encoded**2) + tf.reduce_mean(slope**2)
                scaled = self.optimizer.scale_loss(loss)
            own_steps.update(self.optimizer, tape, scaled, self.encoder)
            return {"loss": loss}

    model = Penalized()
    model.compile(own_steps.wrap())
    with tf.GradientTape() as tape:
        x = tf.constant(X)
        tape.watch(x)
        encoded = model.encoder(x)
    expected = tf.reduce_mean(encoded**2) + tf.reduce_mean(tape.gradient(encoded, x) ** 2)
    assert find_nonfinite(model, X).loss == pytest.approx(float(expected), rel=1e-3)


class Unable(own_steps.Distiller):
    def train_step(self, batch):
        raise ValueError("only in a graph")


def test_where_no_step_runs_the_forward_pass_is_examined():
    model = Unable()
    model.compile(own_steps.wrap())
    batch = (X, np.zeros(8, "int32"))
    report = find_nonfinite(model, batch)
    assert report.clean
    assert "Only the forward pass was run." in str(report)
    assert "raised ValueError: only in a graph" in str(report)
    with pytest.raises(ValueError, match="only in a graph"):
        profile(model, batch)
    model.train_step = lambda batch: {"loss": 0.0}
    with pytest.raises(ValueError, match="pass `loss=`"):
        profile(model, iter([batch]))
    assert profile(model, batch, loss="sparse_categorical_crossentropy").variables


def test_without_call_the_error_is_that_of_the_step():
    class Broken(own_steps.Autoencoder):
        def train_step(self, x):
            raise ValueError("wrong batch")

    model = Broken()
    model.compile(own_steps.wrap())
    with pytest.raises(ValueError, match="wrong batch"):
        find_nonfinite(model, X)


def test_optimizers_and_tapes_are_themselves_again():
    model = own_steps.autoencoder()
    before = keras.optimizers.Optimizer.apply_gradients, tf.GradientTape.gradient
    find_nonfinite(model, X)
    assert (keras.optimizers.Optimizer.apply_gradients, tf.GradientTape.gradient) == before


class Counter(L.Layer):
    """Counts its calls in a `tf.Variable`, as a moving average of a codebook is kept."""

    def __init__(self):
        super().__init__()
        self.calls = tf.Variable(0.0, trainable=False)

    def call(self, x):
        self.calls.assign_add(1.0)
        return x


class Bookkeeper(keras.Model):
    """Writes variables wherever a model may hold them."""

    def __init__(self):
        super().__init__()
        self.network = keras.Sequential([keras.Input((4,)), Counter(), L.Dense(1)])
        self.sums = [tf.Variable(tf.zeros((4,)), trainable=False)]
        self.queues = {"one": (tf.Variable(tf.zeros((4,)), trainable=False),)}
        self.module, self.plain = tf.Module(), types.SimpleNamespace()
        self.module.shadow = [tf.Variable(tf.zeros((4,)))]
        self.plain.shadow = collections.deque([keras.Variable(tf.zeros((4,)))])
        self.random = tf.random.Generator.from_seed(1)
        self.step = tf.function(self.one_step)

    def call(self, x):
        return self.network(x)

    def train_step(self, x):
        return {"loss": self.step(x)}

    def one_step(self, x):
        self.optimizer.learning_rate.assign(self.optimizer.learning_rate * 0.5)
        noise = self.random.normal((4,))
        for variable in self.written()[:4]:
            variable.assign_add(noise + tf.reduce_mean(x, 0))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.cast(self.network(x), tf.float32) ** 2)
            scaled = self.optimizer.scale_loss(loss)
        own_steps.update(self.optimizer, tape, scaled, self.network)
        return loss

    def written(self):
        vectors = [*self.sums, *self.queues["one"], *self.module.shadow, *self.plain.shadow]
        calls, random = self.network.layers[0].calls, self.random.state
        return [*vectors, calls, random, *self.optimizer.variables, *self.network.variables]

    def values(self):
        return [np.array(keras.ops.convert_to_numpy(v)) for v in self.written()]


def bookkeeper():
    keras.utils.set_random_seed(0)
    model = Bookkeeper()
    optimizer = tfscale.wrap(keras.optimizers.SGD(0.01, momentum=0.9), "dynamic")
    model.compile(optimizer, run_eagerly=True)  # its step is a function by itself
    return model


@pytest.fixture(scope="module")
def fitted():
    """A model after a fit, and its values then."""
    keras.config.set_dtype_policy("mixed_float16")
    model = bookkeeper()
    model.fit(X, batch_size=4, verbose=0)
    return model, model.values()


def assert_same(before, after):
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)


def test_variables_are_restored_wherever_they_are(fitted):
    model, before = fitted
    find_nonfinite(model, X)
    find_nonfinite(model, X * np.nan)
    profile(model, iter([X]))
    assert_same(before, model.values())


def test_callbacks_with_data_write_no_variable(fitted):
    _, without = fitted
    model = bookkeeper()
    callbacks = [tfscale.StallGuard(data=X), tfscale.LossScaleMonitor(data=X)]
    model.fit(X, batch_size=4, verbose=0, callbacks=callbacks)
    assert_same(without, model.values())


def test_a_layers_tf_variable_is_restored_in_any_model():
    model = keras.Sequential([Counter(), L.Dense(1, dtype="float32")])
    model.compile(own_steps.wrap(), loss="mse")
    find_nonfinite(model, (X, np.zeros((8, 1))))  # builds it
    profile(model, X, np.zeros((8, 1)))
    assert float(model.layers[0].calls) == 0.0


def test_a_step_in_a_concrete_function_is_reported():
    model = bookkeeper()
    model.optimizer.build(model.network.trainable_weights)
    model.step = model.step.get_concrete_function(tf.TensorSpec((None, 4)))
    before = model.values()
    report = find_nonfinite(model, X)
    assert report.loss is None
    assert "Only the forward pass was run" in str(report)
    assert "a concrete function" in str(report)
    assert_same(before, model.values())
