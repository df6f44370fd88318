"""Overflows on no replica, on each alone and on all, in every way to run a step.

The steps must equal those of one device, and all replicas must take the same ones.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfscale

SCALE, PER_REPLICA = 1024.0, 4
LIMIT = 150  # seconds, of one result

Step = Callable[..., Any]
Data = tuple[np.ndarray, np.ndarray, np.ndarray]


class Progress:
    """Results so far, printed and written as they come."""

    def __init__(self, path: Path, seconds: float, *, resume: bool = False) -> None:
        """Starts the clock.

        Args:
            path: the JSON file.
            seconds: the time for everything.
            resume: whether to keep what the file has.
        """
        self.path, self.start, self.seconds = path, time.monotonic(), seconds
        keep = resume and path.exists()
        self.data: dict[str, Any] = json.loads(path.read_text()) if keep else {}

    def left(self) -> float:
        """Seconds left."""
        return self.seconds - (time.monotonic() - self.start)

    def log(self, text: str) -> None:
        """Prints a line with the time since the start."""
        print(f"[{time.monotonic() - self.start:6.1f} s] {text}", flush=True)

    def find(self, part: str, name: str) -> dict[str, Any] | None:
        """The result of a name in a list of them."""
        return next((row for row in self.data.get(part, []) if row["name"] == name), None)

    def attempt(self, part: str, name: str, job: Callable[[], dict[str, Any]]) -> None:
        """Adds what `job` returns to a list of results, if it is not there and there is time left.

        One that fails does not stop the others. One that hangs ends the program and stays in the
        file as an error, so that the next call goes on with the others.
        """
        if self.find(part, name):
            return
        if self.left() < LIMIT:
            self.log(f"no time left for {name}")
            return
        row: dict[str, Any] = {"name": name, "error": f"did not end within {LIMIT} s"}
        self.data.setdefault(part, []).append(row)
        self._save()
        # Nothing in Python can end a collective that hangs; this can.
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        start = time.monotonic()
        try:
            row |= job()
            del row["error"]
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:4000]
        faulthandler.cancel_dump_traceback_later()
        row["seconds"] = round(time.monotonic() - start, 1)
        self._save()
        found = {key: value for key, value in row.items() if key not in ("name", "rounds_ms")}
        self.log(f"{part}, {name}: {json.dumps(found)[:1500]}")

    def _save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.data, indent=1))


class Amplify(keras.layers.Layer):
    """Returns its first input, and multiplies the gradient by the second: one number per sample."""

    def call(self, x: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
        """The first input."""

        @tf.custom_gradient
        def amplified(x: tf.Tensor, factor: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
            return tf.identity(x), lambda dy: (dy * factor[:, None], tf.zeros_like(factor))

        return amplified(x, factor)


def small_model(tokens: bool = False) -> keras.Model:
    """A model that amplifies its gradients, with an Embedding if its input is tokens."""
    factor = keras.Input((), name="factor")
    if tokens:
        x = keras.Input((2,), dtype="int32", name="x")
        h = keras.layers.Flatten()(keras.layers.Embedding(50, 4)(x))
    else:
        x = keras.Input((4,), name="x")
        h = keras.layers.BatchNormalization()(keras.layers.Dense(8, activation="tanh")(x))
    return keras.Model([x, factor], keras.layers.Dense(1)(Amplify()(h, factor)))


def batches(replicas: int, tokens: bool) -> Iterator[tuple[Data, bool]]:
    """A batch for each place where something can go wrong, with good ones in between.

    Yields:
        The batch, and whether something goes wrong in it.
    """
    size = PER_REPLICA * replicas
    first_of = [replica * PER_REPLICA for replica in range(replicas)]
    wrong: list[tuple[Any, Any]] = [((), ()), *(((i,), ()) for i in first_of), ((), ())]
    wrong += [(range(size), ()), ((), (first_of[-1],)), ((first_of[0],), (first_of[-1],))]
    wrong += [((), ()), ((), ())]
    for seed, (overflow, bad_loss) in enumerate(wrong):
        random = np.random.RandomState(seed)
        x = random.randint(0, 50, (size, 2)) if tokens else random.randn(size, 4)
        factor, y = np.ones(size, "float32"), random.randn(size, 1).astype("float32")
        factor[list(overflow)] = np.inf
        y[list(bad_loss)] = np.nan
        yield (x.astype("int32" if tokens else "float32"), factor, y), bool(overflow or bad_loss)


def split(strategy: tf.distribute.Strategy, array: np.ndarray) -> Any:
    """Each replica's part of an array."""
    replicas = strategy.num_replicas_in_sync
    if replicas == 1:
        return tf.constant(array)
    parts = np.split(array, replicas)
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(parts[context.replica_id_in_sync_group])
    )


def own_loop(
    strategy: tf.distribute.Strategy,
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    size: int,
    jit: str,
) -> Step:
    """A step on a global batch; `jit` is what XLA compiles: "none", "replica" or "all"."""

    def step(x: tf.Tensor, factor: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            errors = tf.square(model([x, factor]) - y)  # only `fit` updates BatchNorm
            scaled = optimizer.scale_loss(tf.reduce_sum(errors) / size)
        variables = model.trainable_variables
        gradients = tape.gradient(scaled, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    on_replica = tf.function(step, jit_compile=True) if jit == "replica" else step

    def run(*data: Any) -> Any:
        return strategy.run(on_replica, args=data)

    function = tf.function(run, jit_compile=True if jit == "all" else None)
    return lambda *data: function(*(split(strategy, part) for part in data))


def fit(
    strategy: tf.distribute.Strategy,
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    size: int,
    jit: str,
    compile_model: Callable[..., None],
) -> Step:
    """A step on a global batch, by `model.fit`."""
    compile_model(model, optimizer, loss="mse", jit_compile=jit != "none")
    return lambda x, factor, y: model.fit([x, factor], y, batch_size=size, verbose=0)


PLAIN_FIT = functools.partial(fit, compile_model=keras.Model.compile)
WHOLE_FIT = functools.partial(fit, compile_model=tfscale.compile)

# Name: how it runs, what XLA compiles, how the step is skipped, sparse gradients, the optimizer.
CASES: dict[str, tuple[Callable[..., Step], str, str, bool, str]] = {
    "own loop": (own_loop, "none", "auto", False, "adam"),
    "own loop, cond": (own_loop, "none", "cond", False, "adam"),
    "own loop, Embedding": (own_loop, "none", "auto", True, "adam"),
    "own loop, accumulation and clipping": (own_loop, "none", "auto", False, "accumulation"),
    "own loop, accumulation, cond": (own_loop, "none", "cond", False, "accumulation"),
    "own loop, EMA": (own_loop, "none", "auto", False, "ema"),
    "own loop, XLA on each replica": (own_loop, "replica", "auto", False, "adam"),
    "own loop, XLA, accumulation": (own_loop, "replica", "auto", False, "accumulation"),
    "own loop, XLA, Embedding": (own_loop, "replica", "auto", True, "ema"),
    "own loop, one XLA cluster": (own_loop, "all", "auto", False, "adam"),
    "fit": (PLAIN_FIT, "none", "auto", False, "adam"),
    "fit, whole step": (WHOLE_FIT, "none", "auto", False, "adam"),
    "fit, whole step, Embedding": (WHOLE_FIT, "none", "auto", True, "ema"),
    "fit, XLA on each replica": (WHOLE_FIT, "replica", "auto", False, "adam"),
    "fit, XLA, accumulation": (WHOLE_FIT, "replica", "auto", False, "accumulation"),
    "fit, XLA, Embedding": (WHOLE_FIT, "replica", "auto", True, "ema"),
    "fit, one XLA cluster": (PLAIN_FIT, "all", "auto", False, "adam"),
}
OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "accumulation": lambda: keras.optimizers.Adam(
        0.01, global_clipnorm=0.5, gradient_accumulation_steps=2
    ),
    "ema": lambda: keras.optimizers.SGD(0.01, use_ema=True, ema_overwrite_frequency=2),
}


REFUSALS = ("share one XLA cluster", "every replica on a GPU")


def must_be_refused(name: str, devices: tuple[str, ...]) -> bool:
    """Whether XLA cannot compile the replicas of a case, as it never can on several CPUs."""
    jit = CASES[name][1]
    on_cpus = jit == "replica" and "CPU" in devices[0]
    return len(devices) > 1 and (jit == "all" or on_cpus)


def make(
    strategy: tf.distribute.Strategy, name: str
) -> tuple[Step, keras.Model, tfscale.LossScaleOptimizer]:
    """The step of a case, its model and its optimizer."""
    run, jit, update, tokens, optimizer_name = CASES[name]
    size = PER_REPLICA * strategy.num_replicas_in_sync
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = small_model(tokens)
        policy = tfscale.Dynamic(initial_scale=SCALE, growth_interval=2)
        optimizer = tfscale.wrap(OPTIMIZERS[optimizer_name](), policy, update=update)
        step = run(strategy, model, optimizer, size, jit)
    return step, model, optimizer


def plain_loop(one: tf.distribute.Strategy, name: str, replicas: int) -> tuple[Step, keras.Model]:
    """The same steps on one device, in a plain graph."""
    _, _, _, tokens, optimizer_name = CASES[name]
    with one.scope():
        keras.utils.set_random_seed(1)
        model = small_model(tokens)
        policy = tfscale.Dynamic(initial_scale=SCALE, growth_interval=2)
        optimizer = tfscale.wrap(OPTIMIZERS[optimizer_name](), policy, update="cond")
        return own_loop(one, model, optimizer, PER_REPLICA * replicas, "none"), model


def check(strategy: tf.distribute.Strategy, one: tf.distribute.Strategy, name: str) -> list[float]:
    """Runs a case and returns its scales.

    Raises:
        AssertionError: replicas, variables or scales are not as they should be.
    """
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
    if CASES[name][0] is own_loop or tokens:  # `fit` trains BatchNorm on each replica's part
        single_step, single = plain_loop(one, name, strategy.num_replicas_in_sync)
        for data, _ in batches(strategy.num_replicas_in_sync, tokens):
            single_step(*data)
        for a, b in zip(model.trainable_variables, single.trainable_variables, strict=True):
            np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-3, atol=1e-4)
    return scales


def matrix(
    strategy: tf.distribute.Strategy, one: tf.distribute.Strategy, progress: Progress
) -> None:
    """Checks each case; those that cannot work must be refused."""

    def case(name: str, refused: bool) -> dict[str, Any]:
        try:
            scales = check(strategy, one, name)
        except ValueError as error:
            if refused and any(reason in str(error) for reason in REFUSALS):
                return {"refused": True}
            raise
        if refused:
            raise AssertionError("this should have been refused")
        return {"scales": scales}

    for name in CASES:
        refused = must_be_refused(name, strategy.extended.worker_devices)
        progress.attempt("matrix", name, functools.partial(case, name, refused))
