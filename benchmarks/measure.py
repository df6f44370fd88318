"""The measurement: in each round every variant of a workload runs, so that drift affects all alike.

The device works asynchronously: a timed block runs some steps and reads the last loss before it
reads the clock.
"""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import keras
import tensorflow as tf

from benchmarks.report import save, with_quartiles
from benchmarks.variants import BASELINES, VARIANTS, Variant
from benchmarks.workloads import Workload
from tfscale._version import __version__

TIMED_SECONDS = 1.75
"""How long each variant is timed, all rounds together, where no number of steps is given."""


class Case(Protocol):
    """A workload under one variant, ready to step."""

    parameters: int
    variables: int
    trace_s: float
    first_step_s: float

    def run(self, steps: int) -> float:
        """Runs the steps, waits for the last one, and returns its loss."""

    def memory(self) -> tuple[int, int] | None:
        """Bytes on the GPU: the permanent state, and what a step adds at its peak."""

    def scale(self) -> float | None:
        """The loss scale now."""


@dataclass
class Result:
    """What one variant of one workload cost."""

    workload: str
    variant: str
    baseline: str
    parameters: int = 0
    variables: int = 0
    trace_s: float = 0.0
    first_step_s: float = 0.0
    state_bytes: int | None = None
    step_bytes: int | None = None
    scale_before: float | None = None
    scale_after: float | None = None
    steps: int = 0
    rounds_ms: list[float] = field(default_factory=list)
    ms: float | None = None
    ratio: float | None = None
    ratio_quartiles: tuple[float, float] | None = None
    error: str | None = None


def gpus() -> list[Any]:
    """The GPUs of this machine."""
    return tf.config.list_physical_devices("GPU")


def environment() -> dict[str, str]:
    """The card, the versions and the date that the figures belong to."""
    card = "none"
    if gpus():
        card = tf.config.experimental.get_device_details(gpus()[0]).get("device_name", "unknown")
    found = {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "card": card}
    found |= {"cores": str(os.cpu_count()), "machine": platform.machine()}
    found |= {"python": platform.python_version(), "tensorflow": tf.__version__}
    found |= {"keras": keras.__version__, "tfscale": __version__}
    for package in ("numpy", "torch"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


@contextlib.contextmanager
def mixed_float16() -> Iterator[None]:
    """Within the context, new layers have the policy `mixed_float16`."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


class KerasCase:
    """A Keras model and its wrapped optimizer, built from one seed, and their traced step."""

    def __init__(self, workload: Workload, variant: Variant, quick: bool) -> None:
        """Builds and traces the step, and runs it once."""
        keras.utils.set_random_seed(0)
        with mixed_float16():
            size = workload.quick_size if quick else workload.size
            self.model, batch = workload.build(**size)
            self.batch = tuple(tf.constant(a) for a in batch)
            self.optimizer = variant.optimizer(workload.optimizer())
            self.optimizer.build(self.model.trainable_variables)
            body = self._train_step(workload, variant) if workload.train_step else self._own_loop()
        self.parameters = self.model.count_params()
        self.variables = len(self.model.trainable_variables)

        step = tf.function(body, jit_compile=workload.jit or None, autograph=False)
        start = time.perf_counter()
        self.step = step.get_concrete_function(*self.batch)
        self.trace_s = time.perf_counter() - start
        start = time.perf_counter()
        self.run(1)
        self.first_step_s = time.perf_counter() - start

    def _own_loop(self) -> Callable[..., tf.Tensor]:
        model, optimizer = self.model, self.optimizer
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x, training=True))
                scaled = optimizer.scale_loss(loss)
            variables = model.trainable_variables
            gradients = tape.gradient(scaled, [v.value for v in variables])
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return loss

        return step

    def _train_step(self, workload: Workload, variant: Variant) -> Callable[..., tf.Tensor]:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        variant.compile(self.model, optimizer=self.optimizer, loss=loss, jit_compile=workload.jit)
        model, self.optimizer = self.model, self.model.optimizer
        return lambda x, y: model.train_step((x, y))["loss"]

    def run(self, steps: int) -> float:
        """Runs the steps, waits for the last one, and returns its loss."""
        for _ in range(steps):
            loss = self.step(*self.batch)
        return float(loss)

    def memory(self) -> tuple[int, int] | None:
        """Bytes on the GPU: the permanent state, and what a step adds at its peak."""
        if not gpus():
            return None
        held = {id(v): v for v in [*self.model.variables, *self.optimizer.variables]}
        state = sum(int(v.value.shape.num_elements()) * v.value.dtype.size for v in held.values())
        tf.config.experimental.reset_memory_stats("GPU:0")
        before = tf.config.experimental.get_memory_info("GPU:0")["current"]
        self.run(2)
        return state, tf.config.experimental.get_memory_info("GPU:0")["peak"] - before

    def scale(self) -> float | None:
        """The loss scale now."""
        scale = getattr(self.optimizer, "dynamic_scale", None)
        return None if scale is None else float(scale)


def make_case(workload: Workload, variant: str, quick: bool) -> Case:
    """Prepares a workload under the named variant."""
    if variant in BASELINES:
        from benchmarks.torch_peer import TorchCase

        return TorchCase(workload, scaler=variant == "torch-scaler", quick=quick)
    return KerasCase(workload, VARIANTS[variant], quick)


def _fits(workload: Workload, variant: str) -> bool:
    if variant in BASELINES:
        return workload.torch
    return workload.train_step or not VARIANTS[variant].only_train_step


class Session:
    """Measures workloads one after the other; prints and saves each result immediately."""

    def __init__(
        self, path: Path, quick: bool, rounds: int, steps: int | None, seconds: float
    ) -> None:
        """Starts the clock.

        Args:
            path: the JSON file, rewritten after each result.
            quick: whether to use quick sizes.
            rounds: rounds, each of which times every variant once.
            steps: steps in a timed block; None means as many as fill `TIMED_SECONDS` over all
                rounds.
            seconds: time after which no further variant is started.
        """
        self.path, self.quick, self.rounds, self.steps = path, quick, rounds, steps
        self.start, self.seconds = time.perf_counter(), seconds
        self.longest = 0.0  # the longest preparation so far, which the next one may need too
        self.results: list[Result] = []
        self.environment = environment()

    def save(self) -> None:
        """Writes the results so far."""
        data = {
            "environment": self.environment,
            "settings": {"quick": self.quick, "rounds": self.rounds},
            "results": [asdict(r) for r in self.results],
        }
        save(data, self.path)

    def log(self, text: str) -> None:
        """Prints a line with the time since the start."""
        print(f"[{time.perf_counter() - self.start:6.1f} s] {text}", flush=True)

    def measure(self, workload: Workload, variants: Sequence[str]) -> None:
        """Measures the variants of one workload that fit it, each against its baseline."""
        cases: dict[str, Case] = {}
        found: dict[str, Result] = {}
        for name in variants:
            if not _fits(workload, name):
                continue
            if time.perf_counter() - self.start + self.longest > self.seconds:
                self.log(f"{workload.name}: no time left for {name}")
                continue
            result = found[name] = Result(workload.name, name, BASELINES.get(name, "none"))
            self.results.append(result)
            try:
                cases[name] = self._prepare(workload, result)
            except Exception as error:  # one variant that fails must not stop the others
                result.error = f"{type(error).__name__}: {error}"[:500]
                self.log(f"{workload.name:22} {name:17} failed: {result.error}")
            self.save()
        if cases:
            self._interleave(cases, found)
        cases.clear()
        keras.utils.clear_session(free_memory=False)
        gc.collect()

    def _prepare(self, workload: Workload, result: Result) -> Case:
        start = time.perf_counter()
        case = make_case(workload, result.variant, self.quick)
        result.parameters, result.variables = case.parameters, case.variables
        result.trace_s, result.first_step_s = case.trace_s, case.first_step_s
        case.run(3)
        if (bytes_ := case.memory()) is not None:
            result.state_bytes, result.step_bytes = bytes_
        self.longest = max(self.longest, time.perf_counter() - start)
        self.log(
            f"{workload.name:22} {result.variant:17} trace {case.trace_s:5.1f} s,"
            f" first step {case.first_step_s:5.1f} s"
        )
        return case

    def _steps(self, case: Case) -> int:
        if self.steps is not None:
            return self.steps
        start = time.perf_counter()
        case.run(5)
        step = (time.perf_counter() - start) / 5
        return min(200, max(5, round(TIMED_SECONDS / self.rounds / step)))

    def _interleave(self, cases: dict[str, Case], found: dict[str, Result]) -> None:
        for name, case in cases.items():
            found[name].steps = self._steps(case)
            found[name].scale_before = case.scale()
        for turn in range(self.rounds):
            # Forwards and backwards in turn, so that no variant always follows the same one.
            for name in list(cases)[:: 1 if turn % 2 == 0 else -1]:
                steps = found[name].steps
                # The caches hold the data of the variant before.
                cases[name].run(max(2, steps // 5))
                start = time.perf_counter()
                cases[name].run(steps)
                found[name].rounds_ms.append((time.perf_counter() - start) / steps * 1e3)
            for name in cases:
                summarize(found[name], found.get(found[name].baseline))
            self.save()
        for name, case in cases.items():
            result = found[name]
            result.scale_after = case.scale()
            ratio = ""
            if result.ratio is not None:
                text = with_quartiles(result.ratio, result.ratio_quartiles)
                ratio = f"  {text} of {result.baseline}"
            self.log(f"{result.workload:22} {name:17} {result.ms:9.3f} ms{ratio}")
        self.save()


def summarize(result: Result, baseline: Result | None) -> None:
    """Fills in the medians over the rounds so far."""
    result.ms = statistics.median(result.rounds_ms)
    if baseline is not None and baseline.rounds_ms:
        result.ratio, result.ratio_quartiles = compare(result.rounds_ms, baseline.rounds_ms)


def compare(
    times: Sequence[float], baseline: Sequence[float]
) -> tuple[float, tuple[float, float] | None]:
    """The median of the per-round ratios, and their quartiles if there are several rounds.

    Ratios are taken within a round, because what slows a round down affects both.
    """
    ratios = [ours / theirs for ours, theirs in zip(times, baseline, strict=True)]
    if len(ratios) == 1:
        return ratios[0], None
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return median, (low, high)
