"""Linked optimizers step together or not at all; each scale follows only its own overflows."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import execute, slow_graph, slow_jit

import tfscale

INF = float("inf")


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def pair(**kwargs):
    """Two optimizers with a variable each, and the step that applies two given gradients."""
    optimizers = [
        tfscale.wrap(sgd(), "dynamic", initial_scale=scale, **kwargs) for scale in (2.0**10, 2.0**6)
    ]
    variables = [keras.Variable([1.0, 2.0]), keras.Variable([3.0, 4.0])]
    linked = tfscale.link(*optimizers)

    def step(slope_a, slope_b):
        with tf.GradientTape(persistent=True) as tape:
            losses = [
                optimizer.scale_loss(tf.reduce_sum(variable * slope))
                for optimizer, variable, slope in zip(
                    optimizers, variables, (slope_a, slope_b), strict=True
                )
            ]
        pairs = [
            [(tape.gradient(loss, variable.value), variable)]
            for loss, variable in zip(losses, variables, strict=True)
        ]
        return linked.apply_gradients(*pairs)

    return optimizers, variables, step


def state(optimizers, variables):
    inner = [v for o in optimizers for v in o.inner_optimizer.variables]
    return [v.numpy().copy() for v in [*variables, *inner]]


# A slope whose scaled gradient is infinite although the loss is not: times [1, 2] and the scale.
OVERFLOW = 2.0**126


@pytest.mark.parametrize(
    ("mode", "update"),
    [
        ("eager", "auto"),
        pytest.param("graph", "cond", marks=pytest.mark.slow),
        pytest.param("graph", "compiled", marks=pytest.mark.slow),
        pytest.param("jit", "auto", marks=pytest.mark.slow),
    ],
)
def test_an_overflow_skips_both_and_lowers_one_scale(mode, update):
    optimizers, variables, step = pair(update=update)
    step = execute(mode, step, autograph=False)
    good, bad = tf.constant([1.0, -1.0]), tf.constant([OVERFLOW, -OVERFLOW / 4])
    assert bool(step(good, good))
    before = state(optimizers, variables)
    for slopes, scales in (
        ((bad, good), [2.0**9, 2.0**6]),
        ((good, bad), [2.0**9, 2.0**5]),
        ((bad, bad), [2.0**8, 2.0**4]),
    ):
        assert not bool(step(*slopes))
        assert [float(o.loss_scale) for o in optimizers] == scales
        for now, then in zip(state(optimizers, variables), before, strict=True):
            np.testing.assert_array_equal(now, then)
    assert [int(o.skipped_steps) for o in optimizers] == [3, 3]
    assert bool(step(good, good))
    assert [int(o.iterations) for o in optimizers] == [2, 2]


@pytest.mark.slow
def test_good_steps_equal_those_of_unlinked_optimizers():
    _, variables, step = pair()
    alone = [sgd(), sgd()]
    theirs = [keras.Variable([1.0, 2.0]), keras.Variable([3.0, 4.0])]
    for i in range(1, 4):
        slopes = tf.constant([1.0 * i, -1.0]), tf.constant([0.5, 2.0 * i])
        assert bool(step(*slopes))
        for optimizer, variable, slope in zip(alone, theirs, slopes, strict=True):
            optimizer.apply_gradients([(slope, variable)])
    for ours, reference in zip(variables, theirs, strict=True):
        np.testing.assert_array_equal(ours, reference)


@pytest.mark.parametrize("mode", ["eager", slow_jit])
def test_a_bad_loss_skips_both_and_lowers_no_scale(mode):
    optimizers, variables, step = pair()
    step = execute(mode, step, autograph=False)
    before = [v.numpy().copy() for v in variables]
    assert not bool(step(tf.constant([INF, 0.0]), tf.constant([1.0, 1.0])))
    assert [float(o.loss_scale) for o in optimizers] == [2.0**10, 2.0**6]
    for variable, then in zip(variables, before, strict=True):
        np.testing.assert_array_equal(variable, then)


def test_growth_waits_for_steps_that_were_applied():
    optimizers, _, step = pair(growth_interval=2)
    good, bad = tf.constant([1.0, 1.0]), tf.constant([OVERFLOW, 1.0])
    for slopes in ((good, good), (good, bad), (good, good)):
        step(*slopes)
    # The good one keeps its count of good steps, the bad one starts again.
    assert [float(o.loss_scale) for o in optimizers] == [2.0**11, 2.0**5]
    assert [int(o.step_counter) for o in optimizers] == [0, 1]


@pytest.mark.parametrize("mode", ["eager", slow_graph])
def test_one_without_guard_is_skipped_with_its_partner(mode):
    careless = tfscale.wrap(keras.optimizers.SGD(1.0), tfscale.NoScaling(skip_nonfinite=False))
    careful = tfscale.wrap(keras.optimizers.SGD(1.0), 8.0)
    linked = tfscale.link(careless, careful)
    a, b = keras.Variable(1.0), keras.Variable(2.0)

    def step(bad):
        for optimizer in (careless, careful):
            optimizer.scale_loss(tf.constant(1.0))
        return linked.apply_gradients([(tf.constant(1.0), a)], [(bad, b)])

    step = execute(mode, step, autograph=False)
    assert not bool(step(tf.constant(INF)))
    assert (float(a), float(b)) == (1.0, 2.0)
    assert bool(step(tf.constant(8.0)))
    assert (float(a), float(b)) == (0.0, 1.0)


class OnTheHost(keras.optimizers.SGD):
    """Calls Python, which XLA cannot compile."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, tf.numpy_function(np.copy, [gradient], tf.float32))


def test_partners_of_a_compiled_update_stay_uncompiled():
    a = tfscale.wrap(keras.optimizers.SGD(1.0), "none", update="compiled")
    b = tfscale.wrap(OnTheHost(), "none", update="cond")
    v, w = keras.Variable(1.0), keras.Variable(1.0)

    @tf.function(autograph=False)
    def step(g):
        return tfscale.link(a, b).apply_gradients([(g, v)], [(g, w)])

    assert [bool(step(tf.constant(g))) for g in (INF, 1.0)] == [False, True]
    assert (float(v), float(w)) == (0.0, 0.0)


def test_three_and_more_can_be_linked():
    optimizers = [tfscale.wrap(keras.optimizers.SGD(1.0), "dynamic") for _ in range(3)]
    variables = [keras.Variable(1.0) for _ in range(3)]
    linked = tfscale.link(*optimizers)
    for bad in range(3):
        for optimizer in optimizers:
            optimizer.scale_loss(tf.constant(1.0))
        grads = [INF if i == bad else 1.0 for i in range(3)]
        pairs = [[(tf.constant(g), v)] for g, v in zip(grads, variables, strict=True)]
        assert not bool(linked.apply_gradients(*pairs))
    assert [float(v) for v in variables] == [1.0, 1.0, 1.0]
    assert [float(o.loss_scale) for o in optimizers] == [2.0**14] * 3
    assert [int(o.skipped_steps) for o in optimizers] == [3] * 3


def test_nonsense_is_refused():
    a, b = (tfscale.wrap(keras.optimizers.SGD(), 8.0) for _ in range(2))
    with pytest.raises(TypeError, match=r"tfscale.link\(tfscale.wrap\(a\)"):
        tfscale.link(a, keras.optimizers.SGD())
    for optimizers in ((), (a,), (a, a), (a, b, a)):
        with pytest.raises(ValueError, match="two or more different optimizers"):
            tfscale.link(*optimizers)
    linked = tfscale.link(a, b)
    with pytest.raises(ValueError, match=r"each of the 2 linked optimizers\. Received: 1"):
        linked.apply_gradients([(tf.constant(1.0), keras.Variable(1.0))])
    with pytest.raises(ValueError, match="empty"):
        linked.apply_gradients([(tf.constant(1.0), keras.Variable(1.0))], [])


@pytest.fixture(scope="module")
def digits():
    sklearn = pytest.importorskip("sklearn.datasets")
    images = sklearn.load_digits().data.astype("float32") / 8.0 - 1.0
    return images[:256]


@pytest.mark.slow
def test_a_gan_goes_on_as_if_it_had_not_overflowed(digits):
    """A generator and a discriminator in float16; an overflow of the discriminator alone."""

    dense = keras.layers.Dense
    generator = keras.Sequential(
        [keras.Input((8,)), dense(16, "relu", dtype="mixed_float16"), dense(64, "tanh")]
    )
    discriminator = keras.Sequential(
        [keras.Input((64,)), dense(16, "leaky_relu", dtype="mixed_float16"), dense(1)]
    )
    g_opt, d_opt = (
        tfscale.wrap(keras.optimizers.Adam(2e-3, beta_1=0.5), "dynamic") for _ in range(2)
    )
    parts = [(generator, g_opt), (discriminator, d_opt)]
    for model, optimizer in parts:
        optimizer.build(model.trainable_variables)
    start = [(m.get_weights(), [v.numpy() for v in o.variables]) for m, o in parts]
    linked = tfscale.link(g_opt, d_opt)
    entropy = keras.losses.BinaryCrossentropy(from_logits=True)

    @tf.function(autograph=False)
    def step(real, noise, plant):
        with tf.GradientTape(persistent=True) as tape:
            fake_score = discriminator(generator(noise, training=True), training=True)
            real_score = discriminator(real, training=True)
            g_loss = entropy(tf.ones_like(fake_score), fake_score)
            d_loss = entropy(tf.ones_like(real_score), real_score)
            d_loss += entropy(tf.zeros_like(fake_score), fake_score)
            g_scaled, d_scaled = g_opt.scale_loss(g_loss), d_opt.scale_loss(d_loss)
        g_vars, d_vars = generator.trainable_variables, discriminator.trainable_variables
        g_grads = tape.gradient(g_scaled, g_vars)
        d_grads = [g + tf.cast(plant, g.dtype) for g in tape.gradient(d_scaled, d_vars)]
        pairs = zip(g_grads, g_vars, strict=True), zip(d_grads, d_vars, strict=True)
        return linked.apply_gradients(*pairs), d_loss

    def train(planted):
        for (model, optimizer), (weights, state) in zip(parts, start, strict=True):
            model.set_weights(weights)
            optimizer.set_weights(state)
        rng = np.random.default_rng(0)
        losses = []
        for i in range(40):
            real = tf.constant(digits[32 * (i % 8) : 32 * (i % 8) + 32])
            noise = tf.constant(rng.normal(size=(32, 8)), tf.float32)
            if i == planted:
                applied, _ = step(real, noise, tf.constant(INF))
                assert not bool(applied)
            applied, loss = step(real, noise, tf.constant(0.0))
            assert bool(applied)
            losses.append(float(loss))
        return generator.get_weights() + discriminator.get_weights(), losses

    clean, _ = train(planted=None)
    weights, losses = train(planted=20)
    assert float(g_opt.loss_scale) == 2.0**15
    assert float(d_opt.loss_scale) == 2.0**14
    assert int(g_opt.skipped_steps) == int(d_opt.skipped_steps) == 1
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]
    # Half the scale moves nothing but what float16 rounds.
    for ours, theirs in zip(weights, clean, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-3)
