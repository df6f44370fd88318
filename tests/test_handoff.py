"""Real loops train: what scale_loss and unscale leave behind never decides a step."""

import functools
import tempfile
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import execute, slow, slow_graph, slow_jit

import tfscale

NAN, INF = float("nan"), float("inf")


@pytest.fixture(params=["eager", slow_graph])
def run(request):
    """How a step is executed; AutoGraph has nothing to convert in it."""
    return functools.partial(execute, request.param, autograph=False)


# Where `unscale` finds an overflow, which XLA counts in a way of its own.
in_xla_too = pytest.mark.parametrize("run", ["eager", slow_graph, slow_jit], indirect=True)
in_xla_instead = pytest.mark.parametrize("run", ["eager", slow_jit], indirect=True)


def sgd(scale=64.0, rate=1.0, **settings):
    return tfscale.wrap(keras.optimizers.SGD(rate), initial_scale=scale, **settings)


def made(optimizer, *shapes):
    variables = [keras.Variable(np.zeros(shape, "float32")) for shape in shapes or [[1]]]
    optimizer.build(variables)
    return variables


def grads_of(optimizer, loss, variables):
    with tf.GradientTape() as tape:
        scaled = optimizer.scale_loss(loss())
    return tape.gradient(scaled, [v.value for v in variables])


def only_if(condition, function):
    """A guard, as one writes it in eager code and in a function."""
    tf.cond(condition, lambda: (function(), True)[1], lambda: False)


def guarded_by_norm(optimizer, v, clip=list):
    """A step on a gradient of x that applies only what has a finite norm."""

    def step(x):
        # The loss is 0 while its gradient times the scale may be more than float32 can hold.
        loss = lambda: tf.reduce_sum((v.value - tf.stop_gradient(v.value)) * x)  # noqa: E731
        grads = optimizer.unscale(grads_of(optimizer, loss, [v]))
        norm = tf.linalg.global_norm(grads)
        pairs = list(zip(clip(grads), [v], strict=True))
        only_if(tf.math.is_finite(norm), lambda: optimizer.apply_gradients(pairs))

    return step


CLIPS = {
    "as it is": lambda grads: grads,
    "by global norm": lambda grads: tf.clip_by_global_norm(grads, 10.0)[0],
    "by norm": lambda grads: [tf.clip_by_norm(g, 10.0) for g in grads],
    "by value": lambda grads: [tf.clip_by_value(g, -10.0, 10.0) for g in grads],
    "keras": lambda grads: [keras.ops.clip(g, -10.0, 10.0) for g in grads],
}


def clip_in_all_ways(grads):
    for clip in CLIPS.values():
        grads = clip(grads)
    return grads


# A graph shows what each is computed from, so it sees one after the other.
CLIPPED = pytest.mark.parametrize(
    ("how", "clip"),
    [
        *[pytest.param("eager", clip, id=name) for name, clip in CLIPS.items()],
        pytest.param("graph", clip_in_all_ways, id="all in a graph", marks=pytest.mark.slow),
    ],
)


# Loops with a guard of their own.


@pytest.mark.parametrize(
    ("how", "validates"), [("eager", False), ("eager", True), slow("graph", True)]
)
def test_a_loop_guarded_by_its_loss_trains(how, validates):
    optimizer = sgd()
    (v,) = made(optimizer)

    def step(x):
        with tf.GradientTape() as tape:
            loss = v.value[0] * x
            scaled = optimizer.scale_loss(loss)
        grads = tape.gradient(scaled, [v.value])
        if validates:
            optimizer.scale_loss(loss * NAN)
        pairs = list(zip(grads, [v], strict=True))
        only_if(tf.math.is_finite(loss), lambda: optimizer.apply_gradients(pairs))

    step = execute(how, step, autograph=False)
    for x in [NAN, 1.0] * 5:
        step(tf.constant(x))
    assert v.numpy().tolist() == [-5.0]
    record = optimizer.record()
    assert (record.applied, record.skipped) == (5, 0)
    assert "data" not in str(record)


@CLIPPED
def test_a_loop_guarded_by_its_norm_trains(how, clip):
    optimizer = sgd()
    (v,) = made(optimizer)
    step = execute(how, guarded_by_norm(optimizer, v, clip), autograph=False)
    for x in [3e38, 1.0] * 5:
        step(tf.constant(x))
    assert v.numpy().tolist() == [-5.0]
    record = optimizer.record()
    assert (record.applied, record.skipped_overflow, record.backoffs) == (5, 5, 5)
    assert float(optimizer.loss_scale) == 2.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "zeroes"), [("eager", False), ("eager", True), ("graph", False), ("jit", True)]
)
def test_a_guarded_loop_finds_its_scale(how, zeroes):
    layer = keras.layers.Dense(1, dtype="mixed_float16")
    layer.build((None, 4))
    optimizer = sgd(2.0**24, 1e-4)
    optimizer.build(layer.trainable_variables)

    def step(x):
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(tf.reduce_sum(tf.cast(layer(x), tf.float32)))
        grads = optimizer.unscale(tape.gradient(scaled, layer.trainable_variables))
        if zeroes:
            grads = [tf.where(tf.math.is_nan(g), tf.zeros_like(g), g) for g in grads]
        pairs = list(zip(grads, layer.trainable_variables, strict=True))
        finite = tf.math.is_finite(tf.linalg.global_norm(grads))
        only_if(finite, lambda: optimizer.apply_gradients(pairs))

    step = execute(how, step, autograph=False)
    for _ in range(16):
        step(tf.fill([2, 4], 8.0))
    # A gradient of 16 times the scale has to stay below 65504.
    record = optimizer.record()
    assert float(optimizer.loss_scale) == 2.0**11
    assert record.skipped_overflow == record.backoffs == 13
    assert record.applied == (16 if zeroes else 3)


@in_xla_too
def test_one_overflow_moves_the_scale_once(run):
    optimizer = sgd()
    v, w = made(optimizer, [1], [2])

    def step(x):
        grads = grads_of(
            optimizer, lambda: tf.reduce_sum(v.value * x) + tf.reduce_sum(w.value * x), [v, w]
        )
        grads = [*optimizer.unscale(grads[:1]), *optimizer.unscale(grads[1:])]
        optimizer.apply_gradients(zip(grads, [v, w], strict=True))

    step = run(step)
    for n in range(1, 4):
        step(tf.constant(3e38))
        assert float(optimizer.loss_scale) == 64.0 / 2**n
        assert optimizer.record().skipped_overflow == n
    step(tf.constant(1.0))
    assert optimizer.record().applied == 1


@pytest.mark.parametrize("clip", ["by value", "by global norm"])
def test_no_clipping_hides_an_overflow(clip):
    optimizer = sgd()
    (v,) = made(optimizer, [3])
    x = tf.constant([1.0, 3e38, 2.0])
    grads = optimizer.unscale(grads_of(optimizer, lambda: tf.reduce_sum(v.value * x), [v]))
    optimizer.apply_gradients(zip(CLIPS[clip](grads), [v], strict=True))
    assert v.numpy().tolist() == [0.0] * 3
    assert float(optimizer.loss_scale) == 32.0


@in_xla_instead
def test_unscale_marks_just_what_is_not_finite(run):
    optimizer = sgd()
    optimizer.scale_loss(tf.constant(1.0))
    unscaled = run(lambda g: optimizer.unscale([g])[0])(tf.constant([64.0, INF, -INF, NAN]))
    np.testing.assert_array_equal(unscaled, [1.0, NAN, NAN, NAN])


# A loss that is not finite.


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["run_eagerly", "jit_compile"])
def test_an_infinite_loss_stays_out_of_the_epoch(mode):
    class SomeInfinite(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return y_pred + tf.where(y_true > 0, INF, 1.0)

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    tfscale.compile(model, sgd(), loss=SomeInfinite(), metrics=["mae"], **{mode: True})
    before = model.layers[0].kernel.numpy()
    y = np.array([0.0, 1.0, 0.0, 1.0], "float32")[:, None]
    history = model.fit(np.ones((4, 1)), y, batch_size=1, epochs=1, verbose=0, shuffle=False)
    np.testing.assert_allclose(model.layers[0].kernel.numpy(), before - 4.0)
    first, third = before[0, 0] + 1.0, before[0, 0] - 2.0 + 1.0
    np.testing.assert_allclose(history.history["loss"], [(first + third) / 2], rtol=1e-5)
    record = model.optimizer.record()
    assert (record.applied, record.skipped, record.nonfinite_losses) == (4, 0, 2)


# Only some gradients unscaled.


@pytest.mark.parametrize(
    ("how", "order"), [("eager", "before"), ("eager", "after"), slow("graph", "after")]
)
def test_only_the_gradient_of_the_input_is_unscaled(how, order):
    optimizer = sgd()
    (v,) = made(optimizer, [3])

    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            scaled = optimizer.scale_loss(tf.reduce_sum(v.value * x))
        if order == "before":
            grads = tape.gradient(scaled, [v.value])
        optimizer.unscale([tape.gradient(scaled, x)])
        if order == "after":
            grads = tape.gradient(scaled, [v.value])
        optimizer.apply_gradients(zip(grads, [v], strict=True))

    execute(how, step, autograph=False)(tf.ones([5, 3]))
    assert v.numpy().tolist() == [-5.0] * 3


@pytest.mark.slow
@CLIPPED
def test_only_the_recurrent_part_is_unscaled(how, clip):
    optimizer = sgd()
    variables = made(optimizer, [1], [2], [2], [3])

    def step(x):
        loss = lambda: tf.add_n([tf.reduce_sum(v.value) for v in variables]) * x  # noqa: E731
        grads = grads_of(optimizer, loss, variables)
        grads = [*clip(optimizer.unscale(grads[:2])), *grads[2:]]
        optimizer.apply_gradients(zip(grads, variables, strict=True))

    step = execute(how, step, autograph=False)
    for n in (1, 2):
        step(tf.constant(1.0))
        for v in variables:
            assert v.numpy().tolist() == [-float(n)] * v.shape[0]


def test_parts_unscaled_in_two_calls_and_clipped():
    optimizer = sgd(8.0)
    variables = made(optimizer, [1], [2], [3])
    loss = lambda: tf.add_n([tf.reduce_sum(v.value) for v in variables])  # noqa: E731
    for n, clip_all in enumerate((False, True), 1):
        grads = grads_of(optimizer, loss, variables)
        grads = [*optimizer.unscale(grads[:2]), *optimizer.unscale(grads[2:])]
        clip = CLIPS["by global norm"]
        grads = clip(grads) if clip_all else [*clip(grads[:1]), *grads[1:]]
        optimizer.apply_gradients(zip(grads, variables, strict=True))
        assert all(np.all(v.numpy() == -n) for v in variables)


def test_a_function_unscales_only_what_it_is_given():
    optimizer = sgd()
    v, w = made(optimizer, [1], [1])
    first, second = grads_of(optimizer, lambda: v.value[0] + w.value[0], [v, w])
    (first,) = tf.function(optimizer.unscale)([first])
    optimizer.apply_gradients([(first, v)])
    optimizer.apply_gradients([(second, w)])
    assert (v.numpy().tolist(), w.numpy().tolist()) == ([-1.0], [-1.0])


@pytest.mark.slow
def test_what_stays_ambiguous_in_a_function_is_skipped():
    # Traced before anybody unscaled.
    optimizer = sgd()
    variables = made(optimizer, [1], [1])
    loss = lambda: tf.add_n([v.value[0] for v in variables])  # noqa: E731
    clip = CLIPS["by value"]
    apply = tf.function(
        lambda grads: optimizer.apply_gradients(zip(clip(grads), variables, strict=True))
    )
    apply(grads_of(optimizer, loss, variables))
    before = [v.numpy().tolist() for v in variables]
    some = tf.function(lambda grads: [*optimizer.unscale(grads[:1]), grads[1]])
    apply(some(grads_of(optimizer, loss, variables)))
    assert [v.numpy().tolist() for v in variables] == before
    assert int(optimizer.skipped_steps) == 1
    apply(grads_of(optimizer, loss, variables))
    assert optimizer.record().applied == 2


@pytest.mark.slow
@pytest.mark.parametrize("how", ["functions", "jit"])
def test_accumulated_gradients_and_a_later_loss(how):
    # The guard drops the last micro-batch, so that a loss comes after what was unscaled. XLA cannot
    # raise.
    optimizer = sgd()
    (v,) = made(optimizer)
    total = tf.Variable([0.0])

    def micro(x):
        with tf.GradientTape() as tape:
            loss = v.value[0] * x
            scaled = optimizer.scale_loss(loss)
        grads = tape.gradient(scaled, [v.value])
        add = lambda: total.assign_add(optimizer.unscale(grads)[0])  # noqa: E731
        tf.cond(tf.math.is_finite(loss), lambda: (add(), True)[1], lambda: False)

    def update(**said):
        optimizer.apply_gradients([(total.read_value(), v)], **said)

    def step(xs):
        for x in tf.unstack(xs):
            micro(x)
        update()

    if how == "functions":
        micro, update = tf.function(micro), tf.function(update)
        run = step
    else:
        run = tf.function(step, jit_compile=True)
    run(tf.constant([1.0, 1.0]))
    assert v.numpy().tolist() == [-2.0]
    bad = tf.constant([1.0, NAN])
    if how == "jit":
        run(bad)
        assert int(optimizer.skipped_steps) == 1
    else:
        with pytest.raises(tf.errors.InvalidArgumentError, match="unscaled=True"):
            run(bad)
    assert v.numpy().tolist() == [-2.0]
    update(unscaled=True)
    assert v.numpy().tolist() == [-5.0]


@pytest.mark.slow
def test_an_update_traced_before_unscale_counts_once():
    optimizer = sgd()
    (v,) = made(optimizer)
    apply = tf.function(lambda g: optimizer.apply_gradients([(g, v)]))
    apply(grads_of(optimizer, lambda: v.value[0], [v])[0])
    for n in (1, 2):
        bad = grads_of(optimizer, lambda: (v.value[0] - tf.stop_gradient(v.value[0])) * 3e38, [v])
        apply(optimizer.unscale(bad)[0])
        assert float(optimizer.loss_scale) == 64.0 / 2**n
        assert optimizer.record().skipped_overflow == n


def test_a_guarded_loop_recovers_from_a_bad_loss():
    optimizer = sgd(2.0**70, max_scale=2.0**70)
    (v,) = made(optimizer)
    step = guarded_by_norm(optimizer, v)
    for x in [NAN, *[2.0**60] * 4]:
        step(tf.constant(x))
    record = optimizer.record()
    assert (record.skipped_loss, record.skipped_overflow, record.applied) == (1, 3, 1)
    assert float(optimizer.loss_scale) == 2.0**67


@in_xla_too
def test_nan_after_a_skipped_step_is_no_overflow(run):
    steps = "nnnngonngnoong"
    optimizer = sgd()
    (v,) = made(optimizer)
    step = run(guarded_by_norm(optimizer, v))
    for kind in steps:
        step(tf.constant({"g": 1.0, "o": 3e38, "n": NAN}[kind]))
    record = optimizer.record()
    overflows, bad_losses = steps.count("o"), steps.count("n")
    assert (record.skipped_overflow, record.backoffs) == (overflows, overflows)
    assert (record.skipped_loss, record.applied) == (bad_losses, steps.count("g"))
    assert float(optimizer.loss_scale) == 64.0 / 2**overflows


@in_xla_instead
def test_a_guarded_penalty_finds_its_scale(run):
    # The overflow is in the loss as well, which is no fault of the loss.
    optimizer = sgd(2.0**30, rate=0.0, max_scale=2.0**30)
    v = keras.Variable([1.0])
    optimizer.build([v])

    def step(x):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                loss = tf.reduce_sum(v.value**2 * x)
                scaled = optimizer.scale_loss(loss)
            (slope,) = optimizer.unscale(inner.gradient(scaled, [v.value]))
            loss += tf.reduce_sum(slope) * 1e-3
            scaled = optimizer.scale_loss(loss)
        pairs = [(tape.gradient(scaled, v.value), v)]
        only_if(tf.math.is_finite(loss), lambda: optimizer.apply_gradients(pairs))

    step = run(step)
    for _ in range(5):
        step(tf.constant(1e30))
    record = optimizer.record()
    assert (record.skipped_overflow, record.skipped_loss, record.applied) == (3, 0, 2)
    assert float(optimizer.loss_scale) == 2.0**27


def test_a_norm_over_scaled_and_unscaled_is_refused():
    optimizer = sgd()
    variables = made(optimizer, [1], [2])

    @tf.function
    def step():
        loss = lambda: tf.add_n([tf.reduce_sum(v.value) for v in variables])  # noqa: E731
        grads = grads_of(optimizer, loss, variables)
        grads = tf.clip_by_global_norm([*optimizer.unscale(grads[:1]), grads[1]], 1.0)[0]
        optimizer.apply_gradients(zip(grads, variables, strict=True))

    with pytest.raises(ValueError, match="unscaled=True"):
        step()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["eager", "functions"])
def test_what_stays_ambiguous_is_refused(how):
    # Computed together, after some were unscaled: new tensors of one shape.
    optimizer = sgd()
    variables = made(optimizer, [1], [1])
    loss = lambda: tf.add_n([v.value[0] for v in variables])  # noqa: E731
    maybe = tf.function if how == "functions" else lambda function: function
    some = maybe(lambda grads: [*optimizer.unscale(grads[:1]), grads[1]])
    clip = maybe(lambda grads: [tf.clip_by_value(g, -100.0, 100.0) for g in grads])
    apply = maybe(
        lambda grads, **said: optimizer.apply_gradients(zip(grads, variables, strict=True), **said)
    )
    grads = clip(some(grads_of(optimizer, loss, variables)))
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="unscaled=True"):
        apply(grads)
    assert [v.numpy().tolist() for v in variables] == [[0.0], [0.0]]
    assert optimizer.record().steps == 0
    for said, wanted in ((True, [-1.0, -64.0]), (False, [-1.0 - 1 / 64, -65.0])):
        apply(grads, unscaled=said)
        assert [float(v.value[0]) for v in variables] == wanted


@in_xla_instead
def test_unscaled_works_for_linked_optimizers(run):
    a, b = sgd(8.0), sgd(4.0)
    (v,), (w,) = made(a), made(b)
    both = tfscale.link(a, b)

    def step():
        grads = [tf.ones([1]), tf.ones([1])]
        both.apply_gradients([(grads[0], v)], [(grads[1], w)], unscaled=True)
        a.scale_loss(1.0)
        b.scale_loss(1.0)
        both.apply_gradients([(grads[0], v)], [(grads[1], w)], unscaled=False)

    run(step)()
    assert (float(v.value[0]), float(w.value[0])) == (-1.0 - 1 / 8, -1.0 - 1 / 4)


@pytest.mark.parametrize("call", ["apply_gradients", "apply"])
def test_unscaled_has_to_be_a_bool(call):
    optimizer = sgd()
    (v,) = made(optimizer)
    arguments = ([(tf.ones([1]), v)],) if call == "apply_gradients" else ([tf.ones([1])], [v])
    with pytest.raises(TypeError, match="`unscaled` must be True, False"):
        getattr(optimizer, call)(*arguments, unscaled=1)


# Functions and strategies.


def strategies():
    return {
        "one device": lambda: tf.distribute.OneDeviceStrategy("CPU:0"),
        "two replicas": lambda: tf.distribute.MirroredStrategy(
            ["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice()
        ),
    }


@pytest.mark.slow
def test_functions_under_a_strategy_divide_once():
    strategy = strategies()["two replicas"]()
    with strategy.scope():
        optimizer, v = sgd(8.0), keras.Variable([0.0])

    @tf.function
    def grads():
        def replica():
            return optimizer.unscale(grads_of(optimizer, lambda: v.value[0], [v]))[0]

        return strategy.run(replica)

    @tf.function
    def update(grads):
        def replica(gradient):
            gradient = tf.clip_by_value(gradient, -5.0, 5.0)
            optimizer.apply_gradients([(gradient, v)])

        strategy.run(replica, args=(grads,))

    update(grads())
    assert v.numpy().tolist() == [-2.0]


@pytest.mark.slow
@pytest.mark.parametrize("name", strategies())
def test_a_strategy_remembers_a_bad_micro_batch(name):
    strategy = strategies()[name]()
    with strategy.scope():
        optimizer, v = sgd(8.0), keras.Variable([0.0])
        total = tf.Variable(
            [0.0],
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    @tf.function
    def micro(x):
        def replica():
            total.assign_add(grads_of(optimizer, lambda: v.value[0] * x, [v])[0])

        strategy.run(replica)

    @tf.function
    def update():
        def replica():
            optimizer.apply_gradients([(total.read_value(), v)])
            total.assign([0.0])

        strategy.run(replica)

    for batches in ([1.0, 1.0], [NAN, 1.0], [1.0, 1.0]):
        for x in batches:
            micro(tf.constant(x))
        update()
    assert v.numpy().tolist() == [-4.0 * strategy.num_replicas_in_sync]
    record = optimizer.record()
    assert (record.applied, record.skipped_loss, record.skipped_overflow) == (2, 1, 0)


def test_a_bad_loss_of_one_replica_is_seen_by_all():
    strategy = strategies()["two replicas"]()
    with strategy.scope():
        optimizer, v = sgd(8.0), keras.Variable([0.0])

    def replica():
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        x = tf.where(tf.equal(number, 1), NAN, 1.0)
        grads = grads_of(optimizer, lambda: v.value[0] * x, [v])
        optimizer.apply_gradients(zip(grads, [v], strict=True))

    strategy.run(replica)
    record = optimizer.record()
    assert (record.skipped_loss, record.skipped_overflow) == (1, 0)


@pytest.mark.slow
def test_a_nested_function_is_traced_again():
    optimizer = sgd(64.0, 0.125)
    (v,) = made(optimizer, [3])
    update = tf.function(lambda g: optimizer.apply_gradients([(g, v)]))

    @tf.function
    def step(x):
        update(grads_of(optimizer, lambda: tf.reduce_sum(v.value * x), [v])[0])

    for rows in (4, 3, 4):
        step(tf.ones([rows, 3]))
    assert v.numpy().tolist() == [-(4 + 3 + 4) / 8] * 3


def test_two_steps_of_one_function_use_two_scales():
    policy = tfscale.Dynamic(initial_scale=8, growth_interval=1, growth_factor=4)
    optimizer = tfscale.wrap(keras.optimizers.SGD(0.125), policy, update="select")
    (v,) = made(optimizer)

    @tf.function(autograph=False)
    def steps():
        for _ in range(2):
            optimizer.apply_gradients([(grads_of(optimizer, lambda: v.value[0], [v])[0], v)])

    steps()
    assert v.numpy().tolist() == [-0.25]


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", [False, True])
def test_two_calls_of_a_nested_function_use_two_scales(jit_compile):
    policy = tfscale.Dynamic(initial_scale=8, growth_interval=1, growth_factor=4)
    optimizer = tfscale.wrap(keras.optimizers.SGD(0.125), policy)
    v = keras.Variable([1.0])
    optimizer.build([v])
    update = tf.function(lambda g: optimizer.apply_gradients([(g, v)]), jit_compile=jit_compile)

    @tf.function(jit_compile=jit_compile)
    def steps():
        for _ in range(2):
            update(grads_of(optimizer, lambda: v.value[0], [v])[0])

    steps()
    assert v.numpy().tolist() == [0.75]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["nested function", "branch", "loop"])
def test_unscaling_inside_of_something_is_seen_outside(where):
    optimizer = sgd()
    (v,) = made(optimizer)
    clip = lambda grads: [tf.clip_by_value(g, -100.0, 100.0) for g in optimizer.unscale(grads)]  # noqa: E731
    nested = tf.function(clip)

    @tf.function
    def step(x):
        grads = grads_of(optimizer, lambda: v.value[0] * x, [v])
        if where == "nested function":
            grads = nested(grads)
        elif where == "branch":
            grads = tf.cond(x > 0, lambda: clip(grads), lambda: clip(grads))
        else:
            zero = [tf.zeros([1])]
            grads = tf.while_loop(lambda i, _: i < 1, lambda i, _: (i + 1, clip(grads)), (0, zero))
            grads = grads[1]
        optimizer.apply_gradients(zip(grads, [v], strict=True))

    for n in (1.0, 2.0):
        step(tf.constant(1.0))
        assert v.numpy().tolist() == [-n]


@pytest.mark.slow
def test_freezing_one_step_does_not_spoil_the_next():
    optimizer = sgd(8.0)
    v, w = made(optimizer, [1], [1])
    loss = lambda: v.value[0] + w.value[0]  # noqa: E731
    grads = tf.function(lambda: grads_of(optimizer, loss, [v, w]))
    clip = CLIPS["by value"]
    optimizer.apply_gradients(zip(clip(optimizer.unscale(grads())[:1]), [v], strict=True))
    optimizer.apply_gradients(zip(clip(optimizer.unscale(grads())), [v, w], strict=True))
    assert (float(v.value[0]), float(w.value[0])) == (-2.0, -1.0)
    total = [0.0, 0.0]
    for _ in range(3):  # micro-batches, each unscaled
        total = [t + g for t, g in zip(total, optimizer.unscale(grads()), strict=True)]
    optimizer.apply_gradients(zip(total, [v, w], strict=True))
    optimizer.apply_gradients(zip(grads(), [v, w], strict=True))
    assert (float(v.value[0]), float(w.value[0])) == (-6.0, -5.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "clip"),
    [("eager", "as it is"), ("eager", "by global norm"), ("graph", "by global norm")],
)
def test_two_optimizers_share_a_backward_pass(how, clip):
    a, b = sgd(), sgd()
    (v,), (w,) = made(a), made(b)

    def step():
        grads = a.unscale(grads_of(a, lambda: v.value[0] + w.value[0], [v, w]))
        grads = CLIPS[clip](grads)
        a.apply_gradients([(grads[0], v)])
        b.apply_gradients([(grads[1], w)])

    execute(how, step, autograph=False)()  # a warning would be an error
    assert (v.numpy().tolist(), w.numpy().tolist()) == ([-1.0], [-1.0])


# Built directly, as Keras' own.


@pytest.mark.parametrize("call", ["apply", "apply_gradients"])
def test_the_constructor_has_one_meaning(call):
    optimizer = tfscale.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=8.0)
    v = keras.Variable([1.0])
    optimizer.build([v])
    if call == "apply":
        optimizer.apply([tf.constant([8.0])], [v])
    else:
        optimizer.apply_gradients([(tf.constant([8.0]), v)])
    assert v.numpy().tolist() == [0.0]


def test_check_finite_takes_integers():
    optimizer = sgd()
    assert bool(optimizer.check_finite([tf.constant([1, 2]), None]))
    assert not bool(optimizer.check_finite([tf.constant([1, 2]), tf.constant(NAN)]))


def test_the_old_static_scale_names_the_new_way():
    with pytest.raises(ValueError, match=r"tfscale\.wrap\(optimizer, 128\.0\)"):
        tfscale.LossScaleOptimizer(keras.optimizers.SGD(1.0), dynamic=False)


# Files.


class Trainer(tf.Module):
    def __init__(self):
        super().__init__()
        self.weight = tf.Variable([0.0])
        self.optimizer = sgd(8.0, growth_interval=2)
        self.optimizer.build([self.weight])

    @tf.function(input_signature=[tf.TensorSpec([], tf.float32)])
    def train(self, x):
        with tf.GradientTape() as tape:
            scaled = self.optimizer.scale_loss(self.weight[0] * x)
        grads = tape.gradient(scaled, [self.weight])
        grads = tf.clip_by_global_norm(self.optimizer.unscale(grads), 10.0)[0]
        self.optimizer.apply_gradients(zip(grads, [self.weight], strict=True))
        return self.weight[0]


@pytest.mark.slow
def test_a_saved_train_step_goes_on_training():
    module = Trainer()
    module.train(1.0)
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(module, folder, signatures={"train": module.train})
        loaded = tf.saved_model.load(folder)
        assert [float(loaded.train(tf.constant(x))) for x in (1.0, NAN, 1.0)] == [-2.0, -2.0, -3.0]
        signature = loaded.signatures["train"]
        assert float(signature(x=tf.constant(1.0))["output_0"]) == -4.0


@pytest.mark.slow
def test_a_model_with_a_train_method_is_saved():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
            self.own = sgd()

        def call(self, x):
            return self.dense(x)

        @tf.function
        def train(self, x):
            grads = grads_of(self.own, lambda: tf.reduce_sum(self(x)), self.trainable_variables)
            self.own.apply_gradients(zip(grads, self.trainable_variables, strict=True))
            return tf.reduce_sum(self(x))

    model = Model()
    model(tf.ones([2, 1]))
    model.own.build(model.trainable_variables)
    assert float(model.train(tf.ones([2, 1]))) == -4.0
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(model, folder)
        loaded = tf.saved_model.load(folder)
        assert float(loaded.train(tf.ones([2, 1]))) == -8.0


@pytest.mark.parametrize("way", ["set_weights", "checkpoint", "file"])
def test_a_scale_that_was_never_used_is_not_loaded(way, tmp_path):
    def train(optimizer, v, steps):
        for _ in range(steps):
            grads = grads_of(optimizer, lambda: v.value[0], [v])
            optimizer.apply_gradients(zip(grads, [v], strict=True))

    old, new = tfscale.wrap(keras.optimizers.SGD(1.0), "none"), sgd(512.0)
    (v,) = made(old)
    train(old, v, 3)
    new.build([v])
    if way == "set_weights":
        new.set_weights([w.numpy() for w in old.variables])
    elif way == "file":
        store: dict = {}
        old.save_own_variables(store)
        new.load_own_variables(store)
    else:
        path = tf.train.Checkpoint(optimizer=old).save(str(tmp_path / "checkpoint"))
        tf.train.Checkpoint(optimizer=new).restore(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(new, v, 1)
        new.finalize_variable_values([v])
    assert float(new.loss_scale) == 512.0
    assert v.numpy().tolist() == [-4.0]


def test_a_scale_that_was_used_is_loaded():
    old, new = sgd(64.0), sgd(512.0)
    (v,) = made(old)
    grads = grads_of(old, lambda: v.value[0], [v])
    old.apply_gradients(zip(grads, [v], strict=True))
    new.build([v])
    new.set_weights([w.numpy() for w in old.variables])
    assert float(new.loss_scale) == 64.0


# Auto in eager code.


@pytest.mark.slow
def test_a_layer_that_casts_in_its_own_call_is_scaled():
    class Casts(keras.layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(3, 1), initializer="zeros")

        def call(self, x):
            product = tf.cast(x, tf.float16) @ tf.cast(self.kernel, tf.float16)
            return tf.cast(product, tf.float32)

    layer = Casts()
    layer.build((None, 3))
    optimizer = tfscale.wrap(keras.optimizers.SGD(1.0))
    for n in (1, 2):
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(tf.reduce_sum(layer(tf.fill([1, 3], 2.0**-20))))
        grads = tape.gradient(scaled, layer.trainable_variables)
        optimizer.apply_gradients(zip(grads, layer.trainable_variables, strict=True))
        assert float(optimizer.loss_scale) == 2.0**15
        np.testing.assert_allclose(layer.kernel.numpy(), np.full((3, 1), -n * 2.0**-20))
