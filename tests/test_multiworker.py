"""Two workers in two processes that talk over the loopback: no one waits, no one goes astray."""

import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

import tfscale
from tfscale import _compat

HERE = pathlib.Path(__file__).parent
PAGE = HERE.parent / "docs" / "distributed.md"
pytestmark = pytest.mark.slow

LOOPS = ["loop", "accumulation reduced by caller"]
FITS = ["fit", "fit tfscale.Model"]
LIMIT = 240  # seconds for both workers together; a collective that never ends is killed


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("localhost", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def run_on_two_workers(folder, script, *arguments):
    """What the script prints on each of two workers; fails if one fails or the time is up."""
    cluster = {"worker": [f"localhost:{port}" for port in free_ports(2)]}
    workers, outputs = [], [folder / f"worker{index}" for index in range(2)]
    for index, output in enumerate(outputs):
        config = {"cluster": cluster, "task": {"type": "worker", "index": index}}
        env = {**os.environ, "TF_CONFIG": json.dumps(config), "CUDA_VISIBLE_DEVICES": "-1"}
        env["PYTHONPATH"] = str(pathlib.Path(tfscale.__file__).parents[1])
        command = [sys.executable, str(script), *arguments]
        # Into files, as a full pipe would stop one worker and with it the other.
        with output.open("w") as out, output.with_suffix(".err").open("w") as err:
            workers.append(subprocess.Popen(command, env=env, stdout=out, stderr=err))
    deadline = time.monotonic() + LIMIT
    try:
        for worker, output in zip(workers, outputs, strict=True):
            failed = worker.wait(timeout=max(0, deadline - time.monotonic()))
            assert not failed, output.with_suffix(".err").read_text()[-3000:]
    except subprocess.TimeoutExpired:
        pytest.fail(f"The workers were still waiting for each other after {LIMIT} seconds.")
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return [output.read_text() for output in outputs]


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    """Everything that is asked of the two workers, in one start of the two processes."""
    (script,) = re.findall(r"```python[^\n]*\n(# train\.py.*?)```", PAGE.read_text(), re.DOTALL)
    folder = tmp_path_factory.mktemp("workers")
    (folder / "train.py").write_text(script)
    arguments = folder / "train.py", *LOOPS, *FITS
    outputs = run_on_two_workers(folder, HERE / "worker.py", *arguments)
    return [json.loads(output.splitlines()[-1]) for output in outputs]


@pytest.mark.parametrize("what", [*LOOPS, *FITS])
def test_workers_hold_the_same_after_every_step(workers, what):
    for one, other in zip(*(worker[what]["states"] for worker in workers), strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("what", LOOPS)
def test_overflow_on_one_worker_hangs_or_splits_none(workers, what):
    """Good, overflow on either worker, a bad loss, both at once, good, good."""
    for worker in workers:
        assert worker[what]["scales"] == [1024.0, 512.0, 256.0, 256.0, 256.0, 256.0, 512.0]
        assert worker[what]["skipped"] == 4


def test_skipped_step_leaves_no_trace_on_either_worker(workers):
    for worker in workers:
        states = [state[:2] for state in worker["loop"]["states"]]  # the weights
        assert states[0] == states[1] == states[2] == states[3] == states[4]
        assert states[4] != states[5]


def test_agreement_of_workers_adds_no_collective(workers):
    """One buffer for gradients and flags, so one collective in a step."""
    assert [worker["loop"]["collectives"] for worker in workers] == [1, 1]


@pytest.mark.parametrize("what", FITS)
def test_fit_averages_its_logs_over_the_workers(workers, what):
    """Keras' own `fit` stops before the first step of several workers."""
    one, other = (worker[what]["history"] for worker in workers)
    if _compat.KERAS < (3, 7):  # `evaluate` of several workers tells each of its own part
        one, other = ({k: v for k, v in logs.items() if k[:4] != "val_"} for logs in (one, other))
    assert one == other
    assert one["skipped_steps"] == [1.0, 2.0]
    assert all(np.isfinite(values).all() for values in one.values())
    assert one["loss"][1] < one["loss"][0]


def test_script_of_the_page_runs_on_two_workers(workers):
    one, other = (worker["page"] for worker in workers)
    assert one == other
    assert "skipped" in one
