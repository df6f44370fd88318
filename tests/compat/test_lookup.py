"""A private name is found where it is or was; one that is gone disables only what needs it."""

import re
import subprocess
import sys

import keras
import pytest
import tensorflow as tf

from tfscale import _compat
from tfscale._compat import lookup, optimizers


def test_name_is_found_where_it_is_or_was() -> None:
    new, old = "keras.src.no_module:Model", "keras.src.models.model:Model"
    assert lookup.find(new, old) is keras.Model
    assert lookup.find("keras.src.models.model:NoName", old) is keras.Model


def test_missing_name_fails_when_it_is_used() -> None:
    missing = lookup.find("keras.src.no_module:Model", "keras.src.models.model:NoName")
    assert not isinstance(keras.Model(), missing)
    places = "keras.src.no_module:Model or keras.src.models.model:NoName"
    with pytest.raises(NotImplementedError, match=re.escape(f"they have no {places}")):
        missing()

    class Sub(keras.Model, missing):
        pass

    with pytest.raises(NotImplementedError, match=f"Keras {keras.version()} with TensorFlow"):
        Sub()


def test_missing_method_is_not_replaced() -> None:
    optimizer = keras.optimizers.SGD()
    with (
        pytest.raises(NotImplementedError, match="no `_no_method` in SGD"),
        optimizers._replaced([(optimizer, "_no_method", None)]),
    ):
        pass


def test_missing_attribute_is_named() -> None:
    with pytest.raises(NotImplementedError, match="they have no `_loss_tracker` in object"):
        _compat.loss_tracker(object())


def test_error_of_a_model_passes_unchanged() -> None:
    class Faulty(keras.Model):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self._no_such_name

    with pytest.raises(AttributeError, match="no attribute '_no_such_name'"):
        _compat.forward(Faulty(), tf.ones(()))


@pytest.mark.slow
def test_import_works_without_private_modules() -> None:
    script = """
import importlib, keras, tensorflow as tf
real = importlib.import_module
def without_private(name, package=None):
    if name.startswith(("keras.src", "tensorflow.python", "tensorflow.compiler")):
        raise ImportError(name)
    return real(name, package)
importlib.import_module = without_private
import tfscale
optimizer = tfscale.wrap("sgd")
variable = keras.Variable(1.0)
def step():
    optimizer.apply_gradients([(tf.constant(1.0), variable)])
def functional():
    tfscale.Model(x := keras.Input((2,)), x)
step()
assert float(variable) < 1
tfscale.Model()
for use in (functional, tf.function(step, autograph=False)):
    try:
        use()
    except NotImplementedError as error:
        print(error)
"""
    run = [sys.executable, "-c", script]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert "they have no keras.src.models.functional:Functional." in first
    assert "GraphOrParentsInXlaContext" in second
