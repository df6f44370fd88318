"""What the older versions that are supported do not have."""

import keras
import pytest


def need_multi_optimizer() -> None:
    """Skips the test where Keras has no optimizer that consists of several ones."""
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip(f"Keras {keras.version()} has no MultiOptimizer, which came with 3.15")
