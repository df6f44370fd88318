"""Loops written by hand: whatever lives in which function, each gradient is divided just once."""

import functools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import slow_graph, slow_jit

import tfscale

SCALE = 1024.0


class Loop:
    """A small regression trained by hand; subclasses say what lives in which function.

    `parts` are functions of a loop that stand in the place of its methods of that name.
    """

    def __init__(self, optimizer, between=None, losses=None, names=3, **parts):
        rng = np.random.default_rng(0)
        self.weight = keras.Variable(rng.normal(size=(3, 1)).astype("float32"), name="weight")
        self.bias = keras.Variable(np.zeros(1, "float32"), name="bias")
        self.variables = [self.weight, self.bias]
        self.optimizer = optimizer
        self.between = between or (lambda optimizer, grads: grads)
        self.losses = losses or (lambda loss: loss)
        self.names = names
        self.parts = parts
        for name in parts:
            setattr(self, name, self.part(name))
        optimizer.build(self.variables)
        self.make()
        self.start = [v.numpy() for v in self.variables], [v.numpy() for v in optimizer.variables]

    def reset(self):
        variables, weights = self.start
        for variable, value in zip(self.variables, variables, strict=True):
            variable.assign(value)
        self.optimizer.set_weights(weights)

    def loss(self, batch):
        return self.losses(tf.reduce_mean((batch @ self.weight.value + self.bias.value - 1.0) ** 2))

    def grads(self, batch):
        with tf.GradientTape() as tape:
            loss = self.loss(batch)
            if self.names == 2:
                scaled = self.optimizer.get_scaled_loss(loss)
            else:
                scaled = self.optimizer.scale_loss(loss)
        return tape.gradient(scaled, [v.value for v in self.variables])

    def change(self, grads):
        return self.between(self.optimizer, grads)

    def apply(self, grads):
        if self.names == 2:
            grads = self.optimizer.get_unscaled_gradients(grads)
        self.optimizer.apply_gradients(zip(grads, self.variables, strict=True))

    def make(self):
        """Turns the parts into functions."""

    def step(self, batch):
        self.apply(self.change(self.grads(tf.constant(batch, tf.float32))))

    def state(self):
        inner = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        return [v.numpy().tobytes() for v in [*self.variables, *inner.variables]]

    def part(self, name):
        """A part as it was written, whatever `make` has made of it."""
        return functools.partial(self.parts.get(name) or getattr(type(self), name), self)


class Eager(Loop):
    pass


class One(Loop):
    jit_compile = False

    def make(self):
        step = lambda batch: self.apply(self.change(self.grads(batch)))  # noqa: E731
        function = tf.function(step, jit_compile=self.jit_compile, autograph=False)
        self.step = lambda batch: function(tf.constant(batch, tf.float32))


class Jit(One):
    jit_compile = True


class Nested(Loop):
    """Each part is a function of its own inside a function."""

    def make(self):
        self.grads, self.change = tf.function(self.part("grads")), tf.function(self.part("change"))
        step = tf.function(lambda batch: self.apply(self.change(self.grads(batch))))
        self.step = lambda batch: step(tf.constant(batch, tf.float32))


class Two(Loop):
    def make(self):
        self.grads = tf.function(self.part("grads"))
        change, apply = self.part("change"), self.part("apply")
        self.apply = tf.function(lambda grads: apply(change(grads)))
        self.change = lambda grads: grads


class Three(Loop):
    def make(self):
        for name in ("grads", "change", "apply"):
            setattr(self, name, tf.function(self.part(name)))


class EagerUpdate(Loop):
    def make(self):
        self.grads = tf.function(self.part("grads"))


class EagerLoss(Loop):
    def make(self):
        self.apply = tf.function(self.part("apply"))


LOOPS = [Eager, One, Jit, Nested, Two, Three, EagerUpdate, EagerLoss]


class Plain(keras.optimizers.SGD):
    """SGD that has the names and does nothing under them."""

    def unscale(self, grads):
        return grads


def plain_sgd():
    return Plain(0.1, momentum=0.9)


def sgd(policy=SCALE):
    return tfscale.wrap(keras.optimizers.SGD(0.1, momentum=0.9), policy)


def dynamic(scale=SCALE, **settings):
    return sgd(tfscale.Dynamic(initial_scale=scale, **settings))


def batch(rows=4, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, 3)).astype("float32")


BATCHES = [batch(4, seed) for seed in range(4)]
NAN = np.full((4, 3), np.nan, "float32")
HUGE = np.full((4, 3), 1e18, "float32")  # the loss is finite, the gradients times 2**40 are not


def clip(optimizer, grads):
    """By value, which hides an infinity and turns none of it into NaN, then by the norm."""
    grads = [tf.clip_by_value(g, -1.0, 1.0) for g in optimizer.unscale(grads)]
    return tf.clip_by_global_norm(grads, 0.25)[0]


def assert_same(loop, plain):
    """Bit for bit where both are executed alike; XLA decides about the last bit by itself."""
    for got, wanted in zip(loop.variables, plain.variables, strict=True):
        if type(loop) is type(plain) and not isinstance(loop, Jit):
            assert got.numpy().tobytes() == wanted.numpy().tobytes()
        else:
            np.testing.assert_allclose(got.numpy(), wanted.numpy(), rtol=1e-5, atol=1e-6)


def each(*kinds):
    quick = (Eager, One)
    kinds = [pytest.param(k, marks=[pytest.mark.slow] * (k not in quick)) for k in kinds]
    return pytest.mark.parametrize("kind", kinds, ids=lambda kind: kind.__name__)


HIGHEST = 2.0**40
# Every kind with clipping, and without it one of each sort: all in one, apart, in XLA.
PAIRS = [*((kind, clip) for kind in LOOPS), (One, None), (Three, None), (Jit, None)]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            pair,
            marks=[pytest.mark.slow] * (pair not in [(Eager, clip), (One, clip)]),
            id=f"{pair[0].__name__}-{pair[1] and pair[1].__name__}",
        )
        for pair in PAIRS
    ],
)
def traced_loop(request):
    kind, between = request.param
    return kind(dynamic(HIGHEST, max_scale=HIGHEST), between)


@pytest.fixture
def loop(traced_loop):
    """Before its first step, but traced by the first test with it."""
    traced_loop.reset()
    return traced_loop


# Good steps.


def test_a_loop_equals_the_one_without_scaling(loop):
    # Only what is executed alike can be the same to the last bit.
    plain = (One if type(loop) is One else Eager)(plain_sgd(), loop.between)
    # Another number of rows has the functions traced again.
    rows = 6 if loop.between is clip and not isinstance(loop, Jit) else 4
    for step, data in enumerate([*BATCHES[:2], batch(rows, 5), BATCHES[3]]):
        loop.step(data)
        plain.step(data)
        assert_same(loop, plain)
        assert int(loop.optimizer.iterations) == step + 1


@pytest.mark.slow
@each(Eager, Two)
def test_keras_2_names_equal_those_of_keras_3(kind):
    old, new = kind(sgd(), names=2), kind(sgd())
    for data in [*BATCHES, NAN, BATCHES[0]]:
        old.step(data)
        new.step(data)
        assert_same(old, new)
    assert int(old.optimizer.skipped_steps) == int(new.optimizer.skipped_steps) == 1


def test_the_names_of_keras_2_still_work():
    optimizer = dynamic(8.0)
    assert float(optimizer.get_scaled_loss(2.0)) == 16.0
    assert float(optimizer.get_scaled_loss(lambda: 2.0)()) == 16.0
    assert float(optimizer.loss_scale) == 8.0
    assert optimizer.dynamic
    assert int(optimizer.dynamic_counter) == 0
    assert not sgd(8.0).dynamic
    assert sgd(8.0).dynamic_counter is None
    grads = optimizer.get_unscaled_gradients([tf.constant([16.0]), None])
    assert grads[0].numpy().tolist() == [2.0]
    assert grads[1] is None


@each(Eager, One, Three)
def test_parts_of_the_gradients_can_be_unscaled_apart(kind):
    def apart(optimizer, grads):
        return [*optimizer.unscale(grads[:1]), *optimizer.unscale(grads[1:])]

    loop, plain = kind(sgd(), apart), Eager(plain_sgd(), apart)
    for data in BATCHES[:2]:
        loop.step(data)
        plain.step(data)
    assert_same(loop, plain)


@pytest.mark.slow
@each(Eager, Three, EagerUpdate)
def test_unscaling_one_step_does_not_change_the_next(kind):
    # Now with clipping, now without: functions that are traced already must not divide twice.
    loop, plain = kind(sgd()), Eager(plain_sgd())
    for data in BATCHES[:2]:
        loop.step(data)
        plain.step(data)
    loop.between = plain.between = clip
    loop.make()
    plain.make()
    for data in BATCHES[:2]:
        loop.step(data)
        plain.step(data)
    assert_same(loop, plain)


@pytest.mark.slow
def test_an_update_traced_before_unscale_divides_once():
    loop = Three(tfscale.wrap(keras.optimizers.SGD(1.0), SCALE))
    data = tf.constant(BATCHES[1])
    for change in (lambda grads: grads, loop.optimizer.unscale):  # the same function for both
        before, grads = loop.weight.numpy(), loop.grads(data)
        loop.apply(change(grads))
        np.testing.assert_array_equal(loop.weight.numpy(), before - grads[0].numpy() / SCALE)


# Bad steps.


def test_an_overflow_skips_and_lowers_though_clipped(loop):
    loop.step(BATCHES[0])
    before = loop.state()
    for n in range(1, 4):
        loop.step(HUGE)
        assert loop.state() == before
        assert int(loop.optimizer.skipped_steps) == n
        assert float(loop.optimizer.loss_scale) == 2.0 ** (40 - n)
    loop.step(BATCHES[2])
    assert int(loop.optimizer.skipped_steps) == 3
    assert int(loop.optimizer.iterations) == 2


def test_a_nan_loss_skips_and_leaves_the_scale(loop):
    loop.step(BATCHES[0])
    before = loop.state()
    for n in range(1, 4):
        loop.step(NAN)
        assert loop.state() == before
        assert int(loop.optimizer.skipped_steps) == n
    assert float(loop.optimizer.loss_scale) == HIGHEST
    loop.step(BATCHES[1])
    assert int(loop.optimizer.skipped_steps) == 3
    assert int(loop.optimizer.iterations) == 2


def test_eager_steps_and_functions_can_take_turns():
    # A function that was traced long ago says nothing to Python any more.
    loop = Eager(dynamic())
    eager, traced = loop.grads, tf.function(loop.grads)
    turns = [(traced, BATCHES[0]), (eager, BATCHES[1]), (traced, NAN), (traced, BATCHES[2])]
    for loop.grads, data in [*turns, (eager, NAN), (traced, NAN), (eager, BATCHES[3])]:
        loop.step(data)
    assert int(loop.optimizer.skipped_steps) == 3
    assert int(loop.optimizer.iterations) == 4
    assert float(loop.optimizer.loss_scale) == SCALE  # all three were seen as bad losses


# Several losses.


@each(Eager, One, Three)
def test_several_scaled_losses_share_a_step(kind):
    def grads(loop, batch):
        with tf.GradientTape() as tape:
            first = loop.optimizer.scale_loss(loop.loss(batch))
            second = loop.optimizer.scale_loss(tf.reduce_sum(loop.weight.value**2))
            total = first + second
        return tape.gradient(total, [v.value for v in loop.variables])

    loop, plain = kind(sgd(), grads=grads), Eager(plain_sgd(), grads=grads)
    for data in BATCHES[:3]:
        loop.step(data)
        plain.step(data)
    assert_same(loop, plain)
    before = loop.state()
    loop.step(NAN)  # only the first of the losses
    assert loop.state() == before
    assert int(loop.optimizer.skipped_steps) == 1


@pytest.mark.parametrize("how", ["eager", slow_graph])
def test_any_bad_loss_of_a_step_counts_as_one(how):
    variable = keras.Variable([1.0])
    policy = tfscale.Dynamic(initial_scale=SCALE)
    optimizer = tfscale.wrap(keras.optimizers.SGD(1.0), policy)
    optimizer.build([variable])

    def step(losses):
        scaled = [optimizer.scale_loss(loss) for loss in losses]
        optimizer.apply_gradients([(tf.reshape(tf.add_n(scaled), [1]), variable)])

    run = tf.function(step) if how == "graph" else step
    for bad in range(3):
        run([tf.constant(np.nan if i == bad else 1.0) for i in range(3)])
        assert float(optimizer.loss_scale) == SCALE
        assert int(optimizer.skipped_steps) == bad + 1
    run([tf.constant(1.0)] * 3)
    assert variable.numpy().tolist() == [-2.0]


def test_losses_may_be_nested():
    optimizer = sgd(4.0)
    loss = {"a": tf.constant(1.0), "b": (tf.constant(2.0, tf.float16), [3.0])}
    scaled = optimizer.scale_loss(loss)
    assert float(scaled["a"]) == 4.0
    assert float(scaled["b"][0]) == 8.0
    assert scaled["b"][0].dtype == tf.float32
    assert float(scaled["b"][1][0]) == 12.0
    optimizer.scale_loss({"a": 1.0, "b": [np.nan]})
    optimizer.apply_gradients([(tf.fill([1], np.nan), keras.Variable([1.0]))])
    assert optimizer.record().skipped_loss == 1


def test_gradients_may_be_nested():
    grads = {"a": tf.constant([4.0]), "b": (None, [tf.constant([8.0], tf.float16)])}
    optimizer = sgd(4.0)
    optimizer.scale_loss(1.0)
    unscaled = optimizer.unscale(grads)
    assert unscaled["a"].numpy().tolist() == [1.0]
    assert unscaled["b"][0] is None
    assert unscaled["b"][1][0].numpy().tolist() == [2.0]


@each(Eager, One, Three)
def test_two_updates_of_a_loss_divide_by_one_scale(kind):
    # The first of them lets the scale grow.
    def apply(loop, grads):
        for pair in zip(grads, loop.variables, strict=True):
            loop.optimizer.apply_gradients([pair])

    def optimizer():
        policy = tfscale.Dynamic(initial_scale=4.0, growth_interval=1)
        return tfscale.wrap(keras.optimizers.SGD(0.1), policy)

    loop, plain = kind(optimizer(), apply=apply), Eager(keras.optimizers.SGD(0.1), apply=apply)
    plain.optimizer.scale_loss = lambda loss: loss
    for data in BATCHES[:3]:
        loop.step(data)
        plain.step(data)
        assert_same(loop, plain)


@each(Eager, One, Three)
def test_micro_batches_are_one_step(kind):
    def grads(loop, batch):
        parts = [Loop.grads(loop, half) for half in tf.split(batch, 2)]
        return [a + b for a, b in zip(*parts, strict=True)]

    loop, plain = kind(dynamic(), grads=grads), Eager(plain_sgd(), grads=grads)
    for data in BATCHES:
        loop.step(data)
        plain.step(data)
    assert_same(loop, plain)
    half_bad = np.concatenate([NAN[:2], batch(2)])
    before = loop.state()
    loop.step(half_bad)  # the first half only
    assert loop.state() == before
    assert float(loop.optimizer.loss_scale) == SCALE


@pytest.mark.parametrize("how", ["eager", "branch", "two traces", slow_jit])
def test_a_bad_earlier_micro_batch_keeps_the_scale(how):
    # The last call alone sees NaN in the sum, which looks like an overflow.
    optimizer = tfscale.wrap(keras.optimizers.SGD(1.0), tfscale.Dynamic(initial_scale=SCALE))
    variable, total = keras.Variable([1.0]), tf.Variable([0.0])
    optimizer.build([variable])

    def micro(factor, more, last):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(variable.value) * factor + more)
        total.assign_add(tape.gradient(loss, variable.value))

        def apply():
            optimizer.apply_gradients([(total.read_value(), variable)])
            total.assign([0.0])
            return True

        if isinstance(last, bool):
            return last and apply()
        return tf.cond(last, apply, lambda: False)

    if how != "eager":
        micro = tf.function(micro, jit_compile=how == "jit", autograph=False)
    flag = (lambda last: last) if how in ("eager", "two traces") else tf.constant
    one = tf.constant(1.0)
    for finite_gradients, after, skipped, nonfinite in ((False, -3.0, 2, 0), (True, -11.0, 2, 2)):
        for bad in [(1.0, 1.0), (np.nan, 1.0), (1.0, np.nan), (1.0, 1.0)]:
            for place, x in enumerate(map(tf.constant, bad)):
                micro(*((one, x) if finite_gradients else (x, one)), flag(place == 1))
        assert variable.numpy().tolist() == [after]
        record = optimizer.record()
        assert (record.skipped_loss, record.skipped_overflow) == (skipped, 0)
        assert record.nonfinite_losses == nonfinite
        assert float(optimizer.loss_scale) == SCALE


# Where the loss is scaled.


def test_a_loss_scaled_in_a_nested_function_is_seen():
    optimizer, variable = dynamic(), keras.Variable([1.0])
    optimizer.build([variable])
    scale = tf.function(lambda loss: optimizer.scale_loss(loss))

    @tf.function
    def step(loss):
        with tf.GradientTape() as tape:
            scaled = scale(loss * variable.value[0])
        optimizer.apply_gradients([(tape.gradient(scaled, variable.value), variable)])

    step(tf.constant(np.nan))
    assert int(optimizer.skipped_steps) == 1
    assert float(optimizer.loss_scale) == SCALE
    step(tf.constant(1.0))
    assert int(optimizer.iterations) == 1


@pytest.mark.slow
def test_losses_scaled_in_the_body_of_a_loop_are_seen():
    variable = keras.Variable([0.0])
    policy = tfscale.Dynamic(initial_scale=SCALE)
    optimizer = tfscale.wrap(keras.optimizers.SGD(1.0), policy)
    optimizer.build([variable])

    @tf.function
    def step(losses):
        total = tf.zeros([1])
        for loss in losses:
            with tf.GradientTape() as tape:
                scaled = optimizer.scale_loss(loss * (variable.value[0] + 1.0))
            total += tape.gradient(scaled, variable.value)
        optimizer.apply_gradients([(total, variable)])

    step(tf.constant([1.0, 2.0, 3.0]))
    assert variable.numpy().tolist() == [-6.0]
    step(tf.constant([1.0, np.nan, 3.0]))
    assert variable.numpy().tolist() == [-6.0]
    assert float(optimizer.loss_scale) == SCALE
    step(tf.constant([1.0, 1.0]))
    assert variable.numpy().tolist() == [-8.0]


@pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_whole_steps_in_the_body_of_a_loop(jit_compile):
    variable = keras.Variable([0.0])
    policy = tfscale.Dynamic(initial_scale=4.0, growth_interval=2)
    optimizer = tfscale.wrap(keras.optimizers.SGD(1.0), policy)
    optimizer.build([variable])

    @tf.function(jit_compile=jit_compile)
    def steps(losses):
        for i in tf.range(4):
            with tf.GradientTape() as tape:
                scaled = optimizer.scale_loss(losses[i] * (variable.value[0] + 1.0))
            optimizer.apply_gradients([(tape.gradient(scaled, variable.value), variable)])

    steps(tf.constant([1.0, 2.0, np.nan, 3.0]))
    assert variable.numpy().tolist() == [-6.0]
    assert float(optimizer.loss_scale) == 8.0
    assert int(optimizer.skipped_steps) == 1


# A gradient penalty: second derivatives.


@pytest.mark.parametrize(
    ("how", "with_unscale"),
    [
        ("eager", False),
        ("eager", True),
        pytest.param("graph", True, marks=pytest.mark.slow),
        pytest.param("jit", False, marks=pytest.mark.slow),
    ],
)
def test_a_gradient_penalty_equals_one_without_scaling(how, with_unscale):
    def loop(optimizer):
        variable = keras.Variable([[1.0, -2.0], [0.5, 0.25]])
        optimizer.build([variable])

        def step(x):
            with tf.GradientTape() as tape:
                with tf.GradientTape() as inner:
                    loss = tf.reduce_mean(tf.tanh(x @ variable.value) ** 2)
                    scaled = optimizer.scale_loss(loss)
                (slope,) = inner.gradient(scaled, [variable.value])
                if with_unscale:
                    (slope,) = optimizer.unscale([slope])
                else:
                    slope = slope / getattr(optimizer, "loss_scale", 1.0)
                scaled = optimizer.scale_loss(loss + 0.5 * tf.reduce_sum(slope**2))
            grads = tape.gradient(scaled, [variable.value])
            optimizer.apply_gradients([(grads[0], variable)])

        return variable, step

    scaling = dynamic(2.0**15)
    wanted, plain_step = loop(plain_sgd())
    got, step = loop(scaling)
    step = step if how == "eager" else tf.function(step, jit_compile=how == "jit")
    for data in BATCHES[:3]:
        x = tf.constant(data[:, :2])
        step(x)
        plain_step(x)
        np.testing.assert_allclose(got.numpy(), wanted.numpy(), rtol=1e-5, atol=1e-6)
    assert int(scaling.skipped_steps) == 0


@pytest.mark.parametrize("how", ["eager", slow_graph])
def test_an_overflow_in_a_gradient_penalty_lowers_it(how):
    # It makes the loss infinite as well, but this time the scale is the cause.
    variable = keras.Variable([1.0])
    optimizer = dynamic(2.0**20)
    optimizer.build([variable])

    def step(factor):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                loss = tf.reduce_sum(variable.value * factor)
                scaled = optimizer.scale_loss(loss)
            (slope,) = optimizer.unscale(inner.gradient(scaled, [variable.value]))
            scaled = optimizer.scale_loss(loss + tf.reduce_sum(slope) * 1e-3)
        optimizer.apply_gradients([(tape.gradient(scaled, variable.value), variable)])

    run = step if how == "eager" else tf.function(step)
    for n in (1, 2):
        run(tf.constant(1e34))
        assert int(optimizer.skipped_steps) == n
        assert float(optimizer.loss_scale) == 2.0 ** (20 - n)
    run(tf.constant(np.nan))
    assert float(optimizer.loss_scale) == 2.0**18
    assert int(optimizer.skipped_steps) == 3
    run(tf.constant(1.0))
    assert int(optimizer.iterations) == 1


# minimize.


@pytest.mark.parametrize(
    ("form", "how"),
    [
        ("function", "eager"),
        ("tape", "eager"),
        pytest.param("tape", "graph", marks=pytest.mark.slow),
    ],
)
def test_minimize_equals_the_loop_it_replaces(how, form):
    variable = keras.Variable([1.0, 3.0])
    optimizer = tfscale.wrap(keras.optimizers.SGD(0.5), SCALE)
    optimizer.build([variable])

    def step():
        if form == "function":
            return optimizer.minimize(lambda: tf.reduce_sum(variable.value**2), lambda: [variable])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable.value**2)
        return optimizer.minimize(loss, [variable], tape=tape)

    run = tf.function(step) if how == "graph" else step
    assert int(run()) == 1
    assert variable.numpy().tolist() == [0.0, 0.0]
    assert int(run()) == 2


def test_minimize_needs_a_function_or_a_tape():
    optimizer = tfscale.wrap(keras.optimizers.SGD(0.5), SCALE)
    with pytest.raises(ValueError, match="tape"):
        optimizer.minimize(tf.constant(1.0), [keras.Variable([1.0])])
    with pytest.raises(ValueError, match="tape"):
        optimizer.minimize(lambda: 1.0, [keras.Variable([1.0])], tape=tf.GradientTape())


# A loss that was not scaled.


@pytest.mark.parametrize(
    ("call", "how"),
    [
        ("apply", "eager"),
        ("apply_gradients", "eager"),
        pytest.param("apply_gradients", "graph", marks=pytest.mark.slow),
    ],
)
def test_a_forgotten_scale_loss_warns_once(how, call):
    variable = keras.Variable([4.0])
    optimizer = tfscale.wrap(keras.optimizers.SGD(1.0), "dynamic")
    optimizer.build([variable])

    def step(gradient):
        if call == "apply":
            optimizer.apply([gradient], [variable])
        else:
            optimizer.apply_gradients([(gradient, variable)])

    run = tf.function(step) if how == "graph" else step
    with pytest.warns(tfscale.LossScaleWarning, match="scale_loss") as caught:
        run(tf.constant([1.0]))
    assert len(caught) == 1
    run(tf.constant([1.0]))  # a second warning would be an error here
    assert variable.numpy().tolist() == [2.0]
    run(tf.constant([np.inf]))
    assert variable.numpy().tolist() == [2.0]
    assert int(optimizer.skipped_steps) == 1
    assert float(optimizer.loss_scale) == 2.0**15


@pytest.mark.slow
@pytest.mark.parametrize(("jit_compile", "unscale"), [(False, True), (True, False)])
def test_an_update_traced_before_any_loss_divides(jit_compile, unscale):
    # As a warm-up that makes the slots before a checkpoint is read.
    variable = keras.Variable([1.0])
    optimizer = tfscale.wrap(keras.optimizers.SGD(1.0), tfscale.Dynamic(initial_scale=SCALE))
    optimizer.build([variable])

    @tf.function(jit_compile=jit_compile)
    def apply(gradient):
        gradient = optimizer.unscale([gradient])[0] if unscale else gradient
        optimizer.apply_gradients([(gradient, variable)])

    @tf.function(jit_compile=jit_compile)
    def grad(x):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(variable.value) * x)
        return tape.gradient(loss, variable.value)

    with pytest.warns(tfscale.LossScaleWarning, match="scale_loss"):
        apply(tf.zeros([1]))
    apply(tf.constant([np.inf]))  # of an unscaled loss: it says nothing about the scale
    assert float(optimizer.loss_scale) == SCALE
    apply(grad(tf.constant(0.25)))
    assert variable.numpy().tolist() == [0.75]
    apply(grad(tf.constant(np.nan)))
    apply(grad(tf.constant(3e38)) * 2.0)
    assert variable.numpy().tolist() == [0.75]
    record = optimizer.record()
    assert (record.applied, record.skipped_overflow, record.skipped_loss) == (2, 2, 1)
    assert float(optimizer.loss_scale) == SCALE / 2


def grads_of_the_unscaled_loss(loop, batch):
    """Scales the loss, and differentiates what it was before."""
    with tf.GradientTape() as tape:
        loss = loop.loss(batch)
        loop.optimizer.scale_loss(loss)
    return tape.gradient(loss, [v.value for v in loop.variables])


@pytest.mark.slow
@pytest.mark.parametrize("between", [None, clip], ids=["as they are", "clipped"])
def test_gradients_of_the_unscaled_loss_warn_once(between):
    loop = One(sgd("dynamic"), between, grads=grads_of_the_unscaled_loss)
    with pytest.warns(tfscale.LossScaleWarning, match="those of the loss before") as caught:
        loop.step(BATCHES[0])
    assert len(caught) == 1
    loop.step(batch(5))  # traced again; a second warning would be an error


def test_a_sum_in_a_variable_is_not_taken_for_unscaled():
    # The mean over as many samples as the loss was divided by: both use the same number.
    optimizer = tfscale.wrap(keras.optimizers.SGD(1.0), SCALE)
    variable, total = keras.Variable([1.0]), tf.Variable([0.0])
    optimizer.build([variable])

    @tf.function
    def step(x):
        number = tf.cast(tf.shape(x)[0], tf.float32)
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(variable.value * x) / number)
        total.assign_add(tape.gradient(loss, variable.value))
        gradient = total.read_value() * tf.norm(variable.value) / number
        optimizer.apply_gradients([(gradient, variable)])

    step(tf.ones([2]))
    assert variable.numpy().tolist() == [0.5]


@pytest.mark.parametrize("policy", ["none", tfscale.NoScaling()], ids=repr)
def test_without_scaling_there_is_nothing_to_forget(policy):
    variable = keras.Variable([4.0])
    tfscale.wrap(keras.optimizers.SGD(1.0), policy).apply([tf.constant([1.0])], [variable])
    assert variable.numpy().tolist() == [3.0]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["eager", "graph", "two functions"])
@pytest.mark.parametrize("dtype", ["float32", "mixed_float16"])
def test_auto_misses_scale_loss_in_float16_models_only(dtype, how):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, dtype=dtype)])
    optimizer = tfscale.wrap(keras.optimizers.SGD(1.0))
    optimizer.build(model.trainable_variables)

    def grads(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.cast(model(x), tf.float32))
        return tape.gradient(loss, model.trainable_variables)

    def apply(grads):
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    if how == "two functions":
        grads, apply = tf.function(grads), tf.function(apply)
    run = lambda x: apply(grads(x))  # noqa: E731
    run = tf.function(run) if how == "graph" else run
    before = model.layers[0].bias.numpy()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(tf.ones([2, 3]))
        run(tf.ones([2, 3]))
    said = [w for w in caught if issubclass(w.category, tfscale.LossScaleWarning)]
    assert len(said) == (dtype == "mixed_float16")
    np.testing.assert_array_equal(model.layers[0].bias.numpy(), before - 2.0)


@pytest.mark.parametrize("how", ["eager", slow_graph])
def test_the_constructor_assumes_scaled_as_keras_does(how):
    variable = keras.Variable([4.0])
    optimizer = tfscale.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=8.0)
    optimizer.build([variable])
    apply = lambda gradient: optimizer.apply([gradient], [variable])  # noqa: E731
    apply = tf.function(apply) if how == "graph" else apply
    apply(tf.constant([8.0]))
    assert variable.numpy().tolist() == [3.0]
    apply(tf.constant([np.inf]))
    assert float(optimizer.loss_scale) == 4.0


@pytest.mark.parametrize("how", ["eager", slow_graph])
def test_unscaled_together_may_be_applied_apart(how):
    optimizer = tfscale.wrap(keras.optimizers.SGD(1.0), 4.0)
    a, b = keras.Variable([1.0]), keras.Variable([1.0])
    optimizer.build([a, b])

    def step():
        optimizer.scale_loss(tf.constant(1.0))
        grads = optimizer.unscale([tf.constant([4.0]), tf.constant([4.0])])
        grads = [tf.clip_by_value(g, -1.0, 1.0) for g in grads]
        optimizer.apply_gradients([(grads[0], a)])
        optimizer.apply_gradients([(grads[1], b)])

    (step if how == "eager" else tf.function(step, autograph=False))()
    assert (a.numpy().tolist(), b.numpy().tolist()) == ([0.0], [0.0])


@pytest.mark.parametrize("how", ["eager", slow_graph])
def test_a_second_unscale_is_refused(how):
    optimizer = tfscale.wrap(keras.optimizers.SGD(1.0), 4.0)
    variable = keras.Variable([1.0])
    optimizer.build([variable])

    def step(twice):
        optimizer.scale_loss(tf.constant(1.0))
        grads = optimizer.unscale([tf.constant([4.0]), None])
        grads = optimizer.unscale(grads) if twice else grads
        optimizer.apply_gradients([(grads[0], variable)])

    step = step if how == "eager" else tf.function(step, autograph=False)
    with pytest.raises(ValueError, match="divide them by the scale a second time"):
        step(True)
    assert variable.numpy().tolist() == [1.0]
    step(False)
    assert variable.numpy().tolist() == [0.0]
