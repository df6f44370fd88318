"""Several GPUs of one machine: do all replicas decide alike, and what does a step cost?

    python -m benchmarks.replicas                    # all GPUs, the transformer at full size
    python -m benchmarks.replicas --cpus 2 --tiny    # two logical CPU devices, a tiny model

First `replica_matrix` checks the decisions. Then each step under the strategy is timed, with the
plain optimizer, with Keras' LossScaleOptimizer and with tfscale. Results are printed and written as
they come; the program ends when its time is up, even if a collective hangs.
"""

from __future__ import annotations

import argparse
import faulthandler
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfscale
from benchmarks.measure import compare
from benchmarks.replica_matrix import Progress, matrix
from benchmarks.report import with_quartiles
from benchmarks.workloads import WORKLOADS, transformer

FULL = {name: n for name, n in WORKLOADS["transformer-xla"].size.items() if name != "batch"}
TINY = {name: n for name, n in WORKLOADS["transformer-xla"].quick_size.items() if name != "batch"}
RESULTS = Path(__file__).parent / "results" / "replicas.json"

Wrap = Callable[[keras.optimizers.Optimizer], keras.optimizers.Optimizer]

# Name: how the optimizer is wrapped, what XLA compiles.
VARIANTS: dict[str, tuple[Wrap, str]] = {
    "none": (lambda o: o, "none"),
    "keras": (lambda o: keras.optimizers.LossScaleOptimizer(o), "none"),
    "tfscale": (lambda o: tfscale.wrap(o, "dynamic"), "none"),
    "tfscale, cond": (lambda o: tfscale.wrap(o, "dynamic", update="cond"), "none"),
    "none, XLA on each replica": (lambda o: o, "replica"),
    "tfscale, XLA on each replica": (lambda o: tfscale.wrap(o, "dynamic"), "replica"),
}


def timed_step(
    strategy: tf.distribute.Strategy, wrap: Wrap, jit: str, size: dict[str, int], batch: int
) -> tuple[Callable[[int], list[float]], keras.optimizers.Optimizer]:
    """Builds a transformer and its step.

    Args:
        strategy: whose replicas run the step.
        wrap: wraps the plain optimizer.
        jit: what XLA compiles, "none" or "replica".
        size: arguments of `workloads.transformer`.
        batch: samples for each replica.

    Returns:
        A function that runs a number of steps and returns the last loss of each replica, and the
        optimizer.
    """
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    tokens = batch * size["sequence"] * strategy.num_replicas_in_sync
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model, (x, y) = transformer(batch=batch, **size)
        optimizer = wrap(keras.optimizers.Adam(1e-4))
        optimizer.build(model.trainable_variables)

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True)) / tokens
            scaled = optimizer.scale_loss(loss)
        variables = model.trainable_variables
        gradients = tape.gradient(scaled, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    on_replica = tf.function(step, jit_compile=True) if jit == "replica" else step
    data = [
        strategy.experimental_distribute_values_from_function(lambda _, a=a: tf.constant(a))
        for a in (x, y)
    ]
    function = tf.function(lambda *args: strategy.run(on_replica, args=args))

    def run(steps: int) -> list[float]:
        for _ in range(steps):
            losses = function(*data)
        return [float(loss) for loss in strategy.experimental_local_results(losses)]

    return run, optimizer


def times(
    strategy: tf.distribute.Strategy,
    progress: Progress,
    size: dict[str, int],
    batch: int,
    rounds: int,
) -> None:
    """Times a step of each variant in turn, round by round; stops before the time is up."""
    keras.config.set_dtype_policy("mixed_float16")
    runs: dict[str, Callable[[int], list[float]]] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, (wrap, jit) in VARIANTS.items():
        if progress.left() < 90:
            progress.log(f"no time left for {name}")
            continue
        start = time.monotonic()
        result: dict[str, Any] = {"variant": name}
        progress.data["times"].append(result)
        try:
            run, optimizer = timed_step(strategy, wrap, jit, size, batch)
            result["loss"] = run(20)  # past the first overflows of the scale
            runs[name], found[name] = run, result
            result["rounds_ms"], result["scale"] = [], _scale(optimizer)
            progress.log(f"{name}: ready after {time.monotonic() - start:.1f} s")
        except Exception as error:  # one variant that fails must not stop the others
            result["error"] = f"{type(error).__name__}: {error}"[:2000]
            progress.log(f"{name}: {result['error'][:600]}")
        progress.save()
    for turn in range(rounds):
        if progress.left() < 20:
            break
        # Forwards and backwards in turn, so that no variant always follows the same one.
        for name in list(runs)[:: 1 if turn % 2 == 0 else -1]:
            begin = time.perf_counter()
            runs[name](10)
            found[name]["rounds_ms"].append((time.perf_counter() - begin) * 100)
    for name, result in found.items():
        if not result["rounds_ms"]:
            continue
        result["ms"], ratio = float(np.median(result["rounds_ms"])), ""
        if "none" in found:
            compared = compare(result["rounds_ms"], found["none"]["rounds_ms"])
            result["ratio"], result["ratio_quartiles"] = compared
            ratio = f"  {with_quartiles(*compared)} of none"
        progress.log(f"{name:30} {result['ms']:8.2f} ms{ratio}")
    progress.save()


def _scale(optimizer: keras.optimizers.Optimizer) -> float | None:
    scale = getattr(optimizer, "dynamic_scale", None)
    return None if scale is None else float(np.array(scale.numpy()))


def _devices(cpus: int) -> list[str]:
    """The devices to use, ready for a strategy: logical CPU devices, or all GPUs."""
    if cpus:
        tf.config.set_visible_devices([], "GPU")
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * cpus,
        )
        return [f"CPU:{i}" for i in range(cpus)]
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    return [f"GPU:{i}" for i in range(len(gpus))]


def main() -> None:
    """Runs the command line.

    Raises:
        SystemExit: with status 0 if the matrix is right, else 1; 2 after a wrong option.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=470, help="time after which it ends")
    parser.add_argument("--cpus", type=int, default=0, help="logical CPU devices instead of GPUs")
    parser.add_argument("--tiny", action="store_true", help="a tiny transformer")
    parser.add_argument("--only", choices=["matrix", "times"], help="one half of it")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the JSON file")
    arguments = parser.parse_args()
    # Nothing in Python can end a collective that hangs; this can.
    faulthandler.dump_traceback_later(arguments.seconds + 10, exit=True)
    progress = Progress(arguments.out, arguments.seconds)
    devices = _devices(arguments.cpus)
    if len(devices) < 2:
        parser.error(f"this needs at least two GPUs, or --cpus 2. Found: {devices}")
    strategy = tf.distribute.MirroredStrategy(devices)
    details = [
        tf.config.experimental.get_device_details(gpu).get("device_name")
        for gpu in tf.config.list_physical_devices("GPU")
        if not arguments.cpus
    ]
    progress.data["environment"] = {
        "devices": devices,
        "cards": details,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "tfscale": tfscale.__version__,
    }
    progress.log(str(progress.data["environment"]))
    if arguments.only != "times":
        # Exact sums: TensorFloat-32 differs between one batch and its parts.
        tf.config.experimental.enable_tensor_float_32_execution(False)
        matrix(strategy, tf.distribute.OneDeviceStrategy(devices[0]), progress)
        tf.config.experimental.enable_tensor_float_32_execution(True)
    if arguments.only != "matrix":
        size, batch = (TINY, 2) if arguments.tiny else (FULL, 32)
        times(strategy, progress, size, batch, rounds=7)
    failed = [found["case"] for found in progress.data["matrix"] if not found["ok"]]
    progress.log(f"failed: {', '.join(failed)}" if failed else "all cases of the matrix are right")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
