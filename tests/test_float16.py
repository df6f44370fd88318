"""`Auto` scales where float16 is computed in, whatever the model or the global policy is called."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import execute

import tfscale

L = keras.layers
SCALED, UNSCALED = 2.0**15, 1.0
both_ways = pytest.mark.parametrize("how", ["graph", "eager"])


def data(dtype="float32"):
    return np.ones((4, 3), dtype), np.ones((4, 1), "float32")


def train(model, how, x=None, optimizer=None):
    """The optimizer after a step of `fit`'s train step."""
    optimizer = optimizer or tfscale.wrap(keras.optimizers.SGD(0.01))
    model.compile(optimizer, "mse", run_eagerly=how == "eager", jit_compile=how == "jit")
    inputs, y = data()
    model.train_on_batch(inputs if x is None else x, y)
    model.train_on_batch(inputs if x is None else x, y)
    assert int(optimizer.iterations) + int(optimizer.skipped_steps) == 2
    return optimizer


def sequential(*dtypes):
    layers = [L.Dense(2, dtype=dtype, use_bias=False) for dtype in dtypes]
    head = L.Dense(1, dtype="float32", use_bias=False)
    return keras.Sequential([keras.Input((3,)), *layers, head])


class Subclassed(keras.Model):
    def __init__(self, dtype):
        super().__init__(dtype="float32")
        self.first = L.Dense(2, dtype=dtype)
        self.last = L.Dense(1, dtype="float32")

    def call(self, x):
        return self.last(self.first(x))


class Casts(L.Layer):
    """Computes in a dtype that its policy says nothing about."""

    def __init__(self, dtype):
        super().__init__(dtype="float32")
        self.inner_dtype = dtype

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 2))

    def call(self, x):
        product = tf.matmul(tf.cast(x, self.inner_dtype), tf.cast(self.kernel, self.inner_dtype))
        return tf.cast(product, tf.float32)


def map_policy():
    policy = keras.dtype_policies.DTypePolicyMap(default_policy="float32")
    policy[".*half"] = keras.DTypePolicy("mixed_float16")
    return policy


def mapped_model():
    with_map = L.Dense(2, dtype=map_policy(), name="half")
    return keras.Sequential([keras.Input((3,)), with_map, L.Dense(1, dtype="float32")])


def policy_changed_later():
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((3,)), L.Dense(1)])
    keras.config.set_dtype_policy("float32")
    return model


def recurrent(dtype):
    layers = [
        L.Reshape((1, 3), dtype="float32"),
        L.SimpleRNN(2, dtype=dtype),
        L.Dense(1, dtype="float32"),
    ]
    return keras.Sequential([keras.Input((3,)), *layers])


FLOAT16 = {
    "one layer": lambda: sequential("float32", "mixed_float16"),
    "subclassed": lambda: Subclassed("mixed_float16"),
    "policy changed later": policy_changed_later,
    "policy map": mapped_model,
    "pure float16": lambda: sequential("float16"),
    "recurrent": lambda: recurrent("mixed_float16"),
    "activation only": lambda: keras.Sequential(
        [keras.Input((3,)), L.Dense(1), L.Activation("tanh", dtype="mixed_float16")]
    ),
}


def ways(models, graph, *slow):
    """Each model in eager code, which asks layers; in graphs those with operations of their own.

    Args:
        models: by name.
        graph: name of the model that runs in a graph, too.
        *slow: more pairs of a name and how it runs.
    """
    quick = [*[(kind, "eager") for kind in models], (graph, "graph")]
    slow = [pytest.param(*pair, marks=pytest.mark.slow) for pair in slow]
    return pytest.mark.parametrize(("kind", "how"), [*quick, *slow])


@ways(
    FLOAT16,
    "one layer",
    ("recurrent", "graph"),
    ("activation only", "graph"),
)
def test_float16_anywhere_is_scaled(kind, how):
    # Some of them overflow at first, which halves the scale.
    assert float(train(FLOAT16[kind](), how).loss_scale) >= SCALED / 4


def float32_under_a_float16_policy():
    model = sequential("float32")
    keras.config.set_dtype_policy("mixed_float16")
    return model


def float32_layers_under_a_float16_policy():
    keras.config.set_dtype_policy("mixed_float16")
    return sequential("float32")


OTHERS = {
    "float32": lambda: sequential("float32"),
    "mixed bfloat16": lambda: sequential("mixed_bfloat16"),
    "pure bfloat16": lambda: sequential("bfloat16"),
    "subclassed": lambda: Subclassed("mixed_bfloat16"),
    "recurrent": lambda: recurrent("mixed_bfloat16"),
    "policy changed later": float32_under_a_float16_policy,
    "float32 layers in a float16 model": float32_layers_under_a_float16_policy,
    "random": lambda: keras.Sequential(
        [keras.Input((3,)), L.Dropout(0.5), L.GaussianNoise(0.1), L.Dense(1)]
    ),
}


@ways(
    OTHERS,
    "float32",
    ("recurrent", "graph"),
    ("policy changed later", "graph"),
    ("random", "graph"),
)
def test_float32_and_bfloat16_are_not_scaled(kind, how):
    model = OTHERS[kind]()  # held: without it, eager code would look at all layers
    optimizer = train(model, how)
    # Eager code cannot see what a `call` of one's own does.
    unknown = kind == "subclassed" and how == "eager"
    assert float(optimizer.loss_scale) == (SCALED if unknown else UNSCALED)
    if kind != "subclassed":
        assert float(optimizer.scale_loss(3.0)) == 3.0


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "how"), [("float32", "eager"), ("mixed bfloat16", "graph")])
def test_float32_and_bfloat16_are_guarded(kind, how):
    model = OTHERS[kind]()
    optimizer = train(model, how)
    assert float(optimizer.loss_scale) == UNSCALED
    before = [w.numpy() for w in model.trainable_variables]
    model.train_on_batch(np.full((4, 3), np.nan, "float32"), data()[1])
    assert int(optimizer.skipped_steps) == 1
    for now, then in zip(model.trainable_variables, before, strict=True):
        np.testing.assert_array_equal(now.numpy(), then)


@both_ways
def test_float16_data_cast_at_once_is_not_scaled(how):
    model = keras.Sequential([keras.Input((3,), dtype="float16"), L.Dense(1, dtype="float32")])
    assert float(train(model, how, data("float16")[0]).loss_scale) == UNSCALED


def test_float16_that_no_gradient_passes_is_not_scaled():
    # Preprocessing in float16 lies between the data and the variables.
    layers = [L.Rescaling(0.5, dtype="float16"), L.Dense(1, dtype="float32")]
    model = keras.Sequential([keras.Input((3,)), *layers])
    assert float(train(model, "graph").loss_scale) == UNSCALED


@pytest.mark.parametrize(("dtype", "scale"), [("float16", SCALED), ("bfloat16", UNSCALED)])
def test_a_layer_that_casts_is_seen_in_a_graph(dtype, scale):
    model = keras.Sequential([keras.Input((3,)), Casts(dtype), L.Dense(1, use_bias=False)])
    assert float(train(model, "graph").loss_scale) == scale


@both_ways
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_float16_loss_alone_is_enough(dtype, how):
    variable = keras.Variable([1.0], dtype="float32")
    optimizer = tfscale.wrap(keras.optimizers.SGD(1.0))
    optimizer.build([variable])
    scale = lambda: optimizer.scale_loss(tf.cast(variable.value[0], dtype))  # noqa: E731
    if how != "eager":
        scale = execute(how, scale)
        assert float(scale()) == (SCALED if dtype == "float16" else UNSCALED)
    elif dtype == "float16":
        assert float(scale()) == SCALED


# Float16 that hides in a function of the graph.


def doubled(y, dtype):
    return tf.cast(tf.cast(y, dtype) * 2, tf.float32)


def in_a_branch(y, dtype):
    return tf.cond(tf.reduce_sum(y) > 0, lambda: doubled(y, dtype), lambda: y)


def in_a_loop(y, dtype):
    body = lambda i, y: (i + 1, doubled(y, dtype))  # noqa: E731
    return tf.while_loop(lambda i, _: i < 2, body, (0, y), maximum_iterations=2)[1]


def in_a_function(y, dtype):
    return tf.function(lambda y: doubled(y, dtype))(y)


def deep_down(y, dtype):
    return tf.function(lambda y: in_a_branch(in_a_function(y, dtype), "float32"))(y)


def in_a_switch(y, dtype):
    return tf.switch_case(tf.constant(0), [lambda: doubled(y, dtype), lambda: y])


def recomputed(y, dtype):
    return tf.recompute_grad(lambda y: doubled(y, dtype))(y)


PLACES = [in_a_branch, in_a_loop, in_a_function, deep_down, in_a_switch, recomputed]


@pytest.mark.parametrize(
    ("place", "dtype", "jit_compile"),
    [
        *[(place, "float16", False) for place in PLACES],
        pytest.param(in_a_loop, "float16", True, marks=pytest.mark.slow),
        *[
            pytest.param(place, "bfloat16", False, marks=pytest.mark.slow)
            for place in (in_a_loop, deep_down)
        ],
    ],
)
def test_float16_in_a_function_of_the_graph_is_seen(place, dtype, jit_compile):
    variable = tf.Variable([[0.125], [0.25], [0.125]])
    optimizer = tfscale.wrap(keras.optimizers.SGD(0.01))
    optimizer.build([variable])

    @tf.function(jit_compile=jit_compile, autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(place(x @ variable, dtype))
            scaled = optimizer.scale_loss(loss)
        return scaled / loss, tape.gradient(scaled, variable)

    scale, gradient = step(tf.ones([4, 3]))
    assert float(scale) == float(optimizer.loss_scale)
    assert float(scale) == (SCALED if dtype == "float16" else UNSCALED)
    assert np.all(gradient > 0)


def test_a_variable_read_inside_of_a_function_is_seen():
    variable = tf.Variable([[1.0], [2.0], [3.0]])
    optimizer = tfscale.wrap(keras.optimizers.SGD(0.01))
    optimizer.build([variable])
    forward = tf.function(lambda x: tf.matmul(tf.cast(x, "float16"), tf.cast(variable, "float16")))

    @tf.function
    def scale(x):
        return optimizer.scale_loss(tf.reduce_mean(tf.cast(forward(x), tf.float32)))

    assert float(scale(tf.ones([4, 3]))) == 6.0 * SCALED


def test_a_loss_scaled_in_another_function_is_followed():
    variable = tf.Variable([1.0])
    for dtype, scale in (("float16", SCALED), ("float32", UNSCALED)):
        optimizer = tfscale.wrap(keras.optimizers.SGD(0.01))
        optimizer.build([variable])

        @tf.function(autograph=False)
        def step(optimizer=optimizer, dtype=dtype):
            loss = tf.cast(tf.cast(variable, dtype) * 2, tf.float32)[0]
            return tf.cond(
                loss > 0, lambda: optimizer.scale_loss(loss + 0.0), lambda: tf.constant(0.0)
            )

        assert float(step()) == 2.0 * scale


# Loops by hand.


@pytest.mark.parametrize(
    ("dtype", "how"),
    [
        *[(dtype, how) for how in ("graph", "eager") for dtype in ("float16", "bfloat16")],
        ("float32", "eager"),
        pytest.param("float16", "jit", marks=pytest.mark.slow),
    ],
)
def test_a_loop_by_hand_with_plain_variables(dtype, how):
    variable = tf.Variable([[1.0], [2.0], [3.0]])
    optimizer = tfscale.wrap(keras.optimizers.SGD(0.125))

    def step(x):
        with tf.GradientTape() as tape:
            y = tf.matmul(tf.cast(x, dtype), tf.cast(variable, dtype))
            scaled = optimizer.scale_loss(tf.reduce_mean(tf.cast(y, tf.float32)))
        optimizer.apply_gradients([(tape.gradient(scaled, variable), variable)])

    run = execute(how, step)
    run(tf.ones([4, 3]))
    run(tf.ones([4, 3]))
    assert variable.numpy().tolist() == [[0.75], [1.75], [2.75]]
    # Eager code shows no operations and nobody owns these variables: unknown is scaled, which
    # changes nothing in float32.
    unknown = how == "eager"
    assert float(optimizer.loss_scale) == (SCALED if unknown or dtype == "float16" else UNSCALED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        ("mixed_float16", "loss alone"),
        ("mixed_float16", "apart"),
        ("mixed_bfloat16", "update alone"),
        ("mixed_bfloat16", "apart"),
    ],
)
def test_two_functions_divide_by_what_they_multiplied(dtype, layout):
    model = keras.Sequential([keras.Input((3,)), L.Dense(1, dtype=dtype, use_bias=False)])
    (kernel,) = model.trainable_variables
    optimizer = tfscale.wrap(keras.optimizers.SGD(0.125))
    before = kernel.numpy()

    def grads(x):
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(tf.reduce_mean(tf.cast(model(x), tf.float32)))
        return tape.gradient(scaled, [kernel.value])

    def apply(grads):
        optimizer.apply_gradients(zip(grads, [kernel], strict=True))

    grads = grads if layout == "update alone" else tf.function(grads)
    apply = apply if layout == "loss alone" else tf.function(apply)
    for n in range(1, 4):
        apply(grads(tf.ones([4, 3])))
        np.testing.assert_allclose(kernel.numpy(), before - 0.125 * n, rtol=1e-6)
    is_float16 = dtype == "mixed_float16"
    if is_float16 or layout != "update alone":  # an eager loss may pass through any live layer
        assert float(optimizer.loss_scale) == (SCALED if is_float16 else UNSCALED)


def test_a_float32_loss_beside_float16_is_scaled_too():
    # Were the second loss to settle the matter, the first one's gradients would be 32768 too big.
    half, full = tf.Variable([1.0]), tf.Variable([1.0])
    optimizer = tfscale.wrap(keras.optimizers.SGD(1.0))
    optimizer.build([half, full])

    @tf.function(autograph=False)
    def step():
        with tf.GradientTape() as tape:
            first = optimizer.scale_loss(tf.cast(tf.cast(half, tf.float16), tf.float32)[0])
            second = optimizer.scale_loss(full[0] * 3.0)
            total = first + second
        grads = tape.gradient(total, [half, full])
        optimizer.apply_gradients(zip(grads, [half, full], strict=True))

    step()
    assert half.numpy().tolist() == [0.0]
    assert full.numpy().tolist() == [-2.0]


def test_a_loss_beside_a_float16_function_is_scaled():
    half, full = tf.Variable([1.0]), tf.Variable([1.0])
    optimizer = tfscale.wrap(keras.optimizers.SGD(1.0))
    optimizer.build([half, full])

    @tf.function(autograph=False)
    def first():
        return optimizer.scale_loss(tf.cast(tf.cast(half, tf.float16), tf.float32)[0])

    @tf.function(autograph=False)
    def step():
        with tf.GradientTape() as tape:
            total = first() + optimizer.scale_loss(full[0] * 3.0)
        grads = tape.gradient(total, [half, full])
        optimizer.apply_gradients(zip(grads, [half, full], strict=True))

    step()
    assert half.numpy().tolist() == [0.0]
    assert full.numpy().tolist() == [-2.0]


def test_a_float16_loss_after_a_float32_one_is_refused():
    half, full = tf.Variable([1.0]), tf.Variable([1.0])
    optimizer = tfscale.wrap(keras.optimizers.SGD(1.0))
    optimizer.build([half, full])

    @tf.function(autograph=False)
    def step():
        optimizer.scale_loss(full[0] * 3.0)
        optimizer.scale_loss(tf.cast(tf.cast(half, tf.float16) * 2, tf.float32)[0])

    with pytest.raises(ValueError, match=r"scale_loss\(\[loss1, loss2\]\)"):
        step()


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_a_float32_phase_before_a_float16_one(how):
    # First the head alone is trained, then the whole: functions traced for the first phase must
    # not be mistaken for those of the second.
    body = L.Dense(2, dtype="mixed_float16", use_bias=False)
    head = L.Dense(1, dtype="float32", use_bias=False)
    model = keras.Sequential([keras.Input((3,)), body, head])
    variables = model.trainable_variables
    optimizer = tfscale.wrap(keras.optimizers.SGD(0.125))
    optimizer.build(variables)
    plain = [v.numpy() for v in variables]

    def grads(x, whole):
        with tf.GradientTape() as tape:
            hidden = body(x) if whole else tf.ones([4, 2])
            scaled = optimizer.scale_loss(tf.reduce_mean(tf.cast(head(hidden), tf.float32)))
        values = [v.value for v in variables]
        return tape.gradient(scaled, values, unconnected_gradients="zero")

    @tf.function(autograph=False)
    def apply(grads):
        optimizer.apply_gradients(zip(grads, variables, strict=True))

    grads = execute(how, grads, autograph=False)
    apply(grads(tf.ones([4, 3]), False))
    np.testing.assert_allclose(variables[1].numpy(), plain[1] - 0.125, rtol=1e-6)
    now = [v.numpy() for v in variables]
    apply(grads(tf.ones([4, 3]), True))
    hidden = np.ones((4, 3)) @ now[0]
    wanted = now[1] - 0.125 * hidden.mean(axis=0)[:, None]
    np.testing.assert_allclose(variables[1].numpy(), wanted, rtol=1e-2)


def test_dead_proxies_do_not_disturb_the_layer_search():
    class Thing:
        pass

    thing = Thing()
    proxy = weakref.proxy(thing)
    del thing
    gc.collect()
    assert float(train(sequential("mixed_float16"), "eager").loss_scale) == SCALED
    assert weakref.ProxyType is type(proxy)


def test_another_model_in_float16_does_not_count():
    other = sequential("mixed_float16")
    assert float(train(sequential("float32"), "eager").loss_scale) == UNSCALED
    assert other.built


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_float32_trained_through_float16_is_scaled(how):
    generator = keras.Sequential([keras.Input((3,)), L.Dense(3, dtype="float32")])
    critic = keras.Sequential([keras.Input((3,)), L.Dense(2, dtype="mixed_float16")])
    variables = generator.trainable_variables
    optimizer = tfscale.wrap(keras.optimizers.SGD(2.0**20))
    before = variables[0].numpy()

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.cast(critic(generator(x)), tf.float32)) * 2.0**-26
            scaled = optimizer.scale_loss(loss)
        optimizer.apply_gradients(zip(tape.gradient(scaled, variables), variables, strict=True))

    run = execute(how, step, autograph=False)
    run(tf.ones([4, 3]))
    once = variables[0].numpy() - before
    for _ in range(3):
        run(tf.ones([4, 3]))
    assert np.abs(once).max() > 0
    np.testing.assert_allclose(variables[0].numpy() - before, 4 * once, rtol=1e-2)


@pytest.mark.slow
def test_the_scale_is_in_use_until_the_dtype_is_known():
    assert float(tfscale.wrap(keras.optimizers.SGD()).loss_scale) == SCALED
