"""What every test shares: no GPU, and a global state that no test inherits from another."""

import gc
import os

# Before TensorFlow is imported: the suite says the same on every machine.
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import pytest
import tensorflow as tf
from tensorflow.python.framework import ops

# XLA compiles as ever, but a test needs no fast machine code. The older way to it takes half the
# time, and less without LLVM's optimizations. It forgets NaN in a minimum unless asked not to.
if tuple(map(int, tf.__version__.split(".")[:2])) >= (2, 21):  # older XLA may not know the flags
    os.environ.setdefault(
        "XLA_FLAGS",
        "--xla_cpu_use_fusion_emitters=false --xla_cpu_enable_fast_min_max=false "
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    )

# Before TensorFlow starts, too: one thread, since more take a tenth of the time to wait for work,
# and four devices, so that a strategy can have replicas on a CPU.
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
)


def pytest_collection_finish():
    """Keeps what the imports made out of garbage collections, which then take no time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _free_memory():
    """No file keeps the models and the functions of an earlier one."""
    yield
    # TensorFlow keeps the gradient of every traced `all_reduce` for ever, and with it the graph.
    kept = getattr(ops.gradient_registry, "_registry", {})
    for name in [name for name in kept if name.startswith("CustomGradient-")]:
        del kept[name]
    keras.utils.clear_session()


@pytest.fixture(autouse=True)
def _fresh_keras():
    """The default dtype policy, fixed seeds, and no names or graphs of an earlier test."""
    keras.utils.clear_session(free_memory=False)
    keras.config.set_dtype_policy("float32")
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_dtype_policy("float32")
