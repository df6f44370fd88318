"""Runs jobs as processes side by side, and keeps all results in one file.

Everything can be killed at any time: the file is rewritten after each result, and what it holds is
not run again. This process does without TensorFlow, and so leaves the GPU to the others.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import save

Json = dict[str, Any]

_KEYS = ("part", "training", "variant")


def key(job: Json) -> str:
    """The name of a job in the file of results."""
    return "/".join(job[k] for k in _KEYS)


def options(job: Json) -> Json:
    """What a result of the job depends on besides its name."""
    return {k: v for k, v in job.items() if k not in (*_KEYS, "data")}


class Driver:
    """The results file and the processes that fill it."""

    def __init__(self, path: Path, jobs: int, seconds: float) -> None:
        """Reads the results of an earlier call, if there are any.

        Args:
            path: the file of results.
            jobs: how many processes run at a time.
            seconds: time after which all processes are ended.
        """
        self.path, self.jobs = path, jobs
        self.start, self.seconds = time.monotonic(), seconds
        self.environment: Json = {}
        self.results: dict[str, Json] = {}
        if path.exists():
            before = json.loads(path.read_text())
            self.environment, self.results = before["environment"], before["jobs"]
        self.scratch = tempfile.TemporaryDirectory()
        self.numbers = itertools.count()
        self.written = ""
        self.logs: dict[str, Path] = {}

    def run(self, todo: Sequence[Json], rounds: int) -> bool:
        """Runs the jobs that have no result yet; those of one training's timing together.

        Args:
            todo: the jobs.
            rounds: rounds of a timing, each of which times every variant once.

        Returns:
            Whether all are done.
        """
        todo = [job for job in todo if not self._done(job)]
        timings = [job for job in todo if job["part"] == "timing"]
        self._side_by_side([job for job in todo if job["part"] != "timing"])
        for training in dict.fromkeys(job["training"] for job in timings):
            self._interleave([job for job in timings if job["training"] == training], rounds)
        self.save()
        return all(map(self._done, todo))

    def _done(self, job: Json) -> bool:
        return self.results.get(key(job), {}).get("done") == options(job)

    def save(self) -> None:
        """Collects what the processes have written, and writes the file if it is new."""
        for path in Path(self.scratch.name).glob("*.result"):
            result = json.loads(path.read_text())
            name = result.pop("job")
            self.environment = result.pop("environment", self.environment)
            self.results[name] = {**self.results.get(name, {}), **result}
        data = {"environment": self.environment, "jobs": self.results}
        text = json.dumps(data)
        if text != self.written:
            save(data, self.path)
            self.written = text

    def _late(self) -> bool:
        return time.monotonic() - self.start > self.seconds

    def _log(self, text: str) -> None:
        print(f"[{time.monotonic() - self.start:6.1f} s] {text}", flush=True)

    def _begin(self, job: Json, **pipes: Any) -> subprocess.Popen[str]:
        name = key(job)
        stem = Path(self.scratch.name) / str(next(self.numbers))
        job_file, result = stem.with_suffix(".job"), stem.with_suffix(".result")
        job_file.write_text(json.dumps(job))
        result.write_text(json.dumps({**self.results.get(name, {}), "job": name}))
        self._log(f"begins {name}")
        command = [sys.executable, "-m", "benchmarks.trainings.worker", str(job_file), str(result)]
        self.logs[name] = stem.with_suffix(".log")
        with self.logs[name].open("w") as log:
            return subprocess.Popen(command, stderr=log, text=True, **pipes)

    def _end(self, job: Json, process: subprocess.Popen[str]) -> None:
        self._log(f"{'ends' if process.returncode == 0 else 'FAILED'} {key(job)}")
        if process.returncode:
            print(self.logs[key(job)].read_text()[-3000:], flush=True)
        self.save()

    def _side_by_side(self, todo: list[Json]) -> None:
        running: list[tuple[Json, subprocess.Popen[str]]] = []
        waiting = list(todo)
        while (waiting or running) and not self._late():
            while waiting and len(running) < self.jobs:
                job = waiting.pop(0)
                running.append((job, self._begin(job)))
            time.sleep(0.5)
            for job, process in [r for r in running if r[1].poll() is not None]:
                running.remove((job, process))
                self._end(job, process)
            self.save()
        _end_all([process for _, process in running])
        self.save()

    def _interleave(self, todo: list[Json], rounds: int) -> None:
        """Prepares the variants side by side; then one times its steps while the others wait."""
        if self._late():
            return
        processes = {
            key(job): self._begin(job, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for job in todo
        }
        rest = self.start + self.seconds - time.monotonic()
        timer = threading.Timer(rest, _end_all, [list(processes.values())])
        timer.start()
        for name in processes:  # rounds of a killed call would not be interleaved with new ones
            self.results.setdefault(name, {})["rounds_ms"] = []
        ready = [name for name, process in processes.items() if _answer(process)]
        for turn in range(rounds):
            # Forwards and backwards in turn, so that no variant always follows the same one.
            for name in ready[:: 1 if turn % 2 == 0 else -1]:
                answer = _answer(processes[name], "go")
                if answer:
                    self.results[name]["rounds_ms"].append(answer["ms"])
            self.save()
        for job in todo:
            process = processes[key(job)]
            process.communicate()
            self._end(job, process)
        timer.cancel()


def _end_all(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


def _answer(process: subprocess.Popen[str], question: str = "") -> Json | None:
    """What a process says next, None if it has ended."""
    if process.stdin is None or process.stdout is None:
        raise ValueError("The process must have pipes.")
    try:
        if question:
            process.stdin.write(f"{question}\n")
            process.stdin.flush()
        line = process.stdout.readline()
    except BrokenPipeError:
        return None
    return json.loads(line) if line else None
