"""Several GPUs of one machine: does every replica decide alike, and what does a step cost?

    python -m benchmarks.replicas                    # all GPUs, the transformer at full size
    python -m benchmarks.replicas --cpus 2 --tiny    # two logical CPU devices, a tiny model

First the matrix: overflow on no replica, on each alone, on all, and a bad loss on one, in every way
to run a step; the steps have to be those of one device. Then the time of a step under the strategy
with the plain optimizer, with Keras' LossScaleOptimizer and with tfscale. Results are printed and
written as they come; the program ends by itself when its time is up, even if a collective hangs.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import json
import statistics
import time
import traceback
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfscale

from .workloads import transformer

SCALE, PER_REPLICA = 1024.0, 4
FULL = {"layers": 4, "width": 768, "heads": 12, "ffn": 3072, "vocabulary": 15000, "sequence": 128}
TINY = {"layers": 1, "width": 32, "heads": 2, "ffn": 64, "vocabulary": 100, "sequence": 16}
RESULTS = Path(__file__).parent / "results" / "replicas.json"


class Report:
    """What was found so far; on the screen and in the file as soon as it is known."""

    def __init__(self, path, seconds):
        self.path, self.start, self.seconds = path, time.monotonic(), seconds
        self.data = {"environment": {}, "matrix": [], "times": []}

    def left(self):
        return self.seconds - (time.monotonic() - self.start)

    def say(self, text):
        print(f"[{time.monotonic() - self.start:6.1f} s] {text}", flush=True)

    def save(self):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.data, indent=1))


# The matrix.


class Amplify(keras.layers.Layer):
    """Its first input as it is; the gradient times the second one, a number for each sample."""

    def call(self, x, factor):
        @tf.custom_gradient
        def amplified(x, factor):
            return tf.identity(x), lambda dy: (dy * factor[:, None], tf.zeros_like(factor))

        return amplified(x, factor)


def small_model(tokens=False):
    factor = keras.Input((), name="factor")
    if tokens:
        x = keras.Input((2,), dtype="int32", name="x")
        h = keras.layers.Flatten()(keras.layers.Embedding(50, 4)(x))
    else:
        x = keras.Input((4,), name="x")
        h = keras.layers.BatchNormalization()(keras.layers.Dense(8, activation="tanh")(x))
    return keras.Model([x, factor], keras.layers.Dense(1)(Amplify()(h, factor)))


def batches(replicas, tokens):
    """A batch for each place where something goes wrong, with good ones in between."""
    size = PER_REPLICA * replicas
    first_of = [replica * PER_REPLICA for replica in range(replicas)]
    wrong = [((), ()), *(((i,), ()) for i in first_of), ((), ()), (range(size), ())]
    wrong += [((), (first_of[-1],)), ((first_of[0],), (first_of[-1],)), ((), ()), ((), ())]
    for seed, (overflow, bad_loss) in enumerate(wrong):
        random = np.random.RandomState(seed)
        x = random.randint(0, 50, (size, 2)) if tokens else random.randn(size, 4)
        factor, y = np.ones(size, "float32"), random.randn(size, 1).astype("float32")
        factor[list(overflow)] = np.inf
        y[list(bad_loss)] = np.nan
        yield (x.astype("int32" if tokens else "float32"), factor, y), bool(overflow or bad_loss)


def split(strategy, array):
    replicas = strategy.num_replicas_in_sync
    if replicas == 1:
        return tf.constant(array)
    parts = np.split(array, replicas)
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(parts[context.replica_id_in_sync_group])
    )


def own_loop(strategy, model, optimizer, size, jit):
    """A step on a global batch; `jit` is what XLA compiles: "none", "replica" or "all"."""

    def step(x, factor, y):
        with tf.GradientTape() as tape:
            errors = tf.square(model([x, factor]) - y)  # no BatchNorm update: that is fit's matter
            scaled = optimizer.scale_loss(tf.reduce_sum(errors) / size)
        variables = model.trainable_variables
        gradients = tape.gradient(scaled, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    if jit == "replica":
        step = tf.function(step, jit_compile=True)
    run = lambda *data: strategy.run(step, args=data)  # noqa: E731
    function = tf.function(run, jit_compile=True if jit == "all" else None)
    return lambda *data: function(*(split(strategy, part) for part in data))


def fit(strategy, model, optimizer, size, jit, compile_model):
    compile_model(model, optimizer, jit_compile=jit != "none")
    return lambda x, factor, y: model.fit([x, factor], y, batch_size=size, verbose=0)


def compile_like_keras(model, optimizer, **settings):
    model.compile(optimizer, loss="mse", **settings)


def compile_whole_step(model, optimizer, **settings):
    tfscale.compile(model, optimizer, loss="mse", **settings)


PLAIN_FIT = functools.partial(fit, compile_model=compile_like_keras)
WHOLE_FIT = functools.partial(fit, compile_model=compile_whole_step)

# Name: how it runs, what XLA compiles, how the step is skipped, sparse gradients, the optimizer.
CASES = {
    "own loop": (own_loop, "none", "auto", False, "adam"),
    "own loop, cond": (own_loop, "none", "cond", False, "adam"),
    "own loop, Embedding": (own_loop, "none", "auto", True, "adam"),
    "own loop, accumulation and clipping": (own_loop, "none", "auto", False, "accumulation"),
    "own loop, accumulation, cond": (own_loop, "none", "cond", False, "accumulation"),
    "own loop, EMA": (own_loop, "none", "auto", False, "ema"),
    "own loop, XLA on each replica": (own_loop, "replica", "auto", False, "adam"),
    "own loop, XLA, accumulation": (own_loop, "replica", "auto", False, "accumulation"),
    "own loop, one XLA cluster": (own_loop, "all", "auto", False, "adam"),
    "fit": (PLAIN_FIT, "none", "auto", False, "adam"),
    "fit, whole step": (WHOLE_FIT, "none", "auto", False, "adam"),
    "fit, jit_compile=True": (WHOLE_FIT, "all", "auto", False, "adam"),
}


def must_be_refused(name, devices):
    """Replicas in one XLA cluster, as they always are on CPUs."""
    jit = CASES[name][1]
    return jit == "all" or (jit == "replica" and "CPU" in devices[0])


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "accumulation": lambda: keras.optimizers.Adam(
        0.01, global_clipnorm=0.5, gradient_accumulation_steps=2
    ),
    "ema": lambda: keras.optimizers.SGD(0.01, use_ema=True, ema_overwrite_frequency=2),
}


def make(strategy, name):
    """The step of a case, its model and its optimizer."""
    run, jit, update, tokens, optimizer = CASES[name]
    size = PER_REPLICA * strategy.num_replicas_in_sync
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = small_model(tokens)
        policy = tfscale.Dynamic(initial_scale=SCALE, growth_interval=2)
        optimizer = tfscale.wrap(OPTIMIZERS[optimizer](), policy, update=update)
        step = run(strategy, model, optimizer, size, jit)
    return step, model, optimizer


def check(strategy, one, name):
    """Raises an error if the case goes wrong anywhere; returns the scales."""
    tokens = CASES[name][3]
    step, model, optimizer = make(strategy, name)
    expected, scales = SCALE, []
    good = 0
    for data, bad in batches(strategy.num_replicas_in_sync, tokens):
        before = [v.numpy() for v in model.trainable_variables]
        step(*data)
        for v in [*optimizer.variables, *model.trainable_variables]:
            first, *others = strategy.experimental_local_results(v.value)
            for other in others:
                np.testing.assert_array_equal(first.numpy(), other.numpy(), err_msg=v.path)
        after = [v.numpy() for v in model.trainable_variables]
        if bad:
            for old, new in zip(before, after, strict=True):
                np.testing.assert_array_equal(old, new)
        loss_is_bad = not np.isfinite(data[2]).all()
        good = good if loss_is_bad else 0 if bad else good + 1
        if bad and not loss_is_bad:
            expected /= 2
        elif good == 2:
            expected, good = expected * 2, 0
        scales.append(float(optimizer.loss_scale))
        if scales[-1] != expected:
            raise AssertionError(f"scales {scales}, expected {expected} at the end")
    if CASES[name][0] is own_loop:
        single_step, single = plain_loop(one, name, strategy.num_replicas_in_sync)
        for data, _ in batches(strategy.num_replicas_in_sync, tokens):
            single_step(*data)
        for a, b in zip(model.trainable_variables, single.trainable_variables, strict=True):
            np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-3, atol=1e-4)
    return scales


def plain_loop(one, name, replicas):
    """The same steps on one device, in a plain graph."""
    _, _, _, tokens, optimizer = CASES[name]
    with one.scope():
        keras.utils.set_random_seed(1)
        model = small_model(tokens)
        policy = tfscale.Dynamic(initial_scale=SCALE, growth_interval=2)
        optimizer = tfscale.wrap(OPTIMIZERS[optimizer](), policy, update="cond")
        return own_loop(one, model, optimizer, PER_REPLICA * replicas, "none"), model


def matrix(strategy, one, report):
    devices = strategy.extended.worker_devices
    for name in CASES:
        if report.left() < 30:
            report.say(f"no time left for {name}")
            return
        start, found = time.monotonic(), {"case": name, "ok": True}
        try:
            found["scales"] = check(strategy, one, name)
            found["ok"] = not must_be_refused(name, devices)
        except ValueError as error:
            refused = must_be_refused(name, devices) and "share one XLA cluster" in str(error)
            found |= {"ok": refused, "error": "refused" if refused else traceback.format_exc()}
        except Exception as error:  # one case must not cost the others
            found |= {"ok": False, "error": traceback.format_exc()}
            report.say(f"{type(error).__name__}: {str(error)[:1500]}")
        found["seconds"] = round(time.monotonic() - start, 1)
        report.data["matrix"].append(found)
        report.say(f"{'ok  ' if found['ok'] else 'FAIL'} {name}  {found.get('scales', '')}")
        report.save()


# The times.

VARIANTS = {
    "none": (lambda o: o, "none"),
    "keras": (lambda o: keras.optimizers.LossScaleOptimizer(o), "none"),
    "tfscale": (lambda o: tfscale.wrap(o, "dynamic"), "none"),
    "tfscale, cond": (lambda o: tfscale.wrap(o, "dynamic", update="cond"), "none"),
    "none, XLA on each replica": (lambda o: o, "replica"),
    "tfscale, XLA on each replica": (lambda o: tfscale.wrap(o, "dynamic"), "replica"),
}


def timed_step(strategy, wrap, jit, size, batch):
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    tokens = batch * size["sequence"] * strategy.num_replicas_in_sync
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model, (x, y) = transformer(batch=batch, **size)
        optimizer = wrap(keras.optimizers.Adam(1e-4))
        optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True)) / tokens
            scaled = optimizer.scale_loss(loss)
        variables = model.trainable_variables
        gradients = tape.gradient(scaled, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    if jit == "replica":
        step = tf.function(step, jit_compile=True)
    data = [
        strategy.experimental_distribute_values_from_function(lambda _, a=a: tf.constant(a))
        for a in (x, y)
    ]
    function = tf.function(lambda *args: strategy.run(step, args=args))

    def run(steps):
        for _ in range(steps):
            losses = function(*data)
        return [float(loss) for loss in strategy.experimental_local_results(losses)]

    return run, optimizer


def times(strategy, report, size, batch, rounds):
    keras.config.set_dtype_policy("mixed_float16")
    runs, found = {}, {}
    for name, (wrap, jit) in VARIANTS.items():
        if report.left() < 90:
            report.say(f"no time left for {name}")
            continue
        start = time.monotonic()
        result = {"variant": name}
        report.data["times"].append(result)
        try:
            run, optimizer = timed_step(strategy, wrap, jit, size, batch)
            result["loss"] = run(20)  # past the first overflows of the scale
            runs[name], found[name] = run, result
            result["rounds_ms"], result["scale"] = [], _scale(optimizer)
            report.say(f"{name}: ready after {time.monotonic() - start:.1f} s")
        except Exception as error:  # what one variant cannot do must not cost the others
            result["error"] = f"{type(error).__name__}: {error}"[:2000]
            report.say(f"{name}: {result['error'][:600]}")
        report.save()
    for turn in range(rounds):
        if report.left() < 20:
            break
        # Forwards and backwards in turn: nobody always follows the same neighbour.
        for name in list(runs)[:: 1 if turn % 2 == 0 else -1]:
            start = time.perf_counter()
            runs[name](10)
            found[name]["rounds_ms"].append((time.perf_counter() - start) * 100)
    for name, result in found.items():
        if not result["rounds_ms"]:
            continue
        result["ms"] = statistics.median(result["rounds_ms"])
        ratio = ""
        if "none" in found:
            pairs = zip(result["rounds_ms"], found["none"]["rounds_ms"], strict=True)
            result["ratio"] = statistics.median(a / b for a, b in pairs)
            ratio = f"  {result['ratio']:.3f} of none"
        report.say(f"{name:30} {result['ms']:8.2f} ms{ratio}")
    report.save()


def _scale(optimizer):
    scale = getattr(optimizer, "dynamic_scale", None)
    return None if scale is None else float(np.array(scale.numpy()))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=470, help="time after which it ends")
    parser.add_argument("--cpus", type=int, default=0, help="logical CPU devices instead of GPUs")
    parser.add_argument("--tiny", action="store_true", help="a tiny transformer")
    parser.add_argument("--only", choices=["matrix", "times"], help="one half of it")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the JSON file")
    arguments = parser.parse_args()
    # A hanging collective is outside of Python: only this ends it.
    faulthandler.dump_traceback_later(arguments.seconds + 10, exit=True)
    report = Report(arguments.out, arguments.seconds)
    if arguments.cpus:
        tf.config.set_visible_devices([], "GPU")
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * arguments.cpus,
        )
        devices = [f"CPU:{i}" for i in range(arguments.cpus)]
    else:
        gpus = tf.config.list_physical_devices("GPU")
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
        devices = [f"GPU:{i}" for i in range(len(gpus))]
    if len(devices) < 2:
        parser.error(f"this needs at least two GPUs, or --cpus 2. Found: {devices}")
    strategy = tf.distribute.MirroredStrategy(devices)
    details = [
        tf.config.experimental.get_device_details(gpu).get("device_name")
        for gpu in tf.config.list_physical_devices("GPU")
        if not arguments.cpus
    ]
    report.data["environment"] = {
        "devices": devices,
        "cards": details,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "tfscale": tfscale.__version__,
    }
    report.say(str(report.data["environment"]))
    if arguments.only != "times":
        # Exact sums: TensorFloat-32 differs between one batch and its parts.
        tf.config.experimental.enable_tensor_float_32_execution(False)
        matrix(strategy, tf.distribute.OneDeviceStrategy(devices[0]), report)
        tf.config.experimental.enable_tensor_float_32_execution(True)
    if arguments.only != "matrix":
        size, batch = (TINY, 2) if arguments.tiny else (FULL, 32)
        times(strategy, report, size, batch, rounds=7)
    failed = [found["case"] for found in report.data["matrix"] if not found["ok"]]
    report.say(f"failed: {', '.join(failed)}" if failed else "all cases of the matrix are right")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
