"""Half-precision weights are trained through float32 copies; float32 weights have none."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import FIT_MODES, execute
from versions import need_multi_optimizer

import tfscale

HALF = ["float16", "bfloat16"]
halves = pytest.mark.parametrize("dtype", HALF)

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 4)).astype("float32")
Y = (X @ RNG.normal(size=(4, 1))).astype("float32")


def net(dtype="bfloat16"):
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3, dtype=dtype, name="hidden"),
            keras.layers.Dense(1, dtype=dtype, name="out"),
        ],
        name="net",
    )


def wrapped(optimizer, policy="none", **kwargs):
    return tfscale.wrap(optimizer, policy, **kwargs)


def apply(optimizer, variables, *grads):
    """One step with these gradients."""
    optimizer.scale_loss(tf.constant(1.0))
    optimizer.apply_gradients(list(zip(grads, variables, strict=True)))


def copies(optimizer):
    return optimizer.masters.copies


def assert_rounded(optimizer, variables):
    """Each variable is its copy, rounded."""
    for copy, variable in zip(copies(optimizer), variables, strict=True):
        np.testing.assert_array_equal(tf.cast(copy.value, variable.dtype), variable.value)


# What they are for.


@pytest.mark.parametrize(
    ("dtype", "mode", "update"),
    [
        ("float16", "eager", "auto"),
        ("bfloat16", "eager", "auto"),
        ("float16", "graph", "cond"),
        ("bfloat16", "graph", "select"),
        pytest.param("float16", "graph", "compiled", marks=pytest.mark.slow),
        pytest.param("bfloat16", "jit", "auto", marks=pytest.mark.slow),
    ],
)
def test_updates_below_half_an_ulp_add_up(dtype, mode, update):
    variable = keras.Variable(np.ones(2), dtype=dtype)
    optimizer = wrapped(keras.optimizers.SGD(1.0), update=update)

    def step(grad):
        apply(optimizer, [variable], grad)

    step = execute(mode, step, autograph=False)
    tiny = tf.constant([2.0**-12, 0.0])  # half an ulp below 1 is 2**-12 and 2**-9
    for _ in range(64):
        step(tiny)
    np.testing.assert_array_equal(copies(optimizer)[0], [1 - 64 * 2.0**-12, 1.0])
    assert float(variable.value[0]) == 1 - 2.0**-6
    # And a step that is skipped leaves variable and copy alone.
    step(tf.constant([np.inf, 0.0]))
    np.testing.assert_array_equal(copies(optimizer)[0], [1 - 2.0**-6, 1.0])
    assert_rounded(optimizer, [variable])


@halves
def test_without_them_such_updates_are_lost(dtype):
    variable = keras.Variable(np.ones(2), dtype=dtype)
    optimizer = wrapped(keras.optimizers.SGD(1.0), master_weights=False)
    for _ in range(64):
        apply(optimizer, [variable], tf.constant([2.0**-12, 0.0]))
    assert not optimizer.masters
    assert float(variable.value[0]) == 1.0


@pytest.mark.parametrize(
    ("dtype", "mode"),
    [
        ("bfloat16", "eager"),
        pytest.param("bfloat16", "graph", marks=pytest.mark.slow),
        pytest.param("float16", "jit", marks=pytest.mark.slow),
    ],
)
def test_fit_rounds_its_copies_into_the_model(dtype, mode):
    model = net(dtype)
    optimizer = tfscale.wrap(keras.optimizers.Adam(0.05), initial_scale=2.0**8)
    tfscale.compile(model, optimizer, loss="mse", **FIT_MODES[mode])
    losses = model.fit(X, Y, epochs=5, batch_size=8, verbose=0).history["loss"]
    assert losses[-1] < losses[0] / 2
    assert [c.dtype for c in copies(model.optimizer)] == ["float32"] * 4
    assert [v.dtype for v in model.trainable_variables] == [dtype] * 4
    assert_rounded(model.optimizer, model.trainable_variables)
    # The slots are as exact as the copies.
    slots = [v for v in model.optimizer.inner_optimizer.variables if len(v.shape)]
    assert len(slots) == 8
    assert {v.dtype for v in slots} == {"float32"}


def test_the_copies_train_as_float32_does():
    """Given the same gradients, the copy is what a float32 variable would be, bit for bit."""
    half, full = (
        keras.Variable(np.ones(8), dtype="bfloat16"),
        keras.Variable(np.ones(8), dtype="float32"),
    )
    ours, theirs = wrapped(keras.optimizers.AdamW(0.01)), keras.optimizers.AdamW(0.01)
    for _ in range(10):
        grad = tf.constant(RNG.normal(size=8), tf.float32)
        apply(ours, [half], grad)
        theirs.apply_gradients([(grad, full)])
    np.testing.assert_array_equal(copies(ours)[0], full)


@halves
def test_plain_tf_variables_have_copies_too(dtype):
    variable = tf.Variable(np.ones(2), dtype=dtype, name="outer/weight")
    optimizer = wrapped(keras.optimizers.SGD(1.0))
    for _ in range(4):
        apply(optimizer, [variable], tf.constant([2.0**-12, 0.0]))
    assert copies(optimizer)[0].path == "outer/weight"
    assert float(copies(optimizer)[0][0]) == 1 - 4 * 2.0**-12


def test_only_variables_in_half_precision_have_a_copy():
    half, full = (
        keras.Variable(np.ones(2), dtype="bfloat16"),
        keras.Variable(np.ones(2), dtype="float32"),
    )
    optimizer = wrapped(keras.optimizers.SGD(1.0, momentum=0.9))
    for _ in range(2):
        apply(optimizer, [full, half], tf.constant([1.0, 1.0]), tf.constant([1.0, 1.0]))
    assert len(copies(optimizer)) == 1
    np.testing.assert_array_equal(copies(optimizer)[0], full)
    assert optimizer.masters.of(full) is full


def test_sparse_gradients_reach_the_copy():
    table = keras.Variable(np.ones((4, 2)), dtype="float16")
    optimizer = wrapped(keras.optimizers.SGD(1.0))
    rows = tf.IndexedSlices(tf.fill([3, 2], 2.0**-12), [1, 3, 1], [4, 2])
    apply(optimizer, [table], rows)
    np.testing.assert_array_equal(
        copies(optimizer)[0].numpy()[:, 0], [1.0, 1 - 2.0**-11, 1.0, 1 - 2.0**-12]
    )


# What they cost where nobody needs them.


@pytest.mark.slow
def test_float32_weights_cost_no_variable_or_operation():
    def traced(master_weights):
        keras.utils.clear_session(free_memory=False)
        model = net("mixed_float16")
        inner = keras.optimizers.SGD(momentum=0.9)
        optimizer = tfscale.wrap(inner, "dynamic", master_weights=master_weights)
        model.compile(optimizer, loss="mse")
        step = tf.function(model.train_step, autograph=False)
        graph = step.get_concrete_function((tf.constant(X), tf.constant(Y))).graph
        functions = graph.as_graph_def().library.function
        operations = [op.type for op in graph.get_operations()]
        operations += [node.op for f in functions for node in f.node_def]
        return [(v.path, v.dtype, v.shape) for v in optimizer.variables], sorted(operations)

    variables, operations = traced(False)
    for master_weights in ("auto", True):
        same_variables, same_operations = traced(master_weights)
        assert same_variables == variables
        assert same_operations == operations
    # The comparison would see them.
    assert len(operations) > 100


@pytest.mark.parametrize("master_weights", ["yes", None, 1.5, "AUTO"])
def test_a_setting_that_is_none_is_refused(master_weights):
    with pytest.raises(ValueError, match='must be "auto", True or False'):
        tfscale.wrap("sgd", master_weights=master_weights)


def test_an_optimizer_built_without_copies_warns():
    variable = keras.Variable(np.ones(2), dtype="bfloat16")
    inner = keras.optimizers.SGD(1.0)
    inner.build([variable])
    with pytest.warns(tfscale.LossScaleWarning, match="before it was wrapped"):
        wrapped(inner).build([variable])
    with pytest.raises(ValueError, match="Wrap it before its first step"):
        wrapped(inner, master_weights=True).build([variable])
    wrapped(inner, master_weights=False).build([variable])


def test_wrapping_again_keeps_them():
    variable = keras.Variable(np.ones(2), dtype="bfloat16")
    first = wrapped(keras.optimizers.SGD(1.0))
    apply(first, [variable], tf.constant([2.0**-12, 0.0]))
    second = tfscale.wrap(first, 8.0)
    for _ in range(3):
        apply(second, [variable], tf.constant([2.0**-9, 0.0]))
    assert float(copies(second)[0][0]) == 1 - 4 * 2.0**-12


# Everything that acts on weights acts on the copies.


def test_weights_set_from_outside_are_taken_over():
    variable = keras.Variable(np.ones(3), dtype="bfloat16")
    optimizer = wrapped(keras.optimizers.SGD(1.0))
    tiny = tf.fill([3], 2.0**-12)
    apply(optimizer, [variable], tiny)
    variable.assign([5.0, 1.0, np.nan])
    apply(optimizer, [variable], tiny)
    # The second one was set to what it was, so that its small part is kept.
    np.testing.assert_array_equal(
        copies(optimizer)[0], np.float32([5 - 2.0**-12, 1 - 2.0**-11, np.nan])
    )


def test_a_moving_average_is_one_of_the_copies():
    variable = keras.Variable(np.ones(1), dtype="bfloat16")
    reference = keras.Variable(np.ones(1), dtype="float32")
    settings = {"use_ema": True, "ema_momentum": 0.5}
    ours = wrapped(keras.optimizers.SGD(2.0**-6, **settings))
    theirs = keras.optimizers.SGD(2.0**-6, **settings)
    for i in range(5):
        grad = tf.constant([1.0 + i])
        apply(ours, [variable], grad)
        theirs.apply_gradients([(grad, reference)])
    ours.finalize_variable_values([variable])
    theirs.finalize_variable_values([reference])
    np.testing.assert_array_equal(copies(ours)[0], reference)
    assert_rounded(ours, [variable])


@pytest.mark.slow
@pytest.mark.parametrize("update", ["cond", "select"])
def test_an_average_reaches_weights_without_a_gradient(update):
    variables = [keras.Variable(np.ones(1), dtype="bfloat16") for _ in range(2)]
    references = [keras.Variable(np.ones(1), dtype="float32") for _ in range(2)]
    settings = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}
    ours = wrapped(keras.optimizers.SGD(2.0**-4, **settings), update=update)
    theirs = keras.optimizers.SGD(2.0**-4, **settings)
    ours.build(variables)
    theirs.build(references)

    @tf.function(autograph=False, jit_compile=update == "select")
    def step(*grads):
        apply(ours, variables[: len(grads)], *grads)

    for n in (2, 1, 2, 2, 1, 1):  # the second variable gets no gradient now and then
        grads = [tf.constant([1.0])] * n
        step(*grads)
        theirs.apply_gradients(list(zip(grads, references[:n], strict=True)))
        for copy, reference in zip(copies(ours), references, strict=True):
            np.testing.assert_array_equal(copy, reference)
        assert_rounded(ours, variables)


def test_constraints_hold_for_the_copies():
    layer = keras.layers.Dense(1, dtype="float16", kernel_constraint="non_neg", use_bias=False)
    layer.build((None, 2))
    layer.kernel.assign([[2.0**-12], [1.0]])
    optimizer = wrapped(keras.optimizers.SGD(1.0))
    apply(optimizer, [layer.kernel], tf.constant([[1.0], [0.5]]))
    np.testing.assert_array_equal(copies(optimizer)[0], [[0.0], [0.5]])
    np.testing.assert_array_equal(layer.kernel, [[0.0], [0.5]])


@pytest.mark.parametrize("by", ["list", "names"])
def test_excluded_weights_do_not_decay(by):
    model = net()
    for v in model.trainable_variables:
        v.assign(np.ones(v.shape))
    optimizer = wrapped(keras.optimizers.SGD(0.5, weight_decay=2.0**-10))
    biases = [layer.bias for layer in model.layers]
    if by == "list":
        optimizer.exclude_from_weight_decay(var_list=biases)
    else:
        optimizer.exclude_from_weight_decay(var_names=["bias"])
    variables = model.trainable_variables
    apply(optimizer, variables, *[tf.zeros(v.shape) for v in variables])
    decayed = np.float32(1 - 2.0**-11)
    values = [np.unique(c.numpy()).tolist() for c in copies(optimizer)]
    assert values == [[decayed], [1.0], [decayed], [1.0]]


def test_weights_excluded_in_one_of_many_do_not_decay():
    need_multi_optimizer()
    model = net()
    decaying = keras.optimizers.SGD(0.5, weight_decay=2.0**-10)
    decaying.exclude_from_weight_decay(var_list=[model.layers[0].bias])
    choice = keras.optimizers.OptimizerMap(keras.optimizers.SGD(1.0), {"net/hidden/.*": decaying})
    optimizer = wrapped(keras.optimizers.MultiOptimizer(choice))
    for v in model.trainable_variables:
        v.assign(np.ones(v.shape))
    variables = model.trainable_variables
    apply(optimizer, variables, *[tf.fill(v.shape, 2.0**-12) for v in variables])
    values = [np.unique(c.numpy()).tolist() for c in copies(optimizer)]
    rates = [(0.5, 1), (0.5, 0), (1.0, 0), (1.0, 0)]  # rate, whether it decays
    expected = [1 - rate * 2.0**-12 - decays * 2.0**-11 for rate, decays in rates]
    assert values == [[e] for e in expected]


def test_accumulated_gradients_are_exact_as_the_copies():
    variable = keras.Variable(np.ones(1), dtype="bfloat16")
    optimizer = wrapped(keras.optimizers.SGD(1.0, gradient_accumulation_steps=4))
    for _ in range(4):
        apply(optimizer, [variable], tf.constant([2.0**-12 * 1.25]))
    assert float(copies(optimizer)[0][0]) == 1 - 2.0**-12 * 1.25


# Files.


def trained():
    keras.utils.set_random_seed(0)
    model = net()
    tfscale.compile(model, keras.optimizers.Adam(0.01, use_ema=True), "mse", run_eagerly=True)
    model.fit(X, Y, batch_size=16, shuffle=False, verbose=0)
    return model


def fresh(built):
    model = net()
    tfscale.compile(model, keras.optimizers.Adam(0.01, use_ema=True), "mse", run_eagerly=True)
    if built:
        model.optimizer.build(model.trainable_variables)
    return model


def assert_goes_on_alike(model, other):
    """The next epoch leads both to the same place, copies and slots included."""
    for one in (model, other):
        one.fit(X, Y, batch_size=16, shuffle=False, verbose=0)
    pairs = zip(
        [*model.variables, *model.optimizer.variables],
        [*other.variables, *other.optimizer.variables],
        strict=True,
    )
    for ours, theirs in pairs:
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy(), err_msg=ours.path)
    small_parts = [
        c.numpy() - np.float32(v.numpy())
        for c, v in zip(copies(model.optimizer), model.trainable_variables, strict=True)
    ]
    assert any(part.any() for part in small_parts)


@pytest.mark.slow
@pytest.mark.parametrize("built", [True, False])
def test_a_weights_file_restores_the_copies(built, tmp_path):
    model = trained()
    model.save_weights(tmp_path / "m.weights.h5")
    other = fresh(built)
    other.load_weights(tmp_path / "m.weights.h5")
    assert_goes_on_alike(other, model)


@pytest.mark.slow
def test_a_model_file_restores_the_copies(tmp_path):
    model = trained()
    model.save(tmp_path / "m.keras")
    other = keras.models.load_model(tmp_path / "m.keras")
    tfscale.compile(other, other.optimizer, loss="mse", run_eagerly=True)
    assert_goes_on_alike(other, model)


@pytest.mark.slow
@pytest.mark.parametrize("built", [True, False])
def test_a_checkpoint_restores_the_copies(built, tmp_path):
    model = trained()
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(tmp_path / "c")
    other = fresh(built)
    status = tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path)
    other.optimizer.build(other.trainable_variables)
    status.assert_existing_objects_matched()
    assert_goes_on_alike(other, model)


@pytest.mark.slow
def test_a_list_of_weights_restores_the_copies():
    model, other = trained(), fresh(built=True)
    other.set_weights(model.get_weights())
    other.optimizer.set_weights([v.numpy() for v in model.optimizer.variables])
    assert_goes_on_alike(other, model)


@pytest.mark.slow
def test_weights_alone_are_taken_over_by_the_copies(tmp_path):
    """A file without an optimizer, loaded into a model that has trained already."""
    bare = net()
    bare.set_weights([np.full(v.shape, 0.5) for v in bare.weights])
    bare.save_weights(tmp_path / "bare.weights.h5")
    model = trained()
    model.load_weights(tmp_path / "bare.weights.h5")
    variables = model.trainable_variables
    apply(model.optimizer, variables, *[tf.zeros(v.shape) for v in variables])
    for copy in copies(model.optimizer):
        np.testing.assert_allclose(copy, np.full(copy.shape, 0.5), atol=0.02)
