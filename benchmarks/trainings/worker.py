"""One process of a run: does one job and writes its result after each part of it."""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # several jobs share the GPU

from benchmarks.measure import environment
from benchmarks.report import save
from benchmarks.trainings import cost, faults
from benchmarks.trainings.driver import options
from benchmarks.trainings.tasks import TASKS, Task
from benchmarks.trainings.trial import Trial

Json = dict[str, Any]


class Job:
    """A job, and its result so far.

    Attributes:
        given: `part`, `training`, `variant` and the options of the run.
        result: what is known, also from an earlier process that was killed.
    """

    def __init__(self, given: Path, result: Path) -> None:
        """Reads the job and its result so far."""
        self.given: Json = json.loads(given.read_text())
        self.path = result
        self.result: Json = json.loads(result.read_text()) if result.exists() else {}
        self.result["environment"] = environment()

    def save(self, **new: Any) -> None:
        """Adds to the result and writes it at once."""
        self.result |= new
        save(self.result, self.path)

    def task(self) -> Task:
        """The task, in the sizes that were asked for."""
        given = self.given
        return TASKS[given["training"]](Path(given["data"]), given["tiny"], **given["sizes"])

    def run(self) -> None:
        """Does what is left of the job."""
        {"quality": self.quality, "faults": self.faults, "memory": self.memory}.get(
            self.given["part"], self.timing
        )()
        self.save(done=options(self.given))

    def quality(self) -> None:
        """Trains from every seed."""
        trial = Trial(self.task(), self.given["variant"])
        self.save(parameters=trial.model.count_params(), runs=self._runs(trial))
        for run in self._left([{"seed": seed} for seed in self.given["seeds"]]):
            found = trial.train(run["seed"])
            self.save(runs=[*self.result["runs"], found])
            if self.given["variant"] == "wrap" and "gradients_lost" not in self.result:
                self.save(gradients_lost=self._gradients_lost(trial, found))

    def _gradients_lost(self, trial: Trial, run: Json) -> Json:
        """At two moments of the run that was just made: at its end, and at its first validation."""
        task, steps = trial.task, trial.task.steps
        end = {"step": steps, **trial.gradients_lost(run["scale"][-1][1])}
        task.steps = task.every
        scale = trial.train(run["seed"])["scale"][-1][1]
        task.steps = steps
        return {"early": {"step": task.every, **trial.gradients_lost(scale)}, "end": end}

    def faults(self) -> None:
        """Trains from every seed with every fault."""
        task = self.task()
        trial = Trial(task, self.given["variant"])
        self.save(runs=self._runs(trial))
        pairs = itertools.product(self.given["seeds"], self.given["faults"])
        wanted = [{"fault": fault, "seed": seed} for seed, fault in pairs]
        for run in self._left(wanted):
            found = trial.train(run["seed"], faults.spoiled(task, run["seed"], run["fault"]))
            self.save(runs=[*self.result["runs"], {**run, **found}])

    def _runs(self, trial: Trial) -> list[Json]:
        """Earlier runs that may stay."""
        return [r for r in self.result.get("runs", []) if r["steps"] == trial.task.steps]

    def _left(self, wanted: list[Json]) -> list[Json]:
        """Those of the wanted runs that the result does not have."""
        return [w for w in wanted if not any(w.items() <= r.items() for r in self.result["runs"])]

    def memory(self) -> None:
        """Finds the batch that fits into the limit."""
        names = ("training", "variant", "data", "tiny", "limit")
        training, variant, folder, tiny, limit = (self.given[name] for name in names)
        found = self.result.get("readings", []) if self.result.get("limit") == limit else []
        self.save(readings=found, limit=limit)
        for so_far in cost.readings(training, variant, Path(folder), tiny, limit, found):
            self.save(readings=so_far)
        self.save(batch=cost.largest(self.result["readings"], limit))

    def timing(self) -> None:
        """Times a block of steps at every line on the standard input."""
        trial = Trial(self.task(), self.given["variant"])
        batches = trial.task.batches(0)
        bytes_ = cost.peak(trial, batches)
        self.save(parameters=trial.model.count_params(), peak_bytes=bytes_)
        print(json.dumps({"ready": True}), flush=True)
        for _ in sys.stdin:
            ms = cost.timed(trial, batches, self.given["timed_steps"])
            print(json.dumps({"ms": ms}), flush=True)


if __name__ == "__main__":
    Job(Path(sys.argv[1]), Path(sys.argv[2])).run()
