"""One of two workers, started by `test_multiworker.py` with TF_CONFIG; prints one line of JSON.

Arguments: the script of the page, then what to do after it.
"""

import contextlib
import io
import json
import os
import runpy
import sys

os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

# Before anything else, as it makes the strategy, which opens this worker's port.
with contextlib.redirect_stdout(io.StringIO()) as printed:
    strategy = runpy.run_path(sys.argv[1], run_name="__main__")["strategy"]

import keras
import numpy as np
import tensorflow as tf

import tfscale

keras.config.set_dtype_policy("float32")
WORKER = json.loads(os.environ["TF_CONFIG"])["task"]["index"]


def make(kind=keras.Model, **settings):
    with strategy.scope():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((4,))
        model = kind(inputs, keras.layers.Dense(1)(inputs))
        policy = tfscale.Dynamic(initial_scale=1024.0, growth_interval=2)
        optimizer = tfscale.wrap(keras.optimizers.SGD(0.05, momentum=0.9, **settings), policy)
        optimizer.build(model.trainable_variables)
        return model, optimizer


def data(seed, size=8):
    random = np.random.RandomState(seed)
    x = random.randn(size, 4).astype("float32")
    return x, x[:, :1].copy()


def state(model, optimizer):
    variables = [*model.variables, *optimizer.variables]
    return [np.asarray(v.numpy(), "float64").ravel().tolist() for v in variables]


def loop(reduced_by_caller=False, **settings):
    """Steps that are good, overflow on one worker only, and have a bad loss on one worker only."""
    model, optimizer = make(**settings)

    def step(x, y, factor):
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(tf.reduce_sum(tf.square(model(x) - y)) / 8)
        variables = model.trainable_variables
        grads = [g * factor for g in tape.gradient(scaled, variables)]
        if reduced_by_caller:
            context = tf.distribute.get_replica_context()
            grads = context.all_reduce(tf.distribute.ReduceOp.SUM, grads)
        optimizer.apply_gradients(
            zip(grads, variables, strict=True), skip_gradients_aggregation=reduced_by_caller
        )

    run = tf.function(lambda *args: strategy.run(step, args=args))
    scales, states = [], []
    for number, (overflow_on, bad_loss_on) in enumerate(
        [(None, None), (1, None), (0, None), (None, 1), (1, 0), (None, None), (None, None)]
    ):
        x, y = data(number)
        mine = slice(4 * WORKER, 4 * WORKER + 4)
        x, y = x[mine], y[mine]
        if bad_loss_on == WORKER:
            y[0] = np.nan
        factor = np.float32(np.inf if overflow_on == WORKER else 1.0)
        run(tf.constant(x), tf.constant(y), tf.constant(factor))
        scales.append(float(optimizer.loss_scale))
        states.append(state(model, optimizer))
    graph = run.get_concrete_function(tf.constant(x), tf.constant(y), tf.constant(factor)).graph
    nodes = graph.as_graph_def()
    nodes = [*nodes.node, *(node for f in nodes.library.function for node in f.node_def)]
    return {
        "scales": scales,
        "states": states,
        "skipped": int(optimizer.skipped_steps),
        "collectives": sum(node.op.startswith("Collective") for node in nodes),
    }


def fit(kind=keras.Model):
    model, optimizer = make(kind)
    tfscale.compile(model, optimizer, loss="mse", metrics=["mae"])
    x, y = data(0, size=32)
    y[9] = np.nan
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(8).with_options(options)
    history = model.fit(batches, epochs=2, verbose=0, validation_data=batches.take(1))
    logs = {name: list(map(float, values)) for name, values in history.history.items()}
    return {"history": logs, "states": [state(model, optimizer)]}


DO = {
    "loop": loop,
    "accumulation reduced by caller": lambda: loop(True, gradient_accumulation_steps=2),
    "fit": fit,
    "fit tfscale.Model": lambda: fit(tfscale.Model),
}
results = {what: DO[what]() for what in sys.argv[2:]}
print(json.dumps({"page": printed.getvalue(), **results}))
