"""What the tests of several files need."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from versions import need_multi_optimizer

# How `fit` executes its step: the arguments of `compile`.
FIT_MODES = {
    "eager": {"run_eagerly": True},
    "graph": {"run_eagerly": False, "jit_compile": False},
    "jit": {"run_eagerly": False, "jit_compile": True},
}


def slow(*values):
    """A set of parameters whose test is marked slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


# A graph takes half a second where eager code takes none, and XLA several for a step of `fit`.
slow_graph, slow_jit = slow("graph"), slow("jit")
slow_cond, slow_select, slow_compiled = slow("cond"), slow("select"), slow("compiled")

# How a step is executed, and how the optimizer skips inside of it.
STEP_MODES = {
    "eager": ("eager", "auto"),
    "auto": ("graph", "auto"),
    "cond": ("graph", "cond"),
    "select": ("graph", "select"),
    "compiled": ("graph", "compiled"),
    "jit": ("jit", "auto"),
    "jit-cond": ("jit", "cond"),
}


def execute(how, function, **settings):
    """The function as it is for "eager", else one that is traced, for "jit" compiled by XLA too."""
    if how == "eager":
        return function
    return tf.function(function, jit_compile=how == "jit", **settings)


def multi():
    """Adam, and for each bias an optimizer of its own kind."""
    need_multi_optimizer()
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.Adam(0.1), {".*bias": keras.optimizers.SGD(0.1, momentum=0.9)}
        )
    )


def values(variables):
    return [v.numpy() for v in variables]


def assert_same(mine, others):
    """Each array of the one equals its counterpart of the other."""
    for i, (a, b) in enumerate(zip(mine, others, strict=True)):
        np.testing.assert_array_equal(a, b, err_msg=str(i))
