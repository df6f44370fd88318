"""Each private name of Keras and TensorFlow still exists, and only `tfscale._compat` uses one.

The other files of this folder call the functions of `tfscale._compat`.
"""

import ast
import pathlib
from collections.abc import Iterator
from typing import Any

import keras
import pytest
import tensorflow as tf
from tensorflow.python.distribute.cross_device_utils import CollectiveReplicaLauncher
from versions import need_multi_optimizer

from tfscale import _compat

COMPAT = pathlib.Path(_compat.__file__).parent
PACKAGE = COMPAT.parent


def multi() -> keras.optimizers.Optimizer | None:
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        return None
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(keras.optimizers.SGD(), {"a": keras.optimizers.Adam()})
    )


# From a private name to an object that has it.
OPTIMIZER = keras.optimizers.SGD(momentum=0.9, use_ema=True, gradient_accumulation_steps=2)
OPTIMIZER.build([keras.Variable([1.0])])
WEIGHT_DECAY = keras.optimizers.SGD()
WEIGHT_DECAY.exclude_from_weight_decay(var_names=["bias"])
WRAPPER = keras.optimizers.LossScaleOptimizer(WEIGHT_DECAY)
MODEL = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
MODEL.compile(optimizer="sgd", loss="mse")
OWNERS = {
    "_accumulated_gradients": OPTIMIZER,
    "_aggregation": OPTIMIZER.variables[0].value,
    "_all_reduce_sum_gradients": OPTIMIZER,
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
    "_flatten_metrics_in_order": MODEL,
    "_functional": MODEL,
    "_get_variable_index": OPTIMIZER,
    "_id": tf.constant(1.0),
    "_in_multi_worker_mode": tf.distribute.MultiWorkerMirroredStrategy().extended,
    "_inner_optimizers": multi(),
    "_iterations": OPTIMIZER,
    "_layers": MODEL,
    "_loss_tracker": MODEL,
    "_maybe_symbolic_build": MODEL,
    "_metrics": MODEL.layers[0],
    "_model_variables_moving_average": OPTIMIZER,
    "_next_instance_key": CollectiveReplicaLauncher,
    "_symbolic_build": MODEL,
    "_track_variable": OPTIMIZER,
    "_trainable_variables": OPTIMIZER,
    "_update_model_variables_moving_average": OPTIMIZER,
    "_var_key": OPTIMIZER,
    "_variables": OPTIMIZER,
}
# Public in spite of the underscore.
OURS = {"_replace", "_fields", "_asdict"}


def parsed(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def used(tree: ast.AST) -> Iterator[str]:
    """The private attributes that a module reads, writes or names in a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from [node.value] * (node.value.isidentifier() and is_private(node.value))


def defined(tree: ast.AST) -> Iterator[str | None]:
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
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "set_untracked":
            yield getattr(node.args[1], "value", None)


SOURCES = {path: parsed(path) for path in COMPAT.glob("*.py")}
OTHERS = {path: parsed(path) for path in PACKAGE.rglob("*.py") if path not in SOURCES}
FUNCTIONS = {
    node.name
    for tree in SOURCES.values()
    for node in tree.body
    if isinstance(node, ast.FunctionDef)
}
PRIVATE = sorted({name for tree in SOURCES.values() for name in used(tree)} - FUNCTIONS)


@pytest.mark.parametrize("name", PRIVATE)
def test_private_name_still_exists(name: str) -> None:
    assert name in OWNERS, f"OWNERS in {__file__} must name an object that has {name}"
    if OWNERS[name] is None:
        need_multi_optimizer()
    assert hasattr(OWNERS[name], name)


def test_each_listed_name_is_used() -> None:
    assert set(OWNERS) == set(PRIVATE)


def test_each_function_is_tested() -> None:
    tested = {
        node.attr
        for path in pathlib.Path(__file__).parent.glob("test_*.py")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "_compat"
    }
    assert FUNCTIONS & set(dir(_compat)) <= tested


def test_no_other_module_uses_private_names() -> None:
    own = OURS.union(*map(defined, OTHERS.values())) - set(PRIVATE)
    for path, tree in OTHERS.items():
        foreign = set(used(tree)) - own - set(defined(tree))
        assert not foreign, f"{path.name} uses {foreign}: move that into _compat"


def test_no_other_module_imports_private_modules() -> None:
    for path, tree in OTHERS.items():
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            private = [n for n in names if n.startswith(("keras.src", "tensorflow.python"))]
            assert not private, f"{path.name} imports {private}: move that into _compat"


@pytest.mark.parametrize(
    ("module", "base"),
    [("optimizer", WRAPPER), ("inner_attributes", WRAPPER), ("training", MODEL)],
)
def test_our_private_names_hide_none_of_keras(module: str, base: Any) -> None:
    ours = {name for name in defined(OTHERS[PACKAGE / f"{module}.py"]) if name and is_private(name)}
    assert ours & set(dir(base)) == set()
