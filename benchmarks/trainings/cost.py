"""What a step costs: its time, its peak of memory, and the batch that a given memory holds."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from benchmarks.measure import gpus
from benchmarks.trainings.tasks import TASKS
from benchmarks.trainings.trial import Trial

WARM = 10  # steps at the start of `fit` that are not timed


class _Clock(keras.callbacks.Callback):
    """Times the steps of one `fit` after the first ones."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.last, self.start, self.ms = WARM + steps - 1, 0.0, 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch in (WARM - 1, self.last):
            float(logs["loss"])  # waits for the device
            now = time.perf_counter()
            self.ms = (now - self.start) / (self.last + 1 - WARM) * 1e3
            self.start = now


def timed(trial: Trial, batches: tf.data.Dataset, steps: int) -> float:
    """Trains with `fit`, without validation, and returns the milliseconds of a step."""
    clock = _Clock(steps)
    trial.model.fit(
        batches, steps_per_epoch=WARM + steps, callbacks=[clock], shuffle=False, verbose=0
    )
    return clock.ms


def peak(trial: Trial, batches: tf.data.Dataset) -> int | None:
    """The most bytes that were in use on the GPU during two steps; None without a GPU."""
    trial.model.fit(batches, steps_per_epoch=2, shuffle=False, verbose=0)  # compiles and tunes
    if not gpus():
        return None
    tf.config.experimental.reset_memory_stats("GPU:0")
    trial.model.fit(batches, steps_per_epoch=2, shuffle=False, verbose=0)
    return tf.config.experimental.get_memory_info("GPU:0")["peak"]


def readings(
    training: str, variant: str, folder: Path, tiny: bool, limit: int, found: list[list[int]]
) -> Iterator[list[list[int]]]:
    """Peaks of memory at three batch sizes, the later ones close to what the limit holds.

    Yields:
        After each reading, all pairs of batch size and bytes, `found` first; none without a GPU.
    """

    def read(batch: int) -> int | None:
        trial = Trial(TASKS[training](folder, tiny, batch=batch), variant)
        bytes_ = peak(trial, trial.task.batches(0))
        del trial
        keras.utils.clear_session()
        gc.collect()
        return bytes_

    start = TASKS[training].tiny["batch"] if tiny else TASKS[training].batch
    return approach(read, start, limit, found)


def approach(
    read: Callable[[int], int | None], batch: int, limit: int, found: list[list[int]]
) -> Iterator[list[list[int]]]:
    """Reads at `batch` and twice more, each time where the readings so far put the limit."""
    while len(found) < 3:
        if found:
            # A line through the last two readings, or through nothing for nothing.
            (b0, m0), (b1, m1) = ([0, 0], *found)[-2:]
            slope = max((m1 - m0) / (b1 - b0), 1.0)
            step = 8 if batch >= 64 else 1
            batch = max(step, int(b1 + (limit - m1) / slope) // step * step)
        bytes_ = None if batch in (b for b, _ in found) else read(batch)
        if bytes_ is None:
            return
        found = [*found, [batch, bytes_]]
        yield found


def largest(found: list[list[int]], limit: int) -> int | None:
    """The largest batch that was seen to fit."""
    return max((batch for batch, bytes_ in found if bytes_ <= limit), default=None)
