"""A release of Keras or TensorFlow that drops a private name which tfscale touches fails here.

Each function of `tfscale._compat` is called, each private name in it is looked up at its owner, and
no other module may touch one.
"""

import ast
import functools
import pathlib
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from versions import need_multi_optimizer

from tfscale import _compat

L = keras.layers
SOURCES = sorted(pathlib.Path(_compat.__file__).parent.rglob("*.py"))


def multi():
    need_multi_optimizer()
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(keras.optimizers.SGD(), {"a": keras.optimizers.Adam()})
    )


# Whose each private name is: an object that has it, or must let it be replaced.
OPTIMIZER = keras.optimizers.SGD(momentum=0.9, use_ema=True, gradient_accumulation_steps=2)
OPTIMIZER.build([keras.Variable([1.0])])
WEIGHT_DECAY = keras.optimizers.SGD()
WEIGHT_DECAY.exclude_from_weight_decay(var_names=["bias"])
MODEL = keras.Sequential([keras.Input((2,)), L.Dense(1)])
MODEL.compile(optimizer="sgd", loss="mse")
OWNERS = {
    "_accumulated_gradients": OPTIMIZER,
    "_aggregation": OPTIMIZER.variables[0].value,
    "_all_reduce_sum_gradients": TFOptimizer,
    "_apply_weight_decay": OPTIMIZER,
    "_backend_apply_gradients": OPTIMIZER,
    "_backend_increment_gradient_accumulators": OPTIMIZER,
    "_backend_reset_gradient_accumulators": OPTIMIZER,
    "_backend_update_step": OPTIMIZER,
    "_call_has_training_arg": MODEL,
    "_clip_gradients": OPTIMIZER,
    "_compute_loss": MODEL,
    "_exclude_from_weight_decay": WEIGHT_DECAY,
    "_flatten_layers": MODEL,
    "_functional": MODEL,
    "_get_variable_index": OPTIMIZER,
    "_in_multi_worker_mode": tf.distribute.MultiWorkerMirroredStrategy().extended,
    "_inner_optimizers": multi() if hasattr(keras.optimizers, "MultiOptimizer") else None,
    "_iterations": OPTIMIZER,
    "_layers": MODEL,
    "_loss_tracker": MODEL,
    "_maybe_symbolic_build": TensorFlowTrainer,
    "_metrics": MODEL.layers[0],
    "_model_variables_moving_average": OPTIMIZER,
    "_symbolic_build": MODEL,
    "_track_variable": OPTIMIZER,
    "_trainable_variables": OPTIMIZER,
    "_update_model_variables_moving_average": OPTIMIZER,
    "_var_key": OPTIMIZER,
    "_variables": OPTIMIZER,
}
# Public in spite of the underscore.
OURS = {"_replace", "_fields", "_asdict"}


def parsed(path):
    return ast.parse(path.read_text())


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def used(tree):
    """The private attributes that a module reads, writes or names in a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from [node.value] * (node.value.isidentifier() and is_private(node.value))


def defined(tree):
    """The private names that a module gives to its own functions, classes and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute):
            yield node.target.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "__setattr__":
            yield getattr(node.args[1], "value", None)


COMPAT = parsed(pathlib.Path(_compat.__file__))
PRIVATE = sorted(set(used(COMPAT)) - {n.name for n in COMPAT.body if hasattr(n, "name")})


@pytest.mark.parametrize("name", PRIVATE)
def test_a_private_name_is_still_there(name):
    assert name in OWNERS, f"say in OWNERS of {__file__} whose {name} is"
    if OWNERS[name] is None:
        need_multi_optimizer()
    assert hasattr(OWNERS[name], name)


def test_no_owner_is_listed_for_a_name_that_is_not_used():
    assert set(OWNERS) == set(PRIVATE)


def test_private_names_of_others_are_touched_in_one_module_only():
    others = {path: parsed(path) for path in SOURCES if path.name != "_compat.py"}
    own = OURS.union(*map(defined, others.values())) - set(PRIVATE)
    for path, tree in others.items():
        foreign = set(used(tree)) - own - set(defined(tree))
        assert not foreign, f"{path.name} touches {foreign}: move that into _compat.py"


@pytest.mark.parametrize(
    ("module", "base"),
    [
        ("optimizer", keras.optimizers.LossScaleOptimizer(WEIGHT_DECAY)),
        ("inner", keras.optimizers.LossScaleOptimizer(WEIGHT_DECAY)),
        ("reporting", keras.optimizers.LossScaleOptimizer(WEIGHT_DECAY)),
        ("training", MODEL),
    ],
)
def test_private_names_of_ours_are_none_of_the_base_class(module, base):
    path = pathlib.Path(_compat.__file__).with_name(f"{module}.py")
    ours = {name for name in defined(parsed(path)) if name and is_private(name)}
    assert ours & set(dir(base)) == set()


def test_private_modules_are_imported_in_one_module_only():
    for path in SOURCES:
        for node in ast.walk(parsed(path)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            private = [n for n in names if n.startswith(("keras.src", "tensorflow.python"))]
            assert not private or path.name == "_compat.py", f"{path.name} imports {private}"


def test_every_function_is_called_here():
    functions = [
        node.name
        for node in COMPAT.body
        if isinstance(node, ast.FunctionDef) and not is_private(node.name)
    ]
    here = {
        node.attr
        for node in ast.walk(parsed(pathlib.Path(__file__)))
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "_compat"
    }
    assert set(functions) - here == set()


# Graphs.


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_in_xla_context(jit_compile, nested):
    answers = []

    def ask():
        answers.append(_compat.in_xla_context())

    @tf.function(jit_compile=jit_compile, autograph=False)
    def step(x):
        (tf.function(ask) if nested else ask)()
        tf.cond(x > 0, lambda: ask() or x, lambda: x)
        return x

    step.get_concrete_function(tf.constant(1.0))
    assert answers == [jit_compile] * 2
    assert not _compat.in_xla_context()


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4)])
def test_xla_reduce_or(shape):
    bits = tf.constant(np.random.default_rng(0).choice([0, 1, 6, 1 << 30], shape), tf.int32)
    reduced = tf.function(_compat.xla_reduce_or, jit_compile=True, autograph=False)(bits)
    assert int(reduced) == np.bitwise_or.reduce(bits.numpy(), axis=None)


def test_no_inline_is_an_attribute_that_functions_take():
    function = tf.function(tf.abs, experimental_attributes={_compat.NO_INLINE: True})
    definition = function.get_concrete_function(tf.TensorSpec([])).function_def
    assert definition.attr[_compat.NO_INLINE].b


def test_rarely_makes_one_operation_of_a_plain_graph():
    @tf.function(autograph=False)
    def function(x):
        return _compat.rarely(lambda: tf.exp(tf.sin(x)))()

    operations = [
        op.type for op in function.get_concrete_function(tf.TensorSpec([])).graph.get_operations()
    ]
    assert "PartitionedCall" in operations
    assert not {"Exp", "Sin"} & set(operations)
    assert float(function(tf.constant(0.0))) == float(_compat.rarely(lambda: tf.constant(1.0))())


def test_added_rows_reach_every_write_of_rows_that_keras_makes():
    variable = keras.Variable(np.ones((3, 1), "float32"))
    optimizer = keras.optimizers.Adagrad(0.5, initial_accumulator_value=1.0)
    optimizer.build([variable])
    rows = tf.IndexedSlices(tf.constant([[2.0]]), tf.constant([1]), tf.constant([3, 1]))
    seen = []

    def change(values, nothing):
        seen.append(float(np.copysign(1.0, nothing)))
        return tf.zeros_like(values)

    before = [v.numpy() for v in (variable, *optimizer.variables[2:])]
    with _compat.added_rows(optimizer, change):
        optimizer.apply_gradients([(rows, variable)])
    assert seen == [-1.0, 1.0]  # added to the accumulator, subtracted from the variable
    for old, new in zip(before, (variable, *optimizer.variables[2:]), strict=True):
        np.testing.assert_array_equal(old, new.numpy())
    assert not {"assign_add", "assign_sub"} & set(vars(optimizer))


def test_outer_graphs():
    found = []

    @tf.function(autograph=False)
    def outer():
        @tf.function(autograph=False)
        def inner():
            found.extend(_compat.outer_graphs())
            return tf.constant(1)

        found.append(tf.compat.v1.get_default_graph())
        return inner()

    outer()
    assert len(found) >= 3
    assert found[2] is found[0]
    assert list(_compat.outer_graphs()) == []


# Optimizers.


def test_what_the_wrapper_would_not_read_is_refused():
    _compat.check_wrapper_arguments({"dynamic": True, "use_ema": False, "clipnorm": None})
    with pytest.raises(ValueError, match="on the `inner_optimizer`"):
        _compat.check_wrapper_arguments({"clipnorm": 1.0})
    with pytest.raises(ValueError, match="does not support arguments: `clipnrom`"):
        _compat.check_wrapper_arguments({"clipnrom": 1.0})


def test_native():
    variable = tf.Variable(1.0)
    assert _compat.native(variable) is variable
    assert isinstance(_compat.native(keras.Variable(1.0)), tf.Variable)


def test_sub_optimizers():
    plain, several = keras.optimizers.SGD(), multi()
    assert _compat.sub_optimizers(plain) == [plain]
    assert len(_compat.sub_optimizers(several)) == 3
    assert _compat.sub_optimizers(several)[0] is several


def test_what_an_optimizer_lists_and_knows():
    optimizer, variable = keras.optimizers.SGD(momentum=0.9), keras.Variable([1.0])
    optimizer.exclude_from_weight_decay([variable])
    optimizer.build([variable])
    assert _compat.built_on(optimizer) == [variable]
    assert _compat.tracked(optimizer) == optimizer.variables
    key = _compat.variable_key(optimizer, variable)
    assert key == _compat.variable_key(optimizer, variable.value)
    assert _compat.excluded_from_weight_decay(optimizer) == {key}
    assert _compat.excluded_from_weight_decay(keras.optimizers.SGD()) == set()
    _compat.set_built_on(optimizer, [])
    assert _compat.built_on(optimizer) == []
    assert not any(v is variable for v in optimizer.variables)
    another = keras.Variable([1.0])
    _compat.track(optimizer, another)
    assert optimizer.variables[-1] is another


def test_a_wrapper_is_built_on_what_the_optimizer_in_it_trains():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    optimizer.build([variable := keras.Variable([1.0])])
    assert _compat.built_on(optimizer) == [variable]


def branch(condition, yes, no, *args):
    return (yes if condition else no)(*args)


SETTINGS = [
    {"momentum": 0.9, "clipnorm": 0.5, "weight_decay": 0.1},
    {"gradient_accumulation_steps": 2, "clipnorm": 0.5, "weight_decay": 0.1},
    {"use_ema": True, "ema_overwrite_frequency": 2},
    {"use_ema": True, "ema_overwrite_frequency": 2, "gradient_accumulation_steps": 2},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("within", [_compat.together, _compat.apart])
def test_replaced_conditions_take_the_same_steps(within, settings):
    results = []
    for replace in (False, True):
        optimizer = keras.optimizers.SGD(0.5, **settings)
        variables = [keras.Variable([1.0, 2.0]), keras.Variable([3.0])]
        for step in range(5):
            pairs = [(tf.fill(v.shape, 1.0 + step), v) for v in variables]
            if replace:
                arguments = [optimizer, branch] if within is _compat.together else [optimizer]
                with within(*arguments):
                    optimizer.apply_gradients(pairs)
            else:
                optimizer.apply_gradients(pairs)
        assert not [n for n in optimizer.__dict__ if n.startswith(("_all_reduce", "_backend_"))]
        results.append([v.numpy() for v in variables + optimizer.variables])
    for mine, others in zip(*results, strict=True):
        np.testing.assert_array_equal(mine, others)


@pytest.mark.parametrize("within", [_compat.together, _compat.apart])
def test_gradients_are_not_reduced_a_second_time(within):
    optimizer = keras.optimizers.SGD()
    seen = []
    original = TFOptimizer._all_reduce_sum_gradients
    try:
        TFOptimizer._all_reduce_sum_gradients = lambda self, pairs: seen.append(1) or pairs
        pairs = [(tf.constant([1.0]), keras.Variable([1.0]))]
        optimizer.apply_gradients(pairs)
        with within(optimizer, branch) if within is _compat.together else within(optimizer):
            optimizer.apply_gradients(pairs)
    finally:
        TFOptimizer._all_reduce_sum_gradients = original
    assert seen == [1]  # Keras still asks it, and only outside


def test_no_variable_waits_for_the_first_replica_apart():
    optimizer = keras.optimizers.SGD()
    iterations = optimizer.iterations.value
    before = iterations.aggregation
    if _compat.KERAS >= (3, 7):  # no variable of Keras 3.6 has an aggregation
        assert before == tf.VariableAggregation.ONLY_FIRST_REPLICA
    with _compat.apart(optimizer):
        assert iterations.aggregation == tf.VariableAggregation.NONE
    assert iterations.aggregation == before


# Strategies.


def two_replicas():
    # No collectives, which only one strategy of a process can use.
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())


def test_without_a_strategy_no_question_about_one_is_answered_with_yes():
    assert not _compat.strategy_without_merge_call_in_clusters()
    assert not _compat.has_several_workers(tf.distribute.get_strategy())


def test_a_worker_without_others_is_not_several():
    assert not _compat.has_several_workers(tf.distribute.MultiWorkerMirroredStrategy())


def test_replicas_that_share_a_cluster_are_told_by_the_graph_of_their_thread():
    strategy = two_replicas()
    answers = []

    def replica():
        graph = getattr(threading.current_thread(), "graph", None)
        answers.append((graph is not None, _compat.replicas_share_a_cluster()))
        return tf.constant(1.0)

    for jit_compile in (False, True):
        step = tf.function(lambda: strategy.run(replica), jit_compile=jit_compile, autograph=False)
        step.get_concrete_function()
    assert answers == [(True, False)] * 2 + [(True, True)] * 2
    with strategy.scope():
        assert not _compat.strategy_without_merge_call()
        assert not _compat.strategy_without_merge_call_in_clusters()  # on CPUs


def test_replicas_meet_unless_each_traces_a_function_of_its_own():
    answers = []

    def ask():
        answers.append(_compat.replica_can_meet())
        return tf.constant(1.0)

    def traced():
        return tf.function(ask, autograph=False)()

    for replica in (ask, traced):
        step = tf.function(functools.partial(two_replicas().run, replica), autograph=False)
        step.get_concrete_function()
    assert answers[:2] == [True, True]
    assert set(answers[2:]) == {False}
    assert _compat.replica_can_meet()


def test_fit_asks_the_model_to_build_itself_from_a_local_batch():
    model = keras.Sequential([L.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    _compat.build_from_local_batch(model)
    x = np.ones((4, 2), "float32")
    model.fit(tf.data.Dataset.from_tensors((x, x[:, :1])), verbose=0, shuffle=False)
    assert model.built
    assert len(model.trainable_variables) == 2


# Models.


class Nested(L.Layer):
    def __init__(self):
        super().__init__()
        self.inner = L.BatchNormalization()
        self.mean = keras.metrics.Mean()

    def call(self, x, training=False):
        self.mean.update_state(tf.reduce_sum(x))
        return self.inner(x, training=training)


def nested_model():
    x = keras.Input((2,))
    return keras.Model(x, L.Dense(1)(L.Dropout(0.5)(Nested()(x))))


def test_layers_and_their_variables():
    model = nested_model()
    nested = model.layers[1]
    assert _compat.sub_layers(nested) == [nested.inner]
    assert nested.inner in _compat.sub_layers(model)
    assert _compat.sub_layers(object.__new__(Nested)) == []
    assert _compat.own_variables(nested) == []
    assert _compat.own_variables(nested, deep=True) == [nested.inner.gamma, nested.inner.beta]
    statistics = {id(nested.inner.moving_mean), id(nested.inner.moving_variance)}
    assert {id(v) for v in _compat.state_variables(model)} >= statistics
    assert not {id(v) for v in _compat.state_variables(model)} & {
        id(v) for v in model.trainable_variables
    }


def test_a_frozen_weight_is_no_state_and_a_weight_that_a_call_writes_is():
    spectral = L.SpectralNormalization(L.Dense(1))
    model = keras.Sequential([keras.Input((2,)), L.Dense(2, trainable=False), spectral])
    found = {id(v) for v in _compat.state_variables(model)}
    assert id(model.layers[0].kernel) not in found
    assert id(spectral.kernel) in found


def test_what_a_train_step_is_made_of():
    model = nested_model()
    model.compile(optimizer="sgd", loss="mse", metrics=["mae"])
    x, y = tf.ones((4, 2)), tf.ones((4, 1))
    _compat.build(model, (x, y, None))
    assert model.optimizer.built
    found = {id(v) for v in _compat.metric_variables(model)}
    for metric in (model.layers[1].mean, _compat.loss_tracker(model), *model.metrics):
        assert metric.variables
        assert {id(v) for v in metric.variables} <= found
    mean = model.layers[1].inner.moving_mean.numpy()
    y_pred = _compat.forward(model, x)
    assert not np.array_equal(model.layers[1].inner.moving_mean.numpy(), mean)  # in training
    loss = _compat.compute_loss(model, x, y, y_pred, None)
    np.testing.assert_allclose(loss, tf.reduce_mean((y_pred - y) ** 2), rtol=1e-6)


def test_the_loss_of_all_replicas_is_what_one_device_would_have():
    model = keras.Sequential([keras.Input((2,)), L.Dense(1)])
    model.compile(loss="mse")
    x, y = tf.ones((4, 2)), tf.ones((4, 1))
    one = _compat.compute_loss(model, x, y, model(x), None)
    np.testing.assert_array_equal(_compat.whole_loss(one), one)

    def replica():
        return _compat.whole_loss(_compat.compute_loss(model, x, y, model(x), None))

    for loss in two_replicas().run(replica).values:
        np.testing.assert_allclose(loss, one, rtol=1e-6)


def test_a_count_in_the_logs_has_a_mean_on_the_progress_bar():
    bar = keras.utils.Progbar(target=2, verbose=1)
    for count in (1, 2):
        bar.update(count, [("skips", _compat.for_logs(tf.constant(1, tf.int64)))])
    assert float(_compat.for_logs(tf.constant(3, tf.int64))) == 3


def test_a_model_without_a_training_argument_is_called_without():
    class Bare(keras.Model):
        def call(self, x):
            return 2.0 * x

    assert float(_compat.forward(Bare(), tf.ones(()))) == 2.0


def test_casts_of_a_functional_model_are_found_where_they_are_operations():
    x = keras.Input((2,))
    layers = [L.Dense(1, dtype="mixed_float16"), L.Dense(1)]
    for model in (keras.Sequential([x, *layers]), keras.Model(x, layers[1](layers[0](x)))):
        dtypes = [cast.dtype for cast in _compat.casts(model)]
        assert dtypes == (["float16", "float32"] if _compat.KERAS < (3, 10) else [])
    assert _compat.casts(layers[0]) == []


def test_functional_models_are_told_by_their_arguments():
    x = keras.Input((2,))
    assert _compat.makes_functional((x, x), {})
    assert _compat.makes_functional((), {"inputs": x, "outputs": x})
    assert not _compat.makes_functional((), {"name": "x"})
    assert isinstance(keras.Model(x, L.Dense(1)(x)), _compat.Functional)
