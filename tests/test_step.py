"""One step: a good one equals the plain optimizer bit for bit, a bad one leaves no trace."""

import functools
import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import STEP_MODES, execute, slow_compiled, slow_cond, slow_jit
from versions import need_multi_optimizer

import tfscale

# XLA selects.
modes = pytest.mark.parametrize("mode", ["eager", "cond", slow_jit])


def slices(values, rows, height):
    shape = tf.constant([height, 2], tf.int64)
    return tf.IndexedSlices(tf.constant(values, tf.float32), tf.constant(rows, tf.int64), shape)


def variables():
    """A kernel, a table, a constrained bias and one that gets no gradient."""
    rng = np.random.default_rng(0)
    made = [
        keras.Variable(rng.normal(size=(3, 2)).astype("float32"), name="kernel"),
        keras.Variable(rng.normal(size=(5, 2)).astype("float32"), name="table"),
        keras.Variable(np.full(2, 0.3, "float32"), name="bias"),
        keras.Variable(np.ones(1, "float32"), name="unused"),
    ]
    made[2].constraint = keras.constraints.NonNeg()
    return made


def gradients_of(step, sparse):
    rng = np.random.default_rng(step)
    table = slices(rng.normal(size=(3, 2)), [1, 1, 4], 5)
    return [
        tf.constant(rng.normal(size=(3, 2)), tf.float32),
        table if sparse else tf.convert_to_tensor(table),
        tf.constant([1.0, -1.0]) * (step + 1),
        None,
    ]


def scaled_by(scale, gradient):
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * scale, gradient.indices, gradient.dense_shape)
    return None if gradient is None else gradient * tf.cast(scale, gradient.dtype)


def multi():
    need_multi_optimizer()
    optimizers = [keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.1)]
    return keras.optimizers.MultiOptimizer(lambda variable: optimizers["table" in variable.path])


K = keras.optimizers
OPTIMIZERS = {
    "sgd-momentum": lambda: K.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: K.Adam(0.1),
    "adamw-ema": lambda: K.AdamW(0.1, weight_decay=0.1, use_ema=True, ema_overwrite_frequency=2),
    "accumulation": lambda: K.Adam(0.1, gradient_accumulation_steps=2),
    "clipnorm": lambda: K.SGD(0.1, clipnorm=0.5),
    "global-clipnorm": lambda: K.Adam(0.1, global_clipnorm=0.5),
    "clipvalue": lambda: K.SGD(0.1, clipvalue=0.5),
    "schedule": lambda: K.SGD(K.schedules.ExponentialDecay(0.1, 1, 0.5), momentum=0.9),
    "multi": multi,
}
DENSE_ONLY = ("accumulation", "clipvalue")  # of plain Keras


def state(optimizer, trained):
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return [v.numpy() for v in [*inner.variables, *trained]]


def bits(arrays):
    return [array.tobytes() for array in arrays]


@functools.cache
def plain_run(name, how):
    """The state after each of four steps of the plain optimizer, fed unscaled gradients."""
    trained, optimizer = variables(), OPTIMIZERS[name]()
    optimizer.build(trained)
    apply = lambda grads: optimizer.apply_gradients(zip(grads, trained, strict=True))  # noqa: E731
    step = execute(how, apply, autograph=False)
    states = []
    for i in range(4):
        step(gradients_of(i, name not in DENSE_ONLY))
        states.append(state(optimizer, trained))
    return states


class Wrapped:
    """A wrapped optimizer, its variables, and a step that scales what it is given."""

    def __init__(self, inner, mode, policy=1024.0, trained=None):
        how, update = STEP_MODES[mode]
        self.variables = variables() if trained is None else trained
        self.optimizer = tfscale.wrap(inner, policy, update=update)
        self.optimizer.build(self.variables)
        self.step = execute(how, self._step, autograph=False)

    def _step(self, grads, loss=1.0):
        self.optimizer.scale_loss(loss)
        grads = [scaled_by(self.optimizer.loss_scale, g) for g in grads]
        return self.optimizer.apply_gradients(zip(grads, self.variables, strict=True))

    def state(self):
        return bits(state(self.optimizer, self.variables))


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *[(name, "eager") for name in OPTIMIZERS],
        # The others differ in what they write: slots, averages, sums of several steps.
        ("adamw-ema", "select"),
        pytest.param("adamw-ema", "jit", marks=pytest.mark.slow),
        *[
            pytest.param(name, mode, marks=pytest.mark.slow)
            for name, mode in [
                ("accumulation", "cond"),
                ("multi", "select"),
                ("accumulation", "compiled"),
                ("schedule", "jit-cond"),
            ]
        ],
    ],
)
def test_good_steps_are_plain_bad_ones_leave_no_trace(name, mode):
    wrapped = Wrapped(OPTIMIZERS[name](), mode, tfscale.Dynamic(initial_scale=1024.0))
    sparse = name not in DENSE_ONLY
    xla = mode in ("compiled", "jit", "jit-cond")
    expected = plain_run(name, "jit" if xla else STEP_MODES[mode][0])
    for i in range(4):
        wrapped.step(gradients_of(i, sparse))
        good = state(wrapped.optimizer, wrapped.variables)
        if xla:
            # What XLA fuses with what decides about the last bit.
            for got, wanted in zip(good, expected[i], strict=True):
                np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=1e-7)
        else:
            assert bits(good) == bits(expected[i]), f"step {i}"
        bad = gradients_of(i, sparse)
        bad[i % 3] = scaled_by(np.inf, bad[i % 3])
        wrapped.step(bad)
        assert wrapped.state() == bits(good), f"the bad step {i}"
    assert int(wrapped.optimizer.skipped_steps) == 4
    assert float(wrapped.optimizer.loss_scale) == 1024.0 / 2**4


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
@modes
def test_a_bad_element_anywhere_skips_the_step(mode):
    trained = [*variables(), keras.Variable(np.ones((2, 2)), dtype="float16", name="half")]
    policy = tfscale.Dynamic(initial_scale=4.0, min_scale=4.0)
    wrapped = Wrapped(OPTIMIZERS["sgd-momentum"](), mode, policy, trained)
    good = [*gradients_of(0, True), tf.ones([2, 2], tf.float16)]
    wrapped.step(good)
    before = wrapped.state()
    tried = 0
    for which in (0, 1, 2, 4):
        values = good[which].values if which == 1 else good[which]
        size = int(tf.size(values))
        for element in sorted({0, size // 2, size - 1}):
            for bad in (np.inf, -np.inf, np.nan):
                broken = values.numpy().copy()
                broken.flat[element] = bad
                broken = slices(broken, [1, 1, 4], 5) if which == 1 else tf.constant(broken)
                wrapped.step([*good[:which], broken, *good[which + 1 :]])
                tried += 1
                assert wrapped.state() == before, (which, element, bad)
                assert int(wrapped.optimizer.skipped_steps) == tried
    assert int(wrapped.optimizer.iterations) == 1
    wrapped.step(good)
    assert int(wrapped.optimizer.iterations) == 2
    assert wrapped.state() != before


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
@modes
def test_a_bad_loss_skips_and_leaves_the_scale(mode):
    wrapped = Wrapped(OPTIMIZERS["sgd-momentum"](), mode, tfscale.Dynamic(initial_scale=8.0))
    before = wrapped.state()
    for loss in (np.nan, np.inf, -np.inf):
        bad = [g if g is None else g * np.nan for g in gradients_of(0, False)]
        wrapped.step(bad, tf.constant(loss, tf.float32))
        assert wrapped.state() == before
    assert float(wrapped.optimizer.loss_scale) == 8.0
    assert wrapped.optimizer.record().skipped_loss == 3
    wrapped.step(gradients_of(0, False), tf.constant(1.0))
    assert int(wrapped.optimizer.iterations) == 1


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
@pytest.mark.parametrize("mode", ["eager", slow_cond, slow_jit])
def test_finite_gradients_of_a_bad_loss_are_applied(mode):
    wrapped = Wrapped(OPTIMIZERS["sgd-momentum"](), mode, tfscale.Dynamic(initial_scale=8.0))
    for n, loss in enumerate((np.nan, np.inf, 1.0)):
        wrapped.step(gradients_of(0, True), tf.constant(loss, tf.float32))
        assert int(wrapped.optimizer.iterations) == n + 1
    record = wrapped.optimizer.record()
    assert (record.skipped, record.nonfinite_losses) == (0, 2)
    assert float(wrapped.optimizer.loss_scale) == 8.0


@pytest.mark.parametrize("mode", ["eager", "cond", slow_compiled])
def test_the_next_step_uses_the_new_scale(mode):
    how, update = STEP_MODES[mode]
    variable = keras.Variable([0.0])
    policy = tfscale.Dynamic(initial_scale=4.0, growth_interval=1, max_scale=32.0)
    optimizer = tfscale.wrap(keras.optimizers.SGD(1.0), policy, update=update)
    optimizer.build([variable])

    def two_steps():
        scales = []
        for _ in range(2):
            scaled = optimizer.scale_loss(1.0)
            optimizer.apply_gradients([(tf.reshape(scaled, [1]), variable)])
            scales.append(scaled)
        return scales

    run = execute(how, two_steps, autograph=False)
    assert [float(s) for s in run()] == [4.0, 8.0]
    assert [float(s) for s in run()] == [16.0, 32.0]
    assert float(optimizer.loss_scale) == 32.0
    assert variable.numpy().tolist() == [-4.0]


# Optimizers that do something of their own.


class DoublesInApply(keras.optimizers.SGD):
    def apply(self, grads, trainable_variables=None):
        super().apply([2.0 * g for g in grads], trainable_variables)


class DoublesInApplyGradients(keras.optimizers.SGD):
    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients([(2.0 * g, v) for g, v in grads_and_vars])


class Counts(keras.optimizers.SGD):
    """Writes a variable that it does not list."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls = tf.Variable(0)

    def update_step(self, gradient, variable, learning_rate):
        self.calls.assign_add(1)
        super().update_step(2.0 * gradient, variable, learning_rate)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *[(kind, "eager") for kind in (DoublesInApply, DoublesInApplyGradients)],
        *[(kind, "cond") for kind in (DoublesInApply, DoublesInApplyGradients)],
        *[(Counts, mode) for mode in ("eager", "cond", "select")],
        pytest.param(Counts, "jit", marks=pytest.mark.slow),
    ],
)
def test_what_an_optimizer_overrides_runs_and_skips(kind, mode):
    variable = keras.Variable([1.0, 1.0])
    inner = kind(1.0)
    wrapped = Wrapped(inner, mode, 4.0, [variable])
    for gradient in ([1.0, 3.0], [np.inf, 0.0], [1.0, 0.0]):
        wrapped.step([tf.constant(gradient)])
    assert variable.numpy().tolist() == [-3.0, -5.0]
    assert int(wrapped.optimizer.skipped_steps) == 1
    if kind is Counts:
        assert int(inner.calls) == 2


@modes
def test_overwriting_gradients_are_not_unscaled(mode):
    weight, history = keras.Variable([1.0]), keras.Variable([5.0])
    history.overwrite_with_gradient = True
    how, update = STEP_MODES[mode]
    optimizer = tfscale.wrap(keras.optimizers.Adam(1.0), 1024.0, update=update)
    optimizer.build([weight, history])

    def apply(gradient, value):
        optimizer.scale_loss(1.0)
        optimizer.apply_gradients([(gradient, weight), (value, history)])

    step = execute(how, apply, autograph=False)
    step(tf.constant([1024.0]), tf.constant([7.0]))
    assert history.numpy().tolist() == [7.0]
    assert weight.numpy()[0] < 1.0
    after = weight.numpy().tolist()
    step(tf.constant([np.nan]), tf.constant([9.0]))
    step(tf.constant([1024.0]), tf.constant([np.inf]))
    assert history.numpy().tolist() == [7.0]
    assert weight.numpy().tolist() == after


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_overwriting_gradients_survive_unscale(how):
    weight, history = keras.Variable([1.0]), keras.Variable([5.0])
    history.overwrite_with_gradient = True
    optimizer = tfscale.wrap(keras.optimizers.SGD(1.0), 1024.0)
    optimizer.build([weight, history])

    def apply(gradient, value):
        optimizer.scale_loss(1.0)
        grads = optimizer.unscale([gradient, value])
        optimizer.apply_gradients(zip(grads, [weight, history], strict=True))

    execute(how, apply)(tf.constant([1024.0]), tf.constant([7.0]))
    assert history.numpy().tolist() == [7.0]
    assert weight.numpy().tolist() == [0.0]


# Scaling the loss.


@pytest.mark.parametrize("how", ["eager", "graph", "jit"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_loss_in_half_precision_is_scaled_in_float32(dtype, how):
    optimizer = tfscale.wrap(keras.optimizers.SGD(), 2.0**15)
    scaled = execute(how, optimizer.scale_loss)(tf.constant(100.0, dtype))
    assert scaled.dtype == tf.float32
    assert float(scaled) == 100.0 * 2**15


@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_a_wider_loss_keeps_its_dtype(dtype):
    scaled = tfscale.wrap(keras.optimizers.SGD(), 4.0).scale_loss(tf.constant(3.0, dtype))
    assert scaled.dtype == dtype
    assert scaled.numpy() == 12.0


@pytest.mark.parametrize(
    "loss", [3, 3.0, np.float32(3), np.array(3.0), keras.Variable(3.0)], ids=str
)
def test_whatever_is_a_number_is_a_loss(loss):
    assert float(tfscale.wrap(keras.optimizers.SGD(), 4.0).scale_loss(loss)) == 12.0


# Policies that do not move.


@pytest.mark.parametrize(
    ("policy", "mode"),
    [
        *[(tfscale.Static(4.0), mode) for mode in ("eager", "cond")],
        *[(tfscale.NoScaling(), mode) for mode in ("eager", "cond", "jit")],
    ],
    ids=str,
)
def test_a_fixed_scale_still_skips(policy, mode):
    variable = keras.Variable([1.0])
    wrapped = Wrapped(keras.optimizers.SGD(1.0), mode, policy, [variable])
    wrapped.step([tf.constant([np.nan])])
    assert variable.numpy().tolist() == [1.0]
    wrapped.step([tf.constant([0.5])])
    assert variable.numpy().tolist() == [0.5]
    assert float(wrapped.optimizer.loss_scale) == policy.initial_scale
    assert int(wrapped.optimizer.skipped_steps) == 1
    assert int(wrapped.optimizer.iterations) == 1


@pytest.mark.parametrize(
    ("policy", "mode"),
    [
        (tfscale.Static(4.0, skip_nonfinite=False), "cond"),
        *[(tfscale.NoScaling(skip_nonfinite=False), mode) for mode in ("eager", "cond", "jit")],
    ],
    ids=str,
)
def test_without_the_guard_everything_is_applied(policy, mode):
    variable = keras.Variable([1.0, 1.0])
    wrapped = Wrapped(keras.optimizers.SGD(1.0), mode, policy, [variable])
    wrapped.step([tf.constant([-np.inf, 0.5])], tf.constant(np.nan))
    assert variable.numpy().tolist() == [np.inf, 0.5]
    assert int(wrapped.optimizer.skipped_steps) == 0


@pytest.mark.parametrize("policy", [tfscale.NoScaling(), "none"], ids=repr)
def test_no_scaling_returns_the_loss_as_it_is(policy):
    loss = tf.constant(3.0, tf.bfloat16)
    assert tfscale.wrap(keras.optimizers.SGD(), policy).scale_loss(loss) is loss


@pytest.mark.parametrize("mode", ["eager", "cond", slow_jit])
def test_a_gradient_infinite_by_unscaling_is_skipped(mode):
    variable = keras.Variable([1.0])
    policy = tfscale.Dynamic(initial_scale=2.0**-4, min_scale=2.0**-8)
    how, update = STEP_MODES[mode]
    optimizer = tfscale.wrap(keras.optimizers.SGD(1.0), policy, update=update)
    optimizer.build([variable])

    def apply(gradient):
        optimizer.scale_loss(1.0)
        optimizer.apply_gradients([(gradient, variable)])

    step = execute(how, apply, autograph=False)
    step(tf.constant([1e38]))  # 1e38 * 2**4 is more than float32 can hold
    assert variable.numpy().tolist() == [1.0]
    assert int(optimizer.skipped_steps) == 1
    step(tf.constant([2.0**-5]))
    assert variable.numpy().tolist() == [0.0]


# What the traced graph must not hold.


def nodes(function, *args):
    """Every node of the graph of `function` and of all that it calls."""
    graph = function.get_concrete_function(*args).graph.as_graph_def(add_shapes=True)
    yield from graph.node
    for called in graph.library.function:
        yield from called.node_def


def outputs(node):
    shapes = [tuple(d.size for d in s.dim) for s in node.attr["_output_shapes"].list.shape]
    dtypes = {v.type for v in node.attr.values() if v.type}
    return shapes, dtypes


@pytest.mark.parametrize("mode", ["cond", "select", "compiled", "jit-cond"])
def test_an_embedding_gradient_is_never_made_dense(mode):
    table = keras.Variable(np.zeros((1000, 2), "float32"))
    wrapped = Wrapped(keras.optimizers.SGD(0.1), mode, "dynamic", [table])
    found = list(nodes(wrapped.step, [slices([[1.0, 2.0]] * 3, [1, 1, 4], 1000)]))
    assert found
    assert not [n.name for n in found if n.op == "UnsortedSegmentSum"]
    for node in found:
        shapes, dtypes = outputs(node)
        if (1000, 2) in shapes:
            # `select` takes each variable as a whole, the old one or the new one.
            assert "cond" not in mode, node
            assert tf.bool.as_datatype_enum not in dtypes, node
            assert node.op in ("ReadVariableOp", "SelectV2", "Identity"), node.op


HOST = ("PyFunc", "PyFuncStateless", "EagerPyFunc", "PrintV2", "StringFormat", "Assert")


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
@pytest.mark.parametrize("mode", ["auto", "select", "compiled", "jit"])
def test_no_step_waits_for_the_host(mode):
    wrapped = Wrapped(OPTIMIZERS["sgd-momentum"](), mode, "dynamic")
    found = {node.op for node in nodes(wrapped.step, gradients_of(0, True))}
    assert "AssignVariableOp" in found
    assert not found.intersection(HOST)


# Constructor arguments that Keras lets one set later.


def test_the_growth_interval_can_be_set_later():
    optimizer = tfscale.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=4.0)
    variable = keras.Variable([0.0])
    optimizer.dynamic_growth_steps = 2
    assert optimizer.dynamic_growth_steps == 2
    assert optimizer.get_config()["dynamic_growth_steps"] == 2
    for _ in range(2):
        optimizer.apply([tf.constant([4.0])], [variable])
    assert float(optimizer.loss_scale) == 8.0
    assert variable.numpy().tolist() == [-2.0]


@pytest.mark.parametrize("value", [0, -1, 2.5, "many"])
def test_a_growth_interval_that_is_none_is_refused(value):
    optimizer = tfscale.LossScaleOptimizer(keras.optimizers.SGD(1.0))
    with pytest.raises(ValueError, match="growth_interval"):
        optimizer.dynamic_growth_steps = value
    assert optimizer.dynamic_growth_steps == 2000


def test_a_static_scale_has_no_growth_interval_to_set():
    optimizer = tfscale.wrap(keras.optimizers.SGD(1.0), 4.0)
    assert optimizer.dynamic_growth_steps is None
    with pytest.raises(ValueError, match=r"tfscale\.Dynamic"):
        optimizer.dynamic_growth_steps = 5


def test_initial_scale_can_be_set_before_a_step():
    optimizer = tfscale.LossScaleOptimizer(keras.optimizers.SGD(1.0))
    optimizer.initial_scale = 64.0
    assert float(optimizer.loss_scale) == 64.0
    with pytest.raises(ValueError, match="initial_scale"):
        optimizer.initial_scale = -1.0


# Calls that do not fit.


def test_gradients_and_variables_must_be_as_many():
    optimizer = tfscale.wrap(keras.optimizers.SGD(1.0), 4.0)
    with pytest.raises(ValueError, match="2 gradients and 1 variables"):
        optimizer.apply([tf.ones(1), tf.ones(1)], [keras.Variable([1.0])])


@pytest.mark.parametrize(
    "gradient",
    [np.ones(2), [1.0, 1.0], keras.Variable([1.0, 1.0]), tf.constant([1, 1]), np.ones(2, "int64")],
    ids=["numpy", "list", "variable", "int tensor", "int numpy"],
)
@pytest.mark.parametrize("unscale", [False, True])
def test_what_keras_takes_for_a_gradient_is_one(gradient, unscale):
    variable = keras.Variable([4.0, 4.0])
    optimizer = tfscale.wrap(keras.optimizers.SGD(1.0), 2.0)
    optimizer.scale_loss(tf.constant(1.0))
    given = optimizer.unscale([gradient])[0] if unscale else gradient
    optimizer.apply_gradients([(given, variable)])
    assert variable.numpy().tolist() == [3.5, 3.5]


@pytest.mark.parametrize(
    "gradient",
    [tf.ones([4]), tf.ones([4, 2]), tf.IndexedSlices(tf.ones([1, 2]), [0], [4, 2])],
    ids=["rank", "columns", "slices"],
)
@pytest.mark.parametrize("how", ["eager", "graph"])
def test_a_gradient_of_another_shape_writes_nothing(how, gradient):
    trained = [keras.Variable(np.ones(shape, "float32")) for shape in [(3,), (4, 3)]]
    optimizer = tfscale.wrap(keras.optimizers.Adam(0.1), 2.0)
    optimizer.build(trained)
    before = state(optimizer, trained)
    pairs = [(tf.ones([3]), trained[0]), (gradient, trained[1])]
    step = execute(how, lambda: optimizer.apply_gradients(pairs))
    with pytest.raises(ValueError, match="must have the shape of its variable"):
        step()
    assert bits(state(optimizer, trained)) == bits(before)


def test_gradients_that_are_all_none_name_the_tape():
    variable = keras.Variable([1.0])
    optimizer = tfscale.wrap(keras.optimizers.SGD(1.0), 2.0)
    with pytest.raises(ValueError, match="inside the tape"):
        optimizer.apply_gradients([(None, variable)])
    assert not optimizer.built


def test_an_unbuilt_optimizer_needs_variables():
    with pytest.raises(ValueError, match="build"):
        tfscale.wrap(keras.optimizers.SGD(1.0), 4.0).apply([tf.ones(1)])


def test_no_gradients_at_all_are_no_step():
    optimizer = tfscale.wrap(keras.optimizers.SGD(1.0), 4.0)
    optimizer.apply([], [])
    assert int(optimizer.apply_gradients([])) == 0


@pytest.mark.parametrize("how", ["eager", "graph", slow_jit])
def test_an_optimizer_builds_itself_on_its_first_step(how):
    variable = keras.Variable([1.0])
    optimizer = tfscale.wrap(keras.optimizers.Adam(1.0), 4.0)

    def apply():
        optimizer.scale_loss(1.0)
        optimizer.apply_gradients([(tf.constant([4.0]), variable)])

    step = execute(how, apply)
    step()
    step()
    assert int(optimizer.iterations) == 2
    assert abs(float(variable.numpy()[0]) + 1.0) < 1e-4


def test_a_dropped_step_function_frees_its_graph():
    optimizer, variable = tfscale.wrap(keras.optimizers.SGD(0.5), "dynamic"), keras.Variable(1.0)
    optimizer.build([variable])

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(variable * 2.0)
        optimizer.apply_gradients([(tape.gradient(scaled, variable.value), variable)])

    graph = weakref.ref(step.get_concrete_function().graph)
    del step
    gc.collect()
    assert graph() is None
