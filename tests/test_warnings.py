"""A warning that points into a package tells nobody which line to change."""

import importlib.util
import sys
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfscale


def lines_of(caught):
    return {(w.category, w.filename) for w in caught}


HERE = {(tfscale.LossScaleWarning, __file__)}


@pytest.mark.parametrize("graph", [False, True])
def test_gradients_of_an_unscaled_loss(graph):
    optimizer = tfscale.wrap(keras.optimizers.SGD(0.1), "dynamic")
    variable = keras.Variable(1.0)

    def step():
        optimizer.apply_gradients([(tf.constant(1.0), variable)])

    # AutoGraph runs a copy of `step`, in a file of its own.
    with pytest.warns(tfscale.LossScaleWarning, match="unscaled loss") as caught:
        (tf.function(step) if graph else step)()
    assert lines_of(caught) == HERE


def test_skipped_steps_of_fit():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    optimizer = tfscale.wrap(keras.optimizers.SGD(0.1), "dynamic")
    model.compile(optimizer, loss="mse", jit_compile=False)
    with pytest.warns(tfscale.LossScaleWarning, match="skipped") as caught:
        model.fit(np.full((4, 1), np.inf), np.zeros((4, 1)), verbose=0)
    assert lines_of(caught) == HERE


def test_a_setting_that_wrap_replaces():
    with pytest.warns(tfscale.LossScaleWarning, match="loss_scale_factor") as caught:
        tfscale.wrap(keras.optimizers.SGD(0.1, loss_scale_factor=8.0))
    assert lines_of(caught) == HERE


def test_a_stalled_run():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    tfscale.compile(model, "sgd", loss="mse", jit_compile=False)
    x, y = np.full((4, 1), np.inf), np.zeros((4, 1))
    with pytest.warns(tfscale.LossScaleWarning) as caught:
        model.fit(x, y, batch_size=1, verbose=0, callbacks=[tfscale.StallGuard(2)])
    assert any("No step was applied for 2 steps" in str(w.message) for w in caught)
    assert lines_of(caught) == HERE


def test_a_fit_inside_an_installed_package(tmp_path):
    path = tmp_path / "site-packages" / "other.py"
    path.parent.mkdir()
    path.write_text("def fit(model, *data):\n    model.fit(*data, verbose=0)\n")
    spec = importlib.util.spec_from_file_location("other", path)
    other = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(other)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(tfscale.wrap("sgd", "dynamic"), loss="mse", run_eagerly=True)
    with pytest.warns(tfscale.LossScaleWarning) as caught:
        other.fit(model, np.full((4, 1), np.inf), np.zeros((4, 1)))
    assert lines_of(caught) == HERE


def test_a_module_whose_attributes_raise(monkeypatch):
    class Lazy(types.ModuleType):
        def __getattr__(self, name):
            raise ImportError("a package is missing")

    monkeypatch.setitem(sys.modules, "lazy", Lazy("lazy"))
    code = "tfscale.wrap(keras.optimizers.SGD(0.1, loss_scale_factor=8.0))"
    with pytest.warns(tfscale.LossScaleWarning, match="loss_scale_factor"):
        exec(compile(code, "<cell>", "exec"))
