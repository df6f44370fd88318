"""Replicas of a `tf.distribute` strategy: one sum, one check, one decision, the same everywhere."""

import functools
import inspect
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.distribute.mirrored_strategy import MirroredExtended
from versions import need_multi_optimizer

import tfscale
from tfscale import _compat, graph, replica_jit, replicas

BATCH = 8  # global: divides by 1, 2 and 4 replicas
# The graph optimizer of TensorFlow 2.18 may order the sum of a norm otherwise on each replica.
ROUNDING = 1e-6 if tf.__version__.startswith("2.18.") else 0.0
# In `fit` Keras before 3.8 adds up the means of the replicas.
ADDS_MEANS = _compat.KERAS < (3, 8)
SCALE = 1024.0


class TwoReplicas(tf.distribute.MirroredStrategy):
    """Of CPUs, whose replicas can be kept from meeting, as those of GPUs are in XLA."""

    class Extended(MirroredExtended):
        meets = staticmethod(lambda: True)
        doubles = False

        def _use_merge_call(self):
            return self.meets()

        def _replica_ctx_all_reduce(self, reduce_op, value, options=None):
            if self.doubles and not self.meets():
                return tf.nest.map_structure(lambda part: 2 * part, value)
            return super()._replica_ctx_all_reduce(reduce_op, value, options)

    def __init__(self):
        extended = self.Extended(self, devices=["CPU:0", "CPU:1"])
        tf.distribute.Strategy.__init__(self, extended)


@functools.lru_cache
def strategy_of(replicas):
    """One strategy of each size for the session; two that use collectives cannot share it."""
    if replicas == 1:
        return tf.distribute.OneDeviceStrategy("CPU:0")
    if replicas == 2:
        return TwoReplicas()
    devices = [f"CPU:{i}" for i in range(replicas)]
    return tf.distribute.MirroredStrategy(devices, tf.distribute.ReductionToOneDevice())


@pytest.fixture(
    params=[2, pytest.param(4, marks=pytest.mark.slow)], ids=["2 replicas", "4 replicas"]
)
def strategy(request):
    return strategy_of(request.param)


@pytest.fixture
def two():
    return strategy_of(2)


@keras.saving.register_keras_serializable(package="tests")
class Amplify(keras.layers.Layer):
    """Its first input as it is; the gradient times the second one, a number for each sample."""

    def call(self, x, factor):
        @tf.custom_gradient
        def amplified(x, factor):
            return tf.identity(x), lambda dy: (dy * factor[:, None], tf.zeros_like(factor))

        return amplified(x, factor)


def inputs(x, factor):
    return {"x": x, "factor": factor}


def dense_model(norm=False):
    x, factor = keras.Input((4,), name="x"), keras.Input((), name="factor")
    h = keras.layers.Dense(3, activation="tanh")(x)
    h = keras.layers.BatchNormalization(momentum=0.5)(h) if norm else h
    return keras.Model(inputs(x, factor), keras.layers.Dense(1)(Amplify()(h, factor)))


def embedding_model():
    x, factor = keras.Input((2,), dtype="int32", name="x"), keras.Input((), name="factor")
    h = keras.layers.Flatten()(keras.layers.Embedding(5, 2)(x))
    return keras.Model(inputs(x, factor), keras.layers.Dense(1)(Amplify()(h, factor)))


def batch_of(seed=0, overflow=(), bad_loss=(), tokens=False, size=BATCH):
    """x, factor, y; the samples in `overflow` have infinite gradients, those in `bad_loss` NaN."""
    random = np.random.RandomState(seed)
    x = random.randint(0, 3, (size, 2)) if tokens else random.randn(size, 4).astype("float32")
    factor, y = np.ones(size, "float32"), random.randn(size, 1).astype("float32")
    factor[list(overflow)] = np.inf
    y[list(bad_loss)] = np.nan
    return x, factor, y


def dynamic(**settings):
    return tfscale.Dynamic(initial_scale=SCALE, growth_interval=3, **settings)


class Loop:
    """An own training loop under a strategy.

    Its optimizer is built before the first step, or with `build=False` in it, which is then traced
    twice.
    """

    def __init__(
        self, strategy, optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        model=dense_model, policy=None, apply=None, eager=False, build=True, **wrapping,
    ):  # fmt: skip
        self.strategy = strategy
        with strategy.scope():
            keras.utils.set_random_seed(1)
            self.model = model()
            self.optimizer = tfscale.wrap(optimizer(), policy or dynamic(), **wrapping)
            if build:
                self.optimizer.build(self.model.trainable_variables)
        self.apply = apply or (lambda optimizer, pairs: optimizer.apply_gradients(pairs))
        run = lambda *data: strategy.run(self.replica_step, args=data)  # noqa: E731
        self.function = run if eager else tf.function(run)
        self.start = None

    def replica_step(self, x, factor, y):
        with tf.GradientTape() as tape:
            errors = tf.square(self.model(inputs(x, factor), training=True) - y)
            scaled = self.optimizer.scale_loss(tf.reduce_sum(errors) / BATCH)
        variables = self.model.trainable_variables
        pairs = zip(tape.gradient(scaled, variables), variables, strict=True)
        self.apply(self.optimizer, list(pairs))

    def step(self, x, factor, y):
        """One step on a global batch, then: every replica holds the same."""
        self.function(*(split(self.strategy, part) for part in (x, factor, y)))
        assert_same_on_all_replicas(self.strategy, self.optimizer, self.model)

    def trace(self):
        """The graph of a step, which is not executed."""
        data = [split(self.strategy, part) for part in batch_of()]
        return self.function.get_concrete_function(*data).graph

    def reset(self):
        """Back to before the first step, with what was traced."""
        variables = [*self.model.variables, *self.optimizer.variables]
        self.start = self.start or list(map(value, variables))
        for variable, start in zip(variables, self.start, strict=True):
            variable.assign(start)

    def state(self):
        """Model, slots, iterations: all that a skipped step must not touch."""
        return [
            value(v) for v in [*self.model.variables, *self.optimizer.inner_optimizer.variables]
        ]

    @property
    def scale(self):
        return float(self.optimizer.loss_scale)

    @property
    def skipped(self):
        return int(self.optimizer.skipped_steps)


def split(strategy, array):
    replicas = strategy.num_replicas_in_sync
    if replicas == 1:
        return tf.constant(array)
    parts = np.split(array, replicas)
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(parts[context.replica_id_in_sync_group])
    )


def value(variable):
    return np.array(variable.numpy())


def assert_same_on_all_replicas(strategy, optimizer, model):
    for variable in [*optimizer.variables, *model.trainable_variables]:
        first, *others = strategy.experimental_local_results(variable.value)
        for other in others:
            np.testing.assert_allclose(
                first.numpy(), other.numpy(), rtol=ROUNDING, atol=0, err_msg=variable.path
            )


def assert_equal(before, after):
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)


def assert_close(one, other, rtol=1e-4, atol=1e-6):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def apply_given(strategy, optimizer, variables, *grads):
    """Applies gradients given as functions of the replica's number, without a loss or a graph."""

    def step(number):
        optimizer.apply_gradients(zip([g(number) for g in grads], variables, strict=True))

    numbers = split(strategy, np.arange(strategy.num_replicas_in_sync, dtype="float32"))
    strategy.run(step, args=(numbers,))
    for v in variables:
        first, *others = strategy.experimental_local_results(_compat.tf_variable(v))
        for other in others:
            np.testing.assert_array_equal(first.numpy(), other.numpy())


@pytest.fixture(scope="module")
def traced_loop():
    """The loop of a strategy before its first step; tests that differ in batches share a trace."""

    @functools.lru_cache
    def traced(strategy):
        loop = Loop(strategy, build=False)
        loop.trace()
        return loop

    def fresh(strategy):
        loop = traced(strategy)
        loop.reset()
        return loop

    return fresh


# Overflow and bad losses.


def test_overflow_on_any_replica_skips_on_all(two, traced_loop):
    loop = traced_loop(two)
    loop.step(*batch_of())
    for sample in (0, BATCH // 2):
        before, scale, skipped = loop.state(), loop.scale, loop.skipped
        loop.step(*batch_of(overflow=[sample]))
        assert_equal(before, loop.state())
        assert (loop.scale, loop.skipped) == (scale / 2, skipped + 1)
    loop.step(*batch_of(1))
    assert loop.skipped == skipped + 1
    assert not np.array_equal(before[0], loop.state()[0])


def test_overflow_on_all_replicas_lowers_once(two, traced_loop):
    loop = traced_loop(two)
    loop.step(*batch_of())
    before = loop.state()
    loop.step(*batch_of(overflow=range(BATCH)))
    assert_equal(before, loop.state())
    assert (loop.scale, loop.skipped) == (SCALE / 2, 1)


def test_growth_happens_once_for_all_replicas(two, traced_loop):
    loop = traced_loop(two)
    for seed in range(3):
        loop.step(*batch_of(seed))
    assert (loop.scale, loop.skipped) == (2 * SCALE, 0)
    assert value(loop.optimizer.iterations) == 3


def test_overflow_that_only_the_sum_shows_is_skipped(strategy):
    """Every replica's own gradient is finite, what would be applied is not."""
    with strategy.scope():
        variable = keras.Variable([1.0])
        optimizer = tfscale.wrap(keras.optimizers.SGD(1.0), "none")
    apply_given(strategy, optimizer, [variable], lambda number: 2e38 * tf.ones(1))
    assert value(variable) == 1.0
    assert int(optimizer.skipped_steps) == 1


def test_nan_loss_on_one_replica_skips_all_keeps_scale(two, traced_loop):
    loop = traced_loop(two)
    loop.step(*batch_of())
    before = loop.state()
    loop.step(*batch_of(bad_loss=[BATCH - 1]))
    assert_equal(before, loop.state())
    assert (loop.scale, loop.skipped) == (SCALE, 1)


def test_nan_loss_beside_an_overflow_keeps_the_scale(two, traced_loop):
    loop = traced_loop(two)
    loop.step(*batch_of(overflow=[0], bad_loss=[BATCH - 1]))
    assert (loop.scale, loop.skipped) == (SCALE, 1)


def test_overflow_of_many_uses_hysteresis_once(two):
    loop = Loop(two, policy=dynamic(hysteresis=2), eager=True)
    loop.step(*batch_of(overflow=[0, BATCH - 1]))
    assert loop.scale == SCALE
    loop.step(*batch_of(overflow=[0]))
    assert loop.scale == SCALE / 2


def test_the_scale_recovers_on_all_replicas(two):
    loop = Loop(two, policy=dynamic(recovery_interval=1), eager=True)
    scales = []
    for overflow in [[0], [BATCH - 1], [0], [], [], []]:
        loop.step(*batch_of(overflow=overflow))
        scales.append(loop.scale / SCALE)
    assert scales == [1 / 2, 1 / 4, 1 / 8, 1 / 4, 1 / 2, 1]


@pytest.mark.slow
def test_overflow_clipped_on_a_replica_is_seen_by_all(two):
    def clip_and_apply(optimizer, pairs):
        grads = optimizer.unscale([g for g, _ in pairs])
        grads = [tf.clip_by_value(g, -0.1, 0.1) for g in grads]
        optimizer.apply_gradients(zip(grads, [v for _, v in pairs], strict=True))

    loop = Loop(two, apply=clip_and_apply)
    loop.step(*batch_of())
    before = loop.state()
    loop.step(*batch_of(overflow=[0]))
    assert_equal(before, loop.state())
    assert (loop.scale, loop.skipped) == (SCALE / 2, 1)


def test_unscale_in_a_loop_of_steps_lowers_the_scale(two):
    with two.scope():
        optimizer = tfscale.wrap("sgd", dynamic())
        optimizer.build([keras.Variable(1.0)])

    def replica_step(factor):  # the loop leaves every step out
        optimizer.unscale([optimizer.scale_loss(1.0) * factor])

    @tf.function
    def train(factors):
        for factor in factors:
            two.run(replica_step, args=(factor,))

    train(tf.constant([1.0, np.inf, np.inf]))

    assert float(optimizer.loss_scale) == SCALE / 4
    assert int(optimizer.skipped_steps) == 2


@pytest.mark.slow
def test_linked_optimizers_skip_on_all_replicas(two):
    with two.scope():
        a, b = keras.Variable([1.0]), keras.Variable([1.0])
        optimizers = [tfscale.wrap(keras.optimizers.SGD(0.1), dynamic()) for _ in range(2)]
        for optimizer, variable in zip(optimizers, (a, b), strict=True):
            optimizer.build([variable])
    link = tfscale.link(*optimizers)

    def step(number):
        pairs = []
        for optimizer, v, factor in zip(optimizers, (a, b), (1.0, number / 0.0), strict=True):
            with tf.GradientTape() as tape:
                scaled = optimizer.scale_loss(v.value[0])
            grad = tape.gradient(scaled, v.value)
            pairs.append([(tf.where(factor > 2, factor * grad, grad), v)])
        return link.apply_gradients(*pairs)

    numbers = split(two, np.array([0.0, 1.0], "float32"))
    applied = tf.function(lambda n: two.run(step, args=(n,)))(numbers)
    assert not any(bool(flag) for flag in two.experimental_local_results(applied))
    assert value(a) == value(b) == 1.0
    assert [float(o.loss_scale) for o in optimizers] == [SCALE, SCALE / 2]


# The same as one device.


def accumulating():
    """Clips, and branches at every second step, twice."""
    return keras.optimizers.SGD(
        0.05, clipnorm=0.2, gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=2
    )


# Two overflows, one of them between the two halves of an accumulated step, and a bad loss.
BATCHES = [
    {"seed": 0}, {"seed": 1}, {"seed": 2}, {"seed": 3, "overflow": [5]}, {"seed": 4},
    {"seed": 5, "bad_loss": [2]}, {"seed": 6, "overflow": [0]}, {"seed": 7}, {"seed": 8},
]  # fmt: skip


@functools.lru_cache
def one_device(model):
    """State and scale after each of BATCHES without a strategy."""
    loop = Loop(tf.distribute.get_strategy(), accumulating, model, eager=True)
    seen = []
    for settings in BATCHES:
        loop.step(*batch_of(tokens=model is embedding_model, **settings))
        seen.append((loop.state(), loop.scale))
    return seen


def takes_the_steps_of_one_device(make_loop, model=dense_model):
    loop = make_loop(accumulating, model)
    for settings, (state, scale) in zip(BATCHES, one_device(model), strict=True):
        loop.step(*batch_of(tokens=model is embedding_model, **settings))
        assert_close(loop.state(), state)
        assert loop.scale == scale


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "eager"), [(2, True), (4, False)], ids=["2-eager", "4-graph"])
def test_replicas_take_the_steps_of_one_device(replicas, eager):
    """Clipping acts on the sum, accumulation and EMA work, for which plain Keras raises."""
    takes_the_steps_of_one_device(functools.partial(Loop, strategy_of(replicas), eager=eager))


def test_clipping_acts_on_the_reduced_gradient(strategy):
    replicas = strategy.num_replicas_in_sync
    with strategy.scope():
        variable = keras.Variable([0.0])
        optimizer = tfscale.wrap(keras.optimizers.SGD(1.0, global_clipnorm=1.0), "none")
    # Each replica's gradient is within the norm, their sum is not.
    apply_given(strategy, optimizer, [variable], lambda number: tf.fill([1], 1.5 / replicas))
    np.testing.assert_allclose(value(variable), -1.0, rtol=1e-6)


@pytest.mark.slow
def test_multi_optimizer_with_accumulation_in_one(two):
    need_multi_optimizer()

    def optimizer():
        optimizers = keras.optimizers
        by_name = optimizers.OptimizerMap(optimizers.SGD(0.1))
        by_name["head/.*"] = optimizers.SGD(0.1, gradient_accumulation_steps=2)
        return optimizers.MultiOptimizer(by_name)

    def model():
        x, factor = keras.Input((4,), name="x"), keras.Input((), name="factor")
        h = Amplify()(keras.layers.Dense(3)(x), factor)
        return keras.Model(inputs(x, factor), keras.layers.Dense(1, name="head")(h))

    loops = [
        Loop(tf.distribute.get_strategy(), optimizer, model, eager=True),
        Loop(two, optimizer, model),
    ]
    for settings in BATCHES[:5]:
        for loop in loops:
            loop.step(*batch_of(**settings))
    assert_close(*(loop.state() for loop in loops))


# Kinds of gradients.


def test_slices_with_shared_rows_count_for_each(strategy):
    """The strategy hands one tensor back where all replicas gave the same one."""
    rows, replicas = tf.constant([3, 1, 3]), strategy.num_replicas_in_sync
    with strategy.scope():
        bias = keras.Variable(np.ones((3, 2), "float32"))  # as many rows as one replica gives
        table = keras.Variable(np.ones((5, 2), "float32"))
        optimizer = tfscale.wrap(keras.optimizers.SGD(0.5), 1.0)
        optimizer.build([bias, table])

    @tf.function(autograph=False)
    def step():
        optimizer.scale_loss(tf.constant(1.0))
        slices = tf.IndexedSlices(tf.ones([3, 2]), rows, tf.constant([5, 2]))
        optimizer.apply_gradients([(tf.ones([3, 2]), bias), (slices, table)])

    strategy.run(step)
    wanted = 1 - 0.5 * replicas * np.array([0, 1, 0, 2, 0], "float32")
    np.testing.assert_array_equal(table.numpy()[:, 0], wanted)


class Sees(keras.optimizers.SGD):
    """Keeps the static shapes of the gradients."""

    def __init__(self):
        super().__init__(0.1, momentum=0.9)
        self.seen = set()

    def update_step(self, gradient, variable, learning_rate):
        if isinstance(gradient, tf.IndexedSlices):
            rows = tuple(tf.get_static_value(gradient.dense_shape))
            self.seen.add((rows, tuple(gradient.values.shape)))
        else:
            self.seen.add(tuple(gradient.shape))
        super().update_step(gradient, variable, learning_rate)


def embedding_steps(loop):
    for settings in ({"seed": 0}, {"seed": 1, "overflow": [BATCH - 1]}, {"seed": 2}):
        loop.step(*batch_of(tokens=True, **settings))
    return loop


@functools.lru_cache
def embedding_loop(strategy, eager=False):
    return embedding_steps(Loop(strategy, Sees, embedding_model, eager=eager))


def assert_embedding_of_one_device(loop):
    loops = [embedding_loop(tf.distribute.get_strategy(), eager=True), loop]
    assert_close(*(loop.state() for loop in loops))
    assert [loop.scale for loop in loops] == [SCALE / 2] * 2


@pytest.mark.slow
def test_inf_in_a_repeated_row_on_one_replica_is_seen(two):
    """`IndexedSlices` are gathered, not added up, and each worker may have other rows."""
    assert_embedding_of_one_device(embedding_loop(two))


@pytest.mark.slow
def test_reduced_gradients_keep_their_static_shapes(two):
    """Without them no GPU would compile the step, and it would cost half as much again."""
    # Two tokens in each sample of the global batch.
    seen = embedding_loop(two).optimizer.inner_optimizer.seen
    assert seen == {((5, 2), (2 * BATCH, 2)), (4, 1), (1,)}


def test_half_gradients_are_summed_in_float32(strategy):
    """40,000 is a float16 number, 2 x 40,000 is not."""
    with strategy.scope():
        variable = keras.Variable([1.0], dtype="float16")
        optimizer = tfscale.wrap(keras.optimizers.SGD(1e-5), "none")
    apply_given(strategy, optimizer, [variable], lambda number: tf.constant([40000.0], tf.float16))
    assert int(optimizer.skipped_steps) == 0
    expected = 1 - 0.4 * strategy.num_replicas_in_sync
    np.testing.assert_allclose(value(variable), expected, rtol=1e-2)


def test_gradients_of_several_dtypes_reduce_together(strategy):
    dtypes = ["float16", "float32", "float64", "float32"]
    with strategy.scope():
        variables = [keras.Variable([1.0, 2.0], dtype=dtype) for dtype in dtypes]
        optimizer = tfscale.wrap(keras.optimizers.SGD(0.25), "none")
    grads = [
        lambda number, dtype=dtype: tf.cast(number * tf.ones(2), dtype) for dtype in dtypes[:3]
    ]
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        apply_given(strategy, optimizer, variables, *grads, lambda number: None)
    summed = sum(range(strategy.num_replicas_in_sync))
    for variable in variables[:3]:
        np.testing.assert_allclose(value(variable), [1 - summed / 4, 2 - summed / 4])
    np.testing.assert_allclose(value(variables[3]), [1.0, 2.0])


# Gradients that somebody else has reduced.


def reduced_by_caller(optimizer, pairs):
    context = tf.distribute.get_replica_context()
    grads = context.all_reduce(tf.distribute.ReduceOp.SUM, [g for g, _ in pairs])
    optimizer.apply_gradients(
        zip(grads, [v for _, v in pairs], strict=True), skip_gradients_aggregation=True
    )


@pytest.mark.slow
def test_gradients_the_caller_reduced_are_summed_once(two, traced_loop):
    loops = [traced_loop(two), Loop(two, apply=reduced_by_caller)]
    for settings in BATCHES:
        for loop in loops:
            loop.step(*batch_of(**settings))
    assert_close(*(loop.state() for loop in loops), rtol=1e-6)
    assert loops[0].scale == loops[1].scale
    assert loops[0].skipped == loops[1].skipped == 3


class TestReduceFlag:
    """Replicas that TensorFlow does not know of; here the other one is played by a number."""

    def train(self, elsewhere, overflow=False, bad_loss=False, **settings):
        optimizer = tfscale.wrap(keras.optimizers.SGD(1.0), dynamic())
        variable, said = keras.Variable(1.0), []

        def reduce_flag(bad):
            said.append(bad)
            return bad + elsewhere

        with tf.GradientTape() as tape:
            loss = variable * (np.nan if bad_loss else 1.0)
            scaled = optimizer.scale_loss(loss)
        grad = tape.gradient(scaled, variable.value) * (np.inf if overflow else 1.0)
        optimizer.apply_gradients([(grad, variable)], reduce_flag=reduce_flag, **settings)
        (bad,) = said
        assert (bad.shape, bad.dtype) == ((), tf.float32)
        return float(bad), value(variable), float(optimizer.loss_scale)

    def test_overflow_elsewhere_skips_here(self):
        bad, _, scale = self.train(0.0, overflow=True, skip_gradients_aggregation=True)
        assert scale == SCALE / 2
        assert self.train(bad) == (0.0, 1.0, SCALE / 2)

    def test_bad_loss_elsewhere_skips_here_keeps_the_scale(self):
        bad, _, scale = self.train(0.0, bad_loss=True, skip_gradients_aggregation=True)
        assert scale == SCALE
        assert self.train(bad) == (0.0, 1.0, SCALE)
        assert self.train(bad, overflow=True)[1:] == (1.0, SCALE)

    def test_nothing_wrong_anywhere_applies(self):
        assert self.train(0.0) == (0.0, 0.0, SCALE)

    def test_what_is_no_function_is_refused(self):
        optimizer = tfscale.wrap(keras.optimizers.SGD(1.0))
        with pytest.raises(TypeError, match="reduce_flag"):
            optimizer.apply_gradients([(tf.ones(()), keras.Variable(1.0))], reduce_flag=True)


def test_reduced_gradients_do_not_decide_by_local_loss():
    """The gradient of a NaN loss is NaN everywhere, the loss itself only on one worker."""
    scales = []
    for bad_here in (True, False):
        optimizer, variable = (
            tfscale.wrap(keras.optimizers.SGD(1.0), dynamic()),
            keras.Variable(1.0),
        )
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(variable * (np.nan if bad_here else 1.0))
        reduced = tape.gradient(scaled, variable.value) * np.nan
        optimizer.apply_gradients([(reduced, variable)], skip_gradients_aggregation=True)
        assert value(variable) == 1.0
        scales.append(float(optimizer.loss_scale))
    assert scales[0] == scales[1]


# `fit`.


def fit(strategy, compile_model, data, model=dense_model, batch_size=BATCH, **settings):
    with strategy.scope():
        keras.utils.set_random_seed(1)
        trained = model()
        compile_model(trained)
    x, factor, y = data
    history = trained.fit(
        inputs(x, factor), y, batch_size=batch_size, shuffle=False, verbose=0, **settings
    )
    assert_same_on_all_replicas(strategy, trained.optimizer, trained)
    return trained, history.history


def keras_step(model, **settings):
    optimizer = tfscale.wrap(keras.optimizers.Adam(0.05), dynamic())
    model.compile(optimizer=optimizer, loss="mse", **settings)


def whole_step(model, optimizer=keras.optimizers.Adam, **settings):
    tfscale.compile(model, tfscale.wrap(optimizer(0.05), dynamic()), loss="mse", **settings)


def four_batches(overflow=(), bad_loss=()):
    return batch_of(0, overflow, bad_loss, size=4 * BATCH)


def warns_of_skips():
    return pytest.warns(tfscale.LossScaleWarning, match="(was|were) skipped")


EAGER = {"run_eagerly": True}


@functools.lru_cache
def fit_on_one_device(weight):
    """The model after an overflow and a bad loss."""
    data = four_batches(overflow=[BATCH + 1], bad_loss=[3 * BATCH - 1])
    compile_model = functools.partial(keras_step, loss_weights=weight, **EAGER)
    with warns_of_skips():
        model, _ = fit(tf.distribute.get_strategy(), compile_model, data)
    return data, list(map(value, model.variables))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "compile_model", "settings"),
    [
        (1, whole_step, EAGER),
        (2, keras_step, EAGER),
        (2, keras_step, {}),
        (2, whole_step, {"steps_per_execution": 3}),
    ],
    ids=["1-whole_step-eager", "2-keras_step-eager", "2-keras_step", "2-whole_step"],
)
def test_fit_takes_the_steps_of_one_device(replicas, compile_model, settings):
    data, expected = fit_on_one_device(float(replicas) if ADDS_MEANS else 1.0)
    with warns_of_skips():
        many, _ = fit(strategy_of(replicas), functools.partial(compile_model, **settings), data)
    assert_close(expected, map(value, many.variables))
    assert int(many.optimizer.skipped_steps) == 2
    assert float(many.optimizer.loss_scale) == SCALE / 2


@pytest.mark.slow
def test_fit_puts_back_a_skipped_step_on_every_replica(two):
    """BatchNorm's statistics and the epoch's loss, although only one replica saw the overflow."""
    x, factor, y = four_batches()
    with two.scope():
        model = dense_model(norm=True)
        whole_step(model)
        model.optimizer.build(model.trainable_variables)
    variables = [*model.variables, *model.optimizer.variables]
    start = list(map(value, variables))

    def run(x, factor, y):
        """From the start on, with the step that was traced by the first run."""
        for variable, before in zip(variables, start, strict=True):
            variable.assign(before)
        arguments = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
        history = model.fit(inputs(x, factor), y, **arguments).history
        assert_same_on_all_replicas(two, model.optimizer, model)
        return list(map(value, model.variables)), history["loss"]

    clean, loss = run(x, factor, y)
    bad = np.full((BATCH, 4), 1e30, "float32")
    factor = np.concatenate([factor, np.r_[np.inf, np.ones(BATCH - 1)].astype("float32")])
    after, other = run(np.r_[x, bad], factor, np.r_[y, y[:BATCH]])
    assert_equal(clean, after)
    np.testing.assert_allclose(other, loss, rtol=1e-6)


def test_poisoned_statistics_of_any_replica_are_named(two):
    def compile_model(model):
        model.compile(tfscale.wrap("sgd", dynamic()), loss="mse", run_eagerly=True)

    x, factor, y = batch_of()
    x[-1] = np.nan
    with pytest.warns(tfscale.LossScaleWarning) as caught:
        model, _ = fit(two, compile_model, (x, factor, y), lambda: dense_model(norm=True))
    text = "\n".join(str(w.message) for w in caught)
    means = [v for v in model.variables if "moving_mean" in v.path]
    assert [np.isfinite(m).all() for m in means[0].value.values] == [True, False]
    assert means[0].path in text


fit_on_nothing = pytest.mark.skipif(
    _compat.KERAS < (3, 7), reason="the loss of a replica without a sample is NaN in Keras 3.6"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compile_model", "model"),
    [(whole_step, dense_model), (keras_step, embedding_model)],
    ids=["whole_step", "keras_step-Embedding"],
)
@fit_on_nothing
def test_fit_with_a_replica_without_any_sample(two, compile_model, model):
    # The last batch has one sample: one replica gets it, the other gets nothing.
    data = batch_of(size=2 * BATCH + 1, tokens=model is embedding_model)
    model, history = fit(two, compile_model, data, model, epochs=2)
    assert int(model.optimizer.skipped_steps) == 0
    assert value(model.optimizer.iterations) == 6
    assert np.isfinite(history["loss"]).all()


@pytest.mark.slow
def test_fit_in_mixed_float16_finds_its_scale(two):
    keras.config.set_dtype_policy("mixed_float16")
    policy = tfscale.Dynamic(initial_scale=2.0**24, growth_interval=100)

    def compile_model(model):
        model.compile(tfscale.wrap(keras.optimizers.SGD(0.1), policy), loss="mse")

    model, history = fit(two, compile_model, batch_of(size=16 * BATCH), epochs=2)
    assert 0 < int(model.optimizer.skipped_steps) < 16
    assert history["loss"][-1] < history["loss"][0]


@pytest.mark.parametrize("kind", [keras.Model, tfscale.Model])
def test_compile_makes_variables_in_the_models_scope(two, kind):
    """Made outside of it, all replicas would write one loss, and each worker see its own."""
    with two.scope():
        plain = dense_model()
        model = kind(plain.inputs, plain.outputs)
    tfscale.compile(model, "sgd", loss="mse")
    made = [*model.optimizer.variables, *_compat.loss_tracker(model).variables]
    assert all(two.extended.variable_created_in_scope(v.value) for v in made)


# Files.


def train_on_the_rest(models, data):
    """Trains each model on all batches but the first."""
    x, factor, y = (part[BATCH:] for part in data)
    for model in models:
        model.fit(inputs(x, factor), y, batch_size=BATCH, shuffle=False, verbose=0)


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["out of", "into"])
def test_model_file_crosses_the_border_of_a_strategy(two, tmp_path, direction):
    plain = tf.distribute.get_strategy()
    writer, reader = (two, plain) if direction == "out of" else (plain, two)
    data = batch_of(overflow=[1], size=2 * BATCH)
    model, _ = fit(writer, functools.partial(keras_step, **EAGER), data)
    model.save(tmp_path / "model.keras")
    with reader.scope():
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    optimizer = loaded.optimizer
    assert isinstance(optimizer, tfscale.LossScaleOptimizer)
    saved = [*model.variables, *model.optimizer.variables]
    assert_equal(map(value, saved), map(value, [*loaded.variables, *optimizer.variables]))
    assert int(optimizer.skipped_steps) == 1
    loaded.run_eagerly = True
    train_on_the_rest([model, loaded], data)
    if not ADDS_MEANS:
        assert_close(map(value, model.variables), map(value, loaded.variables))


@pytest.mark.slow
def test_weights_file_is_resumed_under_a_strategy(two, tmp_path):
    data = four_batches(overflow=[1])
    weight = 2.0 if ADDS_MEANS else 1.0
    as_two = functools.partial(keras_step, loss_weights=weight, **EAGER)
    model, _ = fit(tf.distribute.get_strategy(), as_two, data)
    model.save_weights(tmp_path / "a.weights.h5")
    with two.scope():
        resumed = dense_model()
        keras_step(resumed)
    resumed.load_weights(tmp_path / "a.weights.h5")
    assert float(resumed.optimizer.loss_scale) == SCALE  # halved once, grown once
    train_on_the_rest([model, resumed], data)
    assert_close(map(value, model.variables), map(value, resumed.variables))
    assert_same_on_all_replicas(two, resumed.optimizer, resumed)


# Where the replicas do not meet: XLA on GPUs, played on a CPU.


def meet_outside_of_clusters():
    return not _compat.in_xla_context()


@pytest.fixture
def loop_without_meeting(request, two, monkeypatch):
    if request.param == "cond":
        monkeypatch.setattr(two.extended, "meets", lambda: False)
    else:
        # Collectives outside, one XLA cluster with check and update on each replica.
        monkeypatch.setattr(two.extended, "meets", meet_outside_of_clusters)
        monkeypatch.setattr(_compat, "strategy_without_merge_call_in_clusters", lambda _: True)
    return functools.partial(Loop, two, update=request.param)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loop_without_meeting", "model"),
    [("cond", embedding_model), ("compiled", dense_model)],
    ids=["cond-Embedding", "compiled"],
    indirect=["loop_without_meeting"],
)
def test_replicas_that_never_meet_equal_one_device(loop_without_meeting, model):
    takes_the_steps_of_one_device(loop_without_meeting, model)


@pytest.mark.slow
@pytest.mark.parametrize("loop_without_meeting", ["compiled"], indirect=True)
def test_embedding_on_replicas_that_never_meet(loop_without_meeting):
    """Each replica adds rows to its own copy of the table; "cond" has dense gradients alone."""
    loop = loop_without_meeting(Sees, embedding_model)
    assert_embedding_of_one_device(embedding_steps(loop))


def collectives(loop):
    """How many collectives one step has in all its functions."""
    graph = loop.trace().as_graph_def()
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    return sum(node.op.startswith("Collective") for node in nodes)


@pytest.mark.slow
def test_step_compiled_on_replicas_builds_optimizer(two, monkeypatch):
    """Keras raises. No more than the trace, as XLA runs collectives on GPUs alone."""
    monkeypatch.setattr(two.extended, "meets", meet_outside_of_clusters)
    loop = Loop(two, accumulating, build=False)
    step = tf.function(loop.replica_step, jit_compile=True)
    # In a lambda, because on a CPU the strategy would trace all replicas in one function.
    loop.function = tf.function(lambda *data: two.run(lambda *mine: step(*mine), args=data))
    assert collectives(loop) == 2
    for variable in loop.optimizer.variables:
        assert two.extended.variable_created_in_scope(variable.value)
        assert len(two.experimental_local_results(variable.value)) == 2


def test_sums_of_a_replica_compiled_alone_are_in_order(two, monkeypatch):
    """XLA orders what needs each other; in two orders the replicas would wait for ever."""
    monkeypatch.setattr(two.extended, "meets", meet_outside_of_clusters)
    with two.scope():
        variables = [keras.Variable([1.0], dtype=dtype) for dtype in ("float32", "float64") * 2]
        optimizers = [tfscale.wrap(keras.optimizers.SGD(0.1), dynamic()) for _ in range(2)]
        for optimizer, mine in zip(optimizers, (variables[:2], variables[2:]), strict=True):
            optimizer.build(mine)
    link, graphs = tfscale.link(*optimizers), []

    def step():
        graphs.append(tf.compat.v1.get_default_graph())
        pairs = [[(v * 2.0, v) for v in some] for some in (variables[:2], variables[2:])]
        return link.apply_gradients(*pairs, unscaled=True)

    step = tf.function(step, jit_compile=True, autograph=False)
    tf.function(lambda: two.run(lambda: step()), autograph=False).get_concrete_function()
    sums = [op for op in graphs[-1].get_operations() if op.type == "CollectiveReduceV2"]
    assert len(sums) == 4
    for before, after in itertools.pairwise(sums):
        assert graph.key(before) in set(map(graph.key, graph.ancestors([after.inputs[0]])))


@pytest.mark.parametrize("synchronized", [False, True])
def test_gradients_of_the_last_layers_are_sent_first(two, monkeypatch, synchronized):
    """During the backward pass, unless that contains collectives which could come in between."""
    monkeypatch.setattr(two.extended, "meets", meet_outside_of_clusters)
    monkeypatch.setattr(replicas, "_BUFFER", 8)
    with two.scope():
        variables = [keras.Variable([1.0], name=f"v{i}") for i in range(3)]
        optimizer = tfscale.wrap(keras.optimizers.SGD(0.1), dynamic())
        optimizer.build(variables)
    traces = []

    def step():
        grads = [v * 2.0 for v in variables]
        if synchronized:
            context = tf.distribute.get_replica_context()
            grads[0] = context.all_reduce(tf.distribute.ReduceOp.SUM, grads[0])
        traces.append((tf.compat.v1.get_default_graph(), grads))
        return optimizer.apply_or_skip(zip(grads, variables, strict=True), unscaled=True)

    step = tf.function(step, jit_compile=True, autograph=False)
    tf.function(lambda: two.run(lambda: step()), autograph=False).get_concrete_function()
    traced, grads = traces[-1]
    sums = [op for op in traced.get_operations() if op.type == "CollectiveReduceV2"]
    needs = [set(map(graph.key, graph.ancestors([sent.inputs[0]]))) for sent in sums]
    has = [[graph.key(g.op) in need for g in grads] for need in needs]
    if synchronized:
        assert has == [[False] * 3, [True] * 3]
    else:
        assert has == [[False, True, True], [True] * 3]


# `fit` with XLA on each replica.


@pytest.fixture
def gpus(two, monkeypatch):
    """Two CPUs taken for GPUs. XLA has no sum for them: a replica doubles what it has.

    So both replicas must get the same samples, see `twice`.
    """
    monkeypatch.setattr(two.extended, "meets", meet_outside_of_clusters)
    monkeypatch.setattr(two.extended, "doubles", True)
    monkeypatch.setattr(replicas, "_BUFFER", 64)  # several, also for tiny models
    in_clusters = lambda strategy: strategy is two  # noqa: E731
    monkeypatch.setattr(_compat, "strategy_without_merge_call_in_clusters", in_clusters)
    return two


def twice(data, batches):
    """Global batches of twice as many samples, whose halves are the same."""
    starts = np.cumsum([0, *batches])
    rows = [r for a, b in itertools.pairwise(starts) for r in [*range(a, b)] * 2]
    return tuple(part[rows] for part in data)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "batches", "settings"),
    [
        (functools.partial(dense_model, norm=True), (4, 4, 4), {"retry": 1}),
        (embedding_model, (4, 4, 4, 2), {"steps_per_execution": 2}),
    ],
    ids=["BatchNorm-retry", "Embedding-uneven-steps_per_execution"],
)
def test_fit_compiled_on_replicas_equals_one_device(gpus, model, batches, settings):
    """Uneven batches, skips, metrics, and with `retry` and `steps_per_execution` loops."""
    tokens = model is embedding_model
    data = batch_of(overflow=[5], bad_loss=[9], tokens=tokens, size=sum(batches))
    # Adam squares every occurrence of a row by itself, but here they have been added up.
    adam_or_sgd = keras.optimizers.SGD if tokens else keras.optimizers.Adam
    compile_model = functools.partial(
        whole_step, optimizer=adam_or_sgd, metrics=["mae"], **settings
    )
    as_two = functools.partial(compile_model, loss_weights=2.0 if ADDS_MEANS else 1.0, **EAGER)
    data = twice(data, batches)
    with warns_of_skips():
        one, expected = fit(tf.distribute.get_strategy(), as_two, data, model)
    with warns_of_skips():
        compiled = functools.partial(compile_model, jit_compile=True)
        many, history = fit(gpus, compiled, data, model)
    assert_close(map(value, many.variables), map(value, one.variables))
    assert_same_on_all_replicas(gpus, many.optimizer, many)
    assert many.optimizer.record().steps == one.optimizer.record().steps
    assert_close(history["mae"], expected["mae"])


class Logs(tfscale.Model):
    """Adds numbers to the logs."""

    def train_step(self, data):
        logs = super().train_step(data)
        samples = tf.reduce_sum(tf.ones_like(data[1], "int32"))
        return {**logs, "mine": {"samples": samples, "always": 2.5, "pair": [1, logs["loss"]]}}


@pytest.fixture
def model_with_logs(gpus):
    settings = {"loss": "mse", "jit_compile": True, "steps_per_execution": 2}
    with gpus.scope():
        x = keras.Input((4,))
        model = Logs(x, keras.layers.Dense(1)(x))
        tfscale.compile(model, keras.optimizers.SGD(0.0), **settings)
        model.optimizer.build(model.trainable_variables)
    return model


def test_logs_are_not_copied_between_replicas(gpus, model_with_logs):
    """The host would wait for the end of every step."""
    data = tf.ones([3, 4]), tf.zeros([3, 1])
    loss = tf.reduce_mean(model_with_logs(data[0]) ** 2)
    step = tf.function(lambda: gpus.run(model_with_logs.train_step, args=(data,)), autograph=False)
    logs = step()
    assert all(isinstance(value, tf.Tensor) for value in tf.nest.flatten(logs))
    assert (int(logs["mine"]["samples"]), float(logs["mine"]["always"])) == (3, 2.5)
    assert (float(logs["loss"]), int(logs["skipped_steps"])) == (pytest.approx(float(loss)), 0)


def test_no_step_of_fit_waits_for_all_replicas(gpus, model_with_logs):
    """As it would if it returned something. The logs are those of a step with results."""
    model_with_logs.make_train_function()
    train_function = model_with_logs.train_function
    data = tf.data.Dataset.from_tensors((tf.ones([6, 4]), tf.zeros([6, 1]))).repeat(3)
    data = gpus.experimental_distribute_dataset(data)
    expected = train_function(itertools.islice(data, 2))
    batches = iter(data)
    for _ in range(2):  # two steps, then one
        found = train_function(batches)
        tf.nest.map_structure(np.testing.assert_allclose, found, expected)
    with pytest.raises(tf.errors.OutOfRangeError):
        train_function(batches)
    assert model_with_logs.optimizer.record().steps == 5
    (step,) = train_function._step._list_all_concrete_functions()
    assert step.outputs == []


class OddLogs(tfscale.Model):
    """Its logs are no numbers, and others where samples have weights."""

    def train_step(self, data):
        logs = {"text": "a", **super().train_step(data), "size": tf.shape(data[0])[:1]}
        unknown = tf.numpy_function(lambda x: x[:, 0], [data[0]], "float32")
        return {**logs, "weights": 2.0} if len(data) == 3 else {**logs, "unknown": unknown}


@pytest.mark.slow
def test_fit_takes_logs_that_are_no_numbers(two):
    """Each trace has its own logs, also if it runs again after another."""
    with two.scope():
        x = keras.Input((4,))
        model = OddLogs(x, keras.layers.Dense(1)(x))
        tfscale.compile(model, "sgd", loss="mse")
    data = tf.ones([2, 4]), tf.zeros([2, 1])
    for weights in [(), (tf.ones([2]),), ()]:
        batches = tf.data.Dataset.from_tensors((*data, *weights))
        logs = model.fit(batches, shuffle=False, verbose=0).history
        usual = ["loss", "loss_scale", "size", "skipped_steps", "text"]
        assert sorted(logs) == sorted([*usual, "weights" if weights else "unknown"])
        assert (logs["text"], float(logs["loss_scale"][0])) == ([b"a"], 1.0)
        np.testing.assert_array_equal(logs.get("weights", [2.0]), [2.0])
        np.testing.assert_array_equal(logs.get("unknown", [[1.0]]), [[1.0]])


def test_model_compiled_very_often_still_fits(two, monkeypatch):
    """What `fit` calls does not call what an earlier `compile` made."""
    make, depths = keras.Model.make_train_function, []

    def counted(model, force=False):
        depths.append(len(inspect.stack(0)))
        make(model, force)

    monkeypatch.setattr(keras.Model, "make_train_function", counted)
    with two.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    for _ in range(2):
        tfscale.compile(model, "sgd", loss="mse")
        model.make_train_function()
    assert depths[0] == depths[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [keras.Model, tfscale.Model])
def test_compiled_on_each_replica_evaluates_and_is_saved(gpus, kind, tmp_path):
    with gpus.scope():
        keras.utils.set_random_seed(1)
        x = keras.Input((4,))
        model = kind(x, keras.layers.Dense(1)(keras.layers.Dropout(0.5, seed=3)(x)))
    for _ in range(2):  # a second call compiles once, not twice
        tfscale.compile(model, "sgd", loss="mse", jit_compile=True)
    x, _, y = twice(batch_of(), [4, 4])
    for _ in range(3):
        model.train_on_batch(x[:8], y[:8])
    (seeds,) = [v for v in model.non_trainable_variables if "seed" in v.path]
    for state in gpus.experimental_local_results(seeds.value):
        assert state.numpy().tolist() == [3, 3]
    expected, loss = model.predict(x, verbose=0), model.evaluate(x, y, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.jit_compile  # without a strategy by Keras
    loaded.run_eagerly = True
    with gpus.scope():
        assert not keras.saving.load_model(tmp_path / "model.keras").jit_compile
    assert_close([loaded.predict(x, verbose=0)], [expected])
    np.testing.assert_allclose(loaded.evaluate(x, y, verbose=0), loss, rtol=1e-4)


def test_agreement_rides_along_with_the_gradients(two, traced_loop):
    """One buffer, one collective on each of two replicas, as without loss scaling."""
    assert collectives(traced_loop(two)) == 2


# What cannot work is refused.


def test_optimizer_made_out_of_the_scope_is_refused(two):
    with two.scope():
        variable = keras.Variable([1.0])
    optimizer = tfscale.wrap(keras.optimizers.SGD(1.0), "none")
    with pytest.raises(ValueError, match=r"optimizer must be made in the scope"):
        apply_given(two, optimizer, [variable], lambda number: tf.ones(1))


def test_inner_optimizer_out_of_the_scope_is_refused(two):
    inner = keras.optimizers.SGD(1.0)
    with two.scope():
        variable, optimizer = keras.Variable([1.0]), tfscale.wrap(inner, "none")
    with pytest.raises(ValueError, match=r"optimizer must be made in the scope"):
        apply_given(two, optimizer, [variable], lambda number: tf.ones(1))


def test_model_made_out_of_the_scope_is_refused(two):
    variable = keras.Variable([1.0])
    with two.scope():
        optimizer = tfscale.wrap(keras.optimizers.SGD(1.0), "none")
    with pytest.raises(ValueError, match=r"model must be made in the scope"):
        apply_given(two, optimizer, [variable], lambda number: tf.ones(1))


def test_apply_out_of_a_replica_is_refused(two):
    with two.scope():
        variable, optimizer = keras.Variable([1.0]), tfscale.wrap(keras.optimizers.SGD(1.0))
        for pairs in ([(tf.ones(1), variable)], []):
            with pytest.raises(ValueError, match=r"strategy\.run"):
                optimizer.apply_gradients(pairs)


@pytest.mark.slow
def test_one_cluster_of_all_replicas_is_refused(two):
    loop = Loop(two)
    loop.function = tf.function(loop.function.python_function, jit_compile=True)
    with pytest.raises(ValueError, match="cannot share one XLA cluster"):
        loop.step(*batch_of())


class NoXla(keras.layers.Layer):
    """A layer that XLA cannot compile."""

    def __init__(self):
        super().__init__()
        self.supports_jit = False

    def call(self, x):
        return x


class SeesXla(keras.layers.Layer):
    """Keeps whether XLA compiles what is traced."""

    compiled = None

    def call(self, x):
        self.compiled = _compat.in_xla_context()
        return x


@pytest.mark.parametrize(
    ("unfit", "compiled"),
    [(None, True), ("size", False), ("table", False), ("layer", False), ("asked", False)],
)
def test_auto_leaves_xla_off_where_it_may_harm(gpus, monkeypatch, unfit, compiled):
    """A new shape stops the other replicas; a table becomes a dense gradient."""
    monkeypatch.setattr(replica_jit, "_TABLES", 39 if unfit == "table" else 40)
    with gpus.scope():
        x = keras.Input((), dtype="int32")
        h = keras.layers.Embedding(5, 2)(x)
        h = NoXla()(h) if unfit == "layer" else h
        model = keras.Model(x, SeesXla()(h))
        optimizer = tfscale.wrap("sgd", "none")
        optimizer.build(model.trainable_variables)
    jit_compile = False if unfit == "asked" else "auto"
    tfscale.compile(model, optimizer, loss="mse", jit_compile=jit_compile)
    data = tf.data.Dataset.from_tensor_slices((np.zeros(8, "int32"), np.zeros((8, 2))))
    data = gpus.experimental_distribute_dataset(data.batch(4, drop_remainder=unfit != "size"))
    step = tf.function(lambda batch: gpus.run(model.train_step, args=(batch,)), autograph=False)
    step.get_concrete_function(data.element_spec)
    assert model.layers[-1].compiled is compiled
    assert not model.jit_compile  # so that `evaluate` is a plain graph


def test_compilation_of_replicas_on_cpus_is_refused(two):
    with two.scope():
        plain = dense_model()
        own = tfscale.Model(plain.inputs, plain.outputs)
    for model in (plain, own):
        with pytest.raises(ValueError, match=r"every replica on a GPU\. Received: .*CPU:1"):
            tfscale.compile(model, "sgd", loss="mse", jit_compile=True)
        assert not model.compiled


@pytest.mark.parametrize(
    ("layer", "settings", "message"),
    [
        (keras.layers.Identity, {"run_eagerly": True}, "a step that is traced"),
        (NoXla, {}, "no_xla without `supports_jit`"),
    ],
    ids=["eager", "a layer"],
)
def test_compiling_a_step_xla_cannot_take_is_refused(gpus, layer, settings, message):
    with gpus.scope():
        model = keras.Sequential([keras.Input((4,)), layer()])
    with pytest.raises(ValueError, match=message):
        tfscale.compile(model, "sgd", loss="mse", jit_compile=True, **settings)
    assert not model.compiled
