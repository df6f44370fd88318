"""What the tests of several private names need."""

import pytest
import tensorflow as tf


@pytest.fixture
def two_replicas() -> tf.distribute.Strategy:
    """A strategy of two CPU devices."""
    # No collectives, which only one strategy of a process can use.
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())
