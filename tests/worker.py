"""One of two workers, started by `test_multiworker.py` with TF_CONFIG; prints one line of JSON."""

import json
import os
import sys

os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf

# Before anything else: it opens this worker's port.
strategy = tf.distribute.MultiWorkerMirroredStrategy()

import keras  # noqa: E402
import numpy as np  # noqa: E402

import tfscale  # noqa: E402

WORKER = json.loads(os.environ["TF_CONFIG"])["task"]["index"]


def make(optimizer=lambda: keras.optimizers.Adam(0.05)):
    with strategy.scope():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((4,))
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dense(3)(inputs)))
        policy = tfscale.Dynamic(initial_scale=1024.0, growth_interval=2)
        return model, tfscale.wrap(optimizer(), policy)


def data(seed, size=8):
    random = np.random.RandomState(seed)
    x = random.randn(size, 4).astype("float32")
    return x, x[:, :1].copy()


def state(model, optimizer):
    variables = [*model.variables, *optimizer.variables]
    return [np.asarray(v.numpy(), "float64").ravel().tolist() for v in variables]


def loop(reduced_by_caller=False, **making):
    """Steps that are good, overflow on one worker only, and have a bad loss on one worker only."""
    model, optimizer = make(**making)

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
    model, optimizer = make()
    with strategy.scope():
        model = kind(model.inputs, model.outputs)
    tfscale.compile(model, optimizer, loss="mse", metrics=["mae"])
    x, y = data(0, size=32)
    y[9] = np.nan
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(8).with_options(options)
    history = model.fit(batches, epochs=2, verbose=0, validation_data=batches.take(1))
    logs = {name: list(map(float, values)) for name, values in history.history.items()}
    return {"history": logs, "states": [state(model, optimizer)]}


def main(what):
    if what == "loop":
        return loop()
    if what == "accumulation":
        return loop(optimizer=lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=2))
    if what == "reduced by caller":
        return loop(reduced_by_caller=True)
    if what == "fit":
        return fit()
    return fit(tfscale.Model)


print(json.dumps({what: main(what) for what in sys.argv[1:]}))
