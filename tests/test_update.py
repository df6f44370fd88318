"""How a step is skipped: a table of which few rows are written is not copied to be put back."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import slow

import tfscale

ROWS, WIDTH = 1000, 4
OPTIMIZERS = {"sgd": lambda: keras.optimizers.SGD(0.5), "adam": lambda: keras.optimizers.Adam(0.1)}


class Table:
    """A table and a head, and a step on rows 3, 3 and 7 that overflows on demand."""

    def __init__(self, update, jit, inner):
        self.table = keras.Variable(np.ones((ROWS, WIDTH), "float32"), name="table")
        self.head = keras.Variable(np.ones(WIDTH, "float32"), name="head")
        self.optimizer = tfscale.wrap(OPTIMIZERS[inner](), 8.0, update=update)
        self.optimizer.build([self.table, self.head])
        self.step = tf.function(self._step, jit_compile=jit, autograph=False)

    def _step(self, bad):
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(self.table.value, tf.constant([3, 3, 7]))
            scaled = self.optimizer.scale_loss(tf.reduce_sum(rows * self.head))
        table, head = tape.gradient(scaled, [self.table.value, self.head.value])
        factor = tf.where(bad, tf.constant(np.inf), 1.0)
        pairs = [(table, self.table), (head * factor, self.head)]
        self.optimizer.apply_gradients(pairs)

    def state(self):
        variables = [self.table, self.head, *self.optimizer.inner_optimizer.variables]
        return [v.numpy() for v in variables]

    def operations(self):
        graph = self.step.get_concrete_function(tf.constant(False)).graph
        graph = graph.as_graph_def(add_shapes=True)
        functions = [f.node_def for f in graph.library.function]
        return [node for nodes in (graph.node, *functions) for node in nodes]


# SGD writes rows, Adam whole slots.
@pytest.mark.parametrize(
    ("update", "jit", "inner"),
    [
        ("cond", None, "sgd"),
        ("select", None, "sgd"),
        ("select", None, "adam"),
        slow("compiled", None, "adam"),
        slow("auto", True, "sgd"),
        slow("cond", True, "adam"),
    ],
)
def test_bad_steps_put_rows_back_good_ones_write_rows(update, jit, inner):
    run = Table(update, jit, inner)
    run.step(tf.constant(False))
    good = run.state()
    expected = {3, 7}
    assert set(np.flatnonzero((good[0] != 1).any(axis=1))) == expected
    run.step(tf.constant(True))
    for before, after in zip(good, run.state(), strict=True):
        np.testing.assert_array_equal(before, after)
    run.step(tf.constant(False))
    assert (run.state()[0][[3, 7]] != good[0][[3, 7]]).all()


@pytest.mark.parametrize("update", ["cond", "select", "compiled"])
def test_nothing_as_big_as_the_table_is_touched(update):
    nodes = Table(update, None, "sgd").operations()
    head = [node for node in nodes if node.op == "AssignVariableOp"]
    assert head  # the counters are assigned, so something is looked at
    shapes = {
        tuple(d.size for d in shape.dim)
        for node in nodes
        if node.op in ("SelectV2", "AssignVariableOp", "IsFinite", "ZerosLike", "Fill")
        for shape in node.attr["_output_shapes"].list.shape
    }
    assert not any(ROWS in shape for shape in shapes)
    assert not any(
        node.op == "AssignVariableOp" and "table" in "".join(node.input) for node in nodes
    )


def test_a_table_is_selected_without_reading_its_rows():
    by_rows = [node.op for node in Table("select", None, "sgd").operations()]
    assert by_rows.count("ResourceScatterSub") == 1
    assert by_rows.count("ResourceGather") == 1  # the look-up
    # Adam's update of a sparse gradient writes every row of its slots, and so they are put back.
    whole = [node.op for node in Table("select", None, "adam").operations()]
    assert whole.count("ResourceScatterSub") == 0


@pytest.mark.parametrize(("update", "jit"), [("select", None), slow("auto", True)])
def test_a_skipped_step_leaves_the_sign_of_zero(update, jit):
    variable = keras.Variable(np.array([[0.0, -0.0], [-0.0, 0.0]], "float32"))
    optimizer = tfscale.wrap(keras.optimizers.Adagrad(0.1), 1.0, update=update)
    optimizer.build([variable])
    optimizer.inner_optimizer.variables[-1].assign([[0.0, -0.0], [-0.0, 0.0]])

    @tf.function(jit_compile=jit)
    def step():
        rows = tf.IndexedSlices(tf.constant([[np.inf, 1.0]]), tf.constant([0]), tf.constant([2, 2]))
        optimizer.scale_loss(0.0)
        optimizer.apply_gradients([(rows, variable)])

    step()
    for state in (variable, optimizer.inner_optimizer.variables[-1]):
        assert np.signbit(state.numpy()).tolist() == [[False, True], [True, False]]


class Visits(keras.optimizers.SGD):
    """Counts how often each row was updated, and has an `assign_sub` of its own."""

    def build(self, variables):
        super().build(variables)
        self.visits = self.add_variable((3,), "zeros", "int32", name="visits")

    def assign_sub(self, variable, value, factor=1.0):
        super().assign_sub(variable, value * factor)
        return variable

    def update_step(self, gradient, variable, learning_rate):
        ones = tf.ones_like(gradient.indices)
        self.assign_add(self.visits, tf.IndexedSlices(ones, gradient.indices, tf.constant([3])))
        step = gradient * tf.cast(learning_rate, variable.dtype)
        assert self.assign_sub(variable, step, factor=0.5) is variable


@pytest.mark.parametrize(("update", "jit"), [("select", None), slow("compiled", None)])
def test_an_optimizer_with_unlisted_writes_branches(update, jit):
    variable = keras.Variable(np.ones((3, 1), "float32"))
    optimizer = tfscale.wrap(Visits(0.25), 1.0, update=update)
    optimizer.build([variable])

    @tf.function(jit_compile=jit)
    def step(value):
        rows = tf.IndexedSlices(
            tf.stack([[value], [1.0]]), tf.constant([1, 1]), tf.constant([3, 1])
        )
        optimizer.scale_loss(0.0)
        optimizer.apply_gradients([(rows, variable)])

    for value in (1.0, np.nan):
        step(tf.constant(value))
        assert optimizer.inner_optimizer.visits.numpy().tolist() == [0, 2, 0]
        assert variable.numpy().ravel().tolist() == [1.0, 0.75, 1.0]


class Shrinks(keras.optimizers.SGD):
    """Takes 1 from each row that it sees, by a method of the variable."""

    def update_step(self, gradient, variable, learning_rate):
        ones = tf.ones_like(gradient.values)
        variable.scatter_sub(tf.IndexedSlices(ones, gradient.indices))


def test_rows_written_without_assign_sub_are_put_back():
    variable = keras.Variable(np.ones((3, 1), "float32"))
    optimizer = tfscale.wrap(Shrinks(), 1.0, update="select")

    @tf.function
    def step(value):
        rows = tf.IndexedSlices(tf.reshape(value, [1, 1]), tf.constant([1]), tf.constant([3, 1]))
        optimizer.scale_loss(0.0)
        optimizer.apply_gradients([(rows, variable)])

    for value in (1.0, np.nan):
        step(tf.constant(value))
        assert variable.numpy().ravel().tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("update", ["auto", slow("select"), slow("compiled")])
def test_a_bad_batch_of_repeated_rows_ends_no_run(update):
    """Keras divides rows by the union of two sets of them, which NaN makes too small."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Embedding(6, 2), keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((2,), dtype="int32"), *layers])
    rmsprop = keras.optimizers.RMSprop(0.05, momentum=0.5)
    model.compile(tfscale.wrap(rmsprop, 1024.0, update=update), "mse", jit_compile=False)
    x = np.array([[1, 2], [3, 3], [4, 5], [0, 0]] * 3, "int32")
    y = np.ones((12, 1), "float32")
    y[4:8] = np.nan
    with pytest.warns(tfscale.LossScaleWarning, match="skipped"):
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert int(model.optimizer.skipped_steps) == 1


ROW_OPTIMIZERS = {
    "adadelta": lambda: keras.optimizers.Adadelta(0.5),
    "adagrad": lambda: keras.optimizers.Adagrad(0.5),
    "ftrl": lambda: keras.optimizers.Ftrl(0.5),
    "momentum": lambda: keras.optimizers.SGD(0.5, momentum=0.9, nesterov=True),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.5, momentum=0.5),
}


@pytest.mark.parametrize(
    ("name", "update", "jit"),
    [
        ("adadelta", "select", None),
        ("momentum", "select", None),
        slow("ftrl", "select", None),
        slow("rmsprop", "select", None),
        *[slow(name, "auto", True) for name in ("adadelta", "adagrad", "rmsprop")],
    ],
)
def test_rows_are_updated_as_plain_or_not_at_all(update, jit, name):
    """Keras' arithmetic of rows has shapes that XLA must work out, whatever is selected."""
    inner = ROW_OPTIMIZERS[name]
    plain, optimizer = inner(), tfscale.wrap(inner(), 4.0, update=update)
    pairs = [(o, keras.Variable(np.ones((6, 2), "float32"))) for o in (plain, optimizer)]

    def step_of(o, variable):
        o.build([variable])

        def step(factor):
            with tf.GradientTape() as tape:
                rows = tf.nn.embedding_lookup(variable.value, tf.constant([3, 3, 5]))
                scaled = o.scale_loss(tf.reduce_sum(rows * tf.stack([factor, 1.0])))
            o.apply_gradients([(tape.gradient(scaled, variable.value), variable)])

        return step

    steps = [step_of(*pair) for pair in pairs]
    steps[1] = tf.function(steps[1], jit_compile=jit, autograph=False)
    for factor in (1.0, np.nan, 2.0):
        for (_, variable), step in zip(pairs, steps, strict=True):
            before = variable.numpy()
            if np.isfinite(factor):
                step(tf.constant(factor))
            elif variable is pairs[1][1]:
                step(tf.constant(factor))
                np.testing.assert_array_equal(variable.numpy(), before)
    np.testing.assert_allclose(pairs[1][1].numpy(), pairs[0][1].numpy(), rtol=1e-5, atol=1e-6)
