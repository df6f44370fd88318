"""Several GPUs of one machine: do all replicas decide alike, and what does a step cost?

    python -m benchmarks.replicas                    # all GPUs, the transformer at full size
    python -m benchmarks.replicas --resume           # goes on where the last call ended
    python -m benchmarks.replicas --cpus 2 --tiny    # two logical CPU devices, a tiny model

First `replica_matrix` checks the decisions. Then the all-reduce alone is timed, each step under the
strategy, in an own loop and in `fit`, and the memory of 1,000 steps is watched. Results are printed
and written as they come; the program ends when its time is up or a collective hangs. With one GPU
it shows what the strategy costs without another replica.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import tfscale
from benchmarks.measure import compare
from benchmarks.replica_matrix import Progress, matrix
from benchmarks.variants import keras_compile, tfscale_compile
from benchmarks.workloads import WORKLOADS, transformer

FULL = {name: n for name, n in WORKLOADS["transformer-xla"].size.items() if name != "batch"}
TINY = {name: n for name, n in WORKLOADS["transformer-xla"].quick_size.items() if name != "batch"}
RESULTS = Path(__file__).parent / "results" / "replicas.json"
STEPS = 10  # of a round
SEVERAL_STEPS = f"tfscale, XLA on each replica, steps_per_execution={STEPS}"  # in `fit`

Run = Callable[[int], float]
"""Runs a number of steps; returns the milliseconds of one."""
Job = Callable[[], dict[str, Any]]


class Variant(NamedTuple):
    """How the optimizer is wrapped, the model compiled for `fit`, and what XLA compiles."""

    wrap: Callable[[keras.optimizers.Optimizer], keras.optimizers.Optimizer]
    compile: Callable[..., None]
    jit: bool
    one_device: bool = False


def _plain(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    return optimizer


def _keras(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    return keras.optimizers.LossScaleOptimizer(optimizer)


def _tfscale(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    return tfscale.wrap(optimizer, "dynamic")


VARIANTS = {
    "none": Variant(_plain, keras_compile, jit=False),
    "keras": Variant(_keras, keras_compile, jit=False),
    "tfscale": Variant(_tfscale, tfscale_compile, jit=False),
    "tfscale, XLA on each replica": Variant(_tfscale, tfscale_compile, jit=True),
    SEVERAL_STEPS: Variant(
        _tfscale, functools.partial(tfscale_compile, steps_per_execution=STEPS), jit=True
    ),
    "none, XLA, one device": Variant(_plain, keras_compile, jit=True, one_device=True),
    "tfscale, XLA, one device": Variant(_tfscale, tfscale_compile, jit=True, one_device=True),
}


def own_loop(
    strategy: tf.distribute.Strategy, variant: Variant, size: dict[str, int], batch: int
) -> tuple[Run, keras.optimizers.Optimizer]:
    """Builds a transformer and its own loop.

    Args:
        strategy: whose replicas run the step.
        variant: which one.
        size: arguments of `workloads.transformer`.
        batch: samples for each replica.
    """
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    tokens = batch * size["sequence"] * strategy.num_replicas_in_sync
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model, (x, y) = transformer(batch=batch, **size)
        optimizer = variant.wrap(keras.optimizers.Adam(1e-4))
        optimizer.build(model.trainable_variables)
        mean_loss = keras.metrics.Mean()

    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True)) / tokens
            scaled = optimizer.scale_loss(loss)
        variables = model.trainable_variables
        gradients = tape.gradient(scaled, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        mean_loss.update_state(loss)

    on_replica = tf.function(step, jit_compile=True) if variant.jit else step
    data = [_on_each(strategy, array) for array in (x, y)]

    @tf.function
    def function(*args: Any) -> None:  # a result would wait for all replicas
        strategy.run(on_replica, args=args)

    def run(steps: int) -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            function(*data)
        float(mean_loss.result())  # waits for the devices
        return (time.perf_counter() - begin) * 1e3 / steps

    return run, optimizer


def _on_each(strategy: tf.distribute.Strategy, array: np.ndarray) -> Any:
    """`array` on the device of each replica, where a pipeline would have put it."""

    def made(context: tf.distribute.ValueContext) -> tf.Tensor:
        device = strategy.extended.worker_devices[context.replica_id_in_sync_group]
        with tf.device(device):
            return tf.identity(tf.constant(array))

    return strategy.experimental_distribute_values_from_function(made)


class _Epochs(keras.callbacks.Callback):
    """How long the last epoch took."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.begin = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seconds = time.perf_counter() - self.begin


def fit(
    strategy: tf.distribute.Strategy, variant: Variant, size: dict[str, int], batch: int
) -> tuple[Run, keras.optimizers.Optimizer]:
    """Builds a transformer and its `fit`; the arguments are those of `own_loop`."""
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model, (x, y) = transformer(batch=batch, **size)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = variant.wrap(keras.optimizers.Adam(1e-4))
        variant.compile(model, optimizer=optimizer, loss=loss, jit_compile=variant.jit)
    replicas = strategy.num_replicas_in_sync
    whole = tuple(np.concatenate([array] * replicas) for array in (x, y))
    data = tf.data.Dataset.from_tensors(whole).repeat()

    def run(steps: int) -> float:
        # The first epoch starts the pipeline.
        times = _Epochs()
        model.fit(data, steps_per_epoch=steps, epochs=2, verbose=0, callbacks=[times])
        return times.seconds * 1e3 / steps

    return run, optimizer


def timed(
    strategy: tf.distribute.Strategy,
    build: Callable[..., tuple[Run, keras.optimizers.Optimizer]],
    name: str,
    size: dict[str, int],
    batch: int,
    baseline: dict[str, Any] | None,
) -> dict[str, Any]:
    """Times a step, in rounds.

    Args:
        strategy: whose replicas run the step.
        build: `own_loop` or `fit`.
        name: one of `VARIANTS`.
        size: arguments of `workloads.transformer`.
        batch: samples for each replica.
        baseline: the result of the plain optimizer, or None.
    """
    keras.config.set_dtype_policy("mixed_float16")
    start = time.monotonic()
    run, optimizer = build(strategy, VARIANTS[name], size, batch)
    run(1)
    row: dict[str, Any] = {"workload": _workload(build, batch), "variant": name}
    row["first_step_s"] = round(time.monotonic() - start, 1)
    run(20)  # past the first overflows of the scale
    rounds = [run(STEPS) for _ in range(9)]
    row |= {"scale": _scale(optimizer), "rounds_ms": rounds, "ms": float(np.median(rounds))}
    if baseline is None or "rounds_ms" in baseline:
        compared = compare(rounds, rounds if baseline is None else baseline["rounds_ms"])
        row["ratio"], row["ratio_quartiles"] = compared
    return row


def _workload(build: Callable[..., Any], batch: int) -> str:
    return f"replicas-{build.__name__}-b{batch}"


def all_reduce(
    strategy: tf.distribute.Strategy, size: dict[str, int], *, jit: bool
) -> dict[str, Any]:
    """Times the sum of as many numbers as the transformer has gradients, and nothing else."""
    model, _ = transformer(batch=1, **size)
    numbers = np.ones([model.count_params()], "float32")

    def step(x: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(x))[0]

    on_replica = tf.function(step, jit_compile=True) if jit else step
    function = tf.function(lambda x: strategy.run(on_replica, args=(x,)))
    data = _on_each(strategy, numbers)
    rounds = []
    for _ in range(8):
        begin = time.perf_counter()
        for _ in range(STEPS):
            sums = function(data)
        for part in strategy.experimental_local_results(sums):
            float(part)
        rounds.append((time.perf_counter() - begin) * 1e3 / STEPS)
    return {"bytes": numbers.nbytes, "ms": float(np.median(rounds[1:])), "rounds_ms": rounds}


def memory(strategy: tf.distribute.Strategy, size: dict[str, int], batch: int) -> dict[str, Any]:
    """What the host and each GPU hold after 50 and after 1,050 steps of `fit` with XLA."""
    keras.config.set_dtype_policy("mixed_float16")
    run, _ = fit(strategy, VARIANTS["tfscale, XLA on each replica"], size, batch)
    found = []
    for steps in (25, 500):  # each twice, see `fit`
        run(steps)
        gpus = [d for d in strategy.extended.worker_devices if "GPU" in d]
        device = [tf.config.experimental.get_memory_info(gpu)["current"] for gpu in gpus]
        host = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
        found.append({"host_bytes": host, "device_bytes": device})
    return {"after": found}


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


def _topology() -> str:
    """How the GPUs are linked, as the driver says it."""
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", "topo", "-m"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


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
    parser.add_argument("--resume", action="store_true", help="leave out what the file has")
    arguments = parser.parse_args()
    progress = Progress(arguments.out, arguments.seconds, resume=arguments.resume)
    devices = _devices(arguments.cpus)
    if not devices:
        parser.error("this needs a GPU, or --cpus 2")
    strategy = tf.distribute.MirroredStrategy(devices)
    one = tf.distribute.OneDeviceStrategy(devices[0])
    details = [
        tf.config.experimental.get_device_details(gpu).get("device_name")
        for gpu in tf.config.list_physical_devices("GPU")
        if not arguments.cpus
    ]
    progress.data["environment"] = {
        "devices": devices,
        "cards": details,
        "links": _topology(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "tfscale": tfscale.__version__,
    }
    progress.log(str(progress.data["environment"]))
    if arguments.only != "times":
        # Exact sums: TensorFloat-32 differs between one batch and its parts.
        tf.config.experimental.enable_tensor_float_32_execution(False)
        matrix(strategy, one, progress)
        tf.config.experimental.enable_tensor_float_32_execution(True)
    if arguments.only != "matrix":
        size, batches = (TINY, (2,)) if arguments.tiny else (FULL, (32, 128))
        for jit in (False, True):
            job: Job = functools.partial(all_reduce, strategy, size, jit=jit)
            progress.attempt("all_reduce", "XLA" if jit else "plain graph", job)
        for batch, build in itertools.product(batches, (fit, own_loop)):
            for name, variant in VARIANTS.items():
                if name == SEVERAL_STEPS and build is own_loop:
                    continue
                on = one if variant.one_device else strategy
                plain = progress.find("times", f"{_workload(build, batch)}: none")
                job = functools.partial(timed, on, build, name, size, batch, plain)
                progress.attempt("times", f"{_workload(build, batch)}: {name}", job)
        job = functools.partial(memory, strategy, size, batches[0])
        progress.attempt("memory", "fit with XLA", job)
    cases = progress.data.get("matrix", [])
    failed = [row["name"] for row in cases if "error" in row]
    if cases:
        text = f"failed: {', '.join(failed)}" if failed else "all cases of the matrix are right"
        progress.log(text)
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
