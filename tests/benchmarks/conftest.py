"""What the tests of the benchmarks share: result files and a tiny workload."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measure import Result
from benchmarks.workloads import WORKLOADS, Workload

Row = dict[str, Any]


@pytest.fixture
def result() -> Callable[..., Row]:
    """Makes a row of a result file."""

    def make(workload: str = "w", variant: str = "keras", **fields: Any) -> Row:
        return asdict(Result(workload, variant, "none", **{"ms": 2.0, "ratio": 1.5, **fields}))

    return make


@pytest.fixture
def results(tmp_path: Path) -> Callable[..., Path]:
    """Writes a result file."""

    def write(name: str, *rows: Row, card: str = "none", quick: bool = True) -> Path:
        environment = {"date": "2026-01-02T03:04:05+00:00", "card": card, "cores": "2"}
        data = {"environment": environment, "settings": {"quick": quick}, "results": list(rows)}
        path = tmp_path / name
        path.write_text(json.dumps(data))
        return path

    return write


@pytest.fixture
def dense() -> Workload:
    """A workload small enough for a test."""
    size = {"layers": 1, "width": 4, "batch": 2}
    return replace(WORKLOADS["mlp-graph"], name="dense", quick_size=size)
