"""How a step is skipped: a table of which few rows are written is not copied to be put back."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfscale

ROWS, WIDTH = 1000, 4
OPTIMIZERS = {"sgd": lambda: keras.optimizers.SGD(0.5), "adam": lambda: keras.optimizers.Adam(0.1)}


class Table:
    """A table and a head, and a step on rows 3, 3 and 7 that overflows when it is told to."""

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
        graph = self.step.get_concrete_function(tf.constant(False)).graph.as_graph_def()
        functions = [f.node_def for f in graph.library.function]
        return [node for nodes in (graph.node, *functions) for node in nodes]


MODES = [("cond", None), ("select", None), ("compiled", None), ("auto", True), ("cond", True)]


@pytest.mark.parametrize("inner", OPTIMIZERS)
@pytest.mark.parametrize(("update", "jit"), MODES)
def test_a_bad_step_puts_the_rows_back_and_a_good_one_writes_them_only(update, jit, inner):
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
def test_nothing_as_big_as_the_table_is_selected_or_assigned(update):
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


def test_a_table_is_selected_by_what_is_added_to_its_rows_without_reading_them():
    by_rows = [node.op for node in Table("select", None, "sgd").operations()]
    assert by_rows.count("ResourceScatterSub") == 1
    assert by_rows.count("ResourceGather") == 1  # the look-up
    # Adam's update of a sparse gradient writes every row of its slots, and so they are put back.
    whole = [node.op for node in Table("select", None, "adam").operations()]
    assert whole.count("ResourceScatterSub") == 0


@pytest.mark.parametrize(("update", "jit"), MODES)
def test_what_is_added_to_rows_of_a_skipped_step_leaves_the_sign_of_zero(update, jit):
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
