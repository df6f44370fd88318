"""Short runs of `fit` that the tests of the callbacks share."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfscale

L = keras.layers
KEYS = ["loss_scale", "skipped_steps"]
BATCH = 4


@keras.saving.register_keras_serializable(package="tests.callbacks")
class Fault(L.Layer):
    """Passes its input on; `kind` goes wrong from the call number `start` to `end` on.

    Kinds: "gradient" (infinite), "loss" (the output is infinite).
    """

    def __init__(self, kind="gradient", start=0, end=10**6, **kwargs):
        super().__init__(**kwargs)
        self.kind, self.start, self.end = kind, start, end

    def build(self, shape):
        # An integer is no state that a skipped step takes back.
        self.calls = self.add_weight(name="calls", dtype="int64", trainable=False)

    def call(self, x, training=False):
        bad = (self.calls >= self.start) & (self.calls < self.end) & bool(training)
        if training:
            self.calls.assign_add(1)
        factor = tf.where(bad, tf.constant(np.inf, x.dtype), tf.ones([], x.dtype))
        if self.kind == "loss":
            return x * factor

        @tf.custom_gradient
        def amplified(x, factor):
            return tf.identity(x), lambda dy: (dy * factor, tf.zeros_like(factor))

        return amplified(x, factor)


def data(n=32, width=3, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, width)).astype("float32"), rng.normal(size=(n, 1)).astype("float32")


def network(*layers, dtype="mixed_float16"):
    return keras.Sequential(
        [
            keras.Input((3,)),
            L.Dense(4, name="first", dtype=dtype),
            *layers,
            L.Dense(1, dtype="float32", name="head"),
        ]
    )


def wrapped(*layers, optimizer="sgd", policy=None, dtype="mixed_float16", **arguments):
    """wrap and plain fit"""
    model = network(*layers, dtype=dtype)
    policy = policy or tfscale.Dynamic(initial_scale=1024.0, growth_interval=100)
    # The callbacks run between the steps; what several are in one call takes a graph.
    arguments = {"run_eagerly": "steps_per_execution" not in arguments, **arguments}
    model.compile(tfscale.wrap(optimizer, policy), loss="mse", **arguments)
    return model


def compiled(*layers, **kwargs):
    """tfscale.compile"""
    model = wrapped(*layers, **kwargs)
    return tfscale.compile(model, model.optimizer, loss="mse", run_eagerly=True)


BOTH = pytest.mark.parametrize("make", [wrapped, compiled], ids=["wrap", "compile"])


def fit(model, *callbacks, steps=8, epochs=1, arrays=None, **arguments):
    """The history of `steps` batches an epoch; the advice of the end of `fit` is not looked at."""
    batches = tf.data.Dataset.from_tensor_slices(arrays or data(steps * BATCH)).batch(BATCH)
    # A tuner that is left behind in the middle of an epoch is waited for, a second each.
    options = tf.data.Options()
    options.autotune.enabled = False
    arguments = {"verbose": 0, "shuffle": False, **arguments}
    with warnings.catch_warnings():
        advice = r"\d+ of \d+ training steps? (was|were) skipped"
        warnings.filterwarnings("ignore", advice, tfscale.LossScaleWarning)
        return model.fit(
            batches.with_options(options), epochs=epochs, callbacks=list(callbacks), **arguments
        ).history


def events(folder):
    """Tags, steps, plugins and values of all event files in a folder."""
    found = {}
    for path in sorted(folder.glob("events*")):
        for raw in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(raw.numpy())
            for value in event.summary.value:
                plugin = value.metadata.plugin_data.plugin_name
                tag = found.setdefault(value.tag, {"plugin": plugin, "values": {}})
                tag["values"][event.step] = tf.make_ndarray(value.tensor)
    return found
