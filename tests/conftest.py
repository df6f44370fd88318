"""What every test shares: no GPU, and a global state that no test inherits from another."""

import os

# Before TensorFlow is imported: the suite says the same on every machine.
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import pytest
import tensorflow as tf

# Before TensorFlow starts, too: four devices, so that a strategy can have replicas on a CPU.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
)


@pytest.fixture(autouse=True)
def _fresh_keras():
    """The default dtype policy, fixed seeds, and no names or graphs of an earlier test."""
    keras.utils.clear_session(free_memory=False)  # a garbage collection takes half a second
    keras.config.set_dtype_policy("float32")
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_dtype_policy("float32")
