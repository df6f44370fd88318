"""What the tests of several files need."""

import pytest
import tensorflow as tf

# How `fit` executes its step: the arguments of `compile`.
FIT_MODES = {
    "eager": {"run_eagerly": True},
    "graph": {"run_eagerly": False, "jit_compile": False},
    "jit": {"run_eagerly": False, "jit_compile": True},
}
# A graph takes half a second where eager code takes none, and XLA several for a step of `fit`.
slow_graph = pytest.param("graph", marks=pytest.mark.slow)
slow_jit = pytest.param("jit", marks=pytest.mark.slow)
slow_compiled = pytest.param("compiled", marks=pytest.mark.slow)

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
