"""The benchmark measures what it says, and keeps what it has measured."""

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import pytest

from benchmarks import measure
from benchmarks.workloads import WORKLOADS, Workload


class FakeCase:
    """A case whose step takes no time and only records its run."""

    parameters = variables = 1
    trace_s = first_step_s = 0.0

    def __init__(self, name: str, runs: list[tuple[str, int]]) -> None:
        self.name, self.runs = name, runs

    def run(self, steps: int) -> float:
        self.runs.append((self.name, steps))
        return 0.0

    def memory(self) -> tuple[int, int]:
        return (100, 10)

    def scale(self) -> float:
        return 8.0


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The runs of fake cases, which take the place of all others."""
    runs: list[tuple[str, int]] = []
    monkeypatch.setattr(measure, "make_case", lambda w, v, q: FakeCase(v, runs))
    return runs


def session(path: Path, **settings: Any) -> measure.Session:
    settings = {"quick": True, "rounds": 3, "steps": 4, "seconds": 1e9, **settings}
    return measure.Session(path, **settings)


def test_variants_take_turns(
    tmp_path: Path, dense: Workload, runs: list[tuple[str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    session(tmp_path / "r.json").measure(dense, ["none", "keras"])
    timed = [name for name, steps in runs if steps == 4]
    assert timed == ["none", "keras", "keras", "none", "none", "keras"]
    assert " to " in capsys.readouterr().out  # the quartiles


def test_ratio_is_the_median_of_per_round_ratios() -> None:
    none = measure.Result("w", "none", "none", rounds_ms=[1.0, 10.0, 2.0])
    ours = measure.Result("w", "keras", "none", rounds_ms=[2.0, 10.0, 4.0])
    measure.summarize(ours, none)
    assert (ours.ms, ours.ratio) == (4.0, 2.0)
    assert ours.ratio_quartiles == (1.5, 2.0)
    assert measure.compare([3.0], [2.0]) == (1.5, None)


def test_failing_variant_does_not_stop_others(
    tmp_path: Path, dense: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(workload: Workload, variant: str, quick: bool) -> FakeCase:
        if variant == "keras":
            raise RuntimeError("no such kernel")
        return FakeCase(variant, [])

    monkeypatch.setattr(measure, "make_case", make)
    path = tmp_path / "r.json"
    session(path).measure(dense, ["none", "keras", "tfscale"])
    rows = {r["variant"]: r for r in json.loads(path.read_text())["results"]}
    assert "no such kernel" in rows["keras"]["error"]
    assert rows["keras"]["ms"] is None
    assert rows["tfscale"]["ratio"] is not None


def test_results_are_saved_during_the_run(
    tmp_path: Path, dense: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deep" / "r.json"
    seen = []

    class Reader(FakeCase):
        def run(self, steps: int) -> float:
            if path.exists():
                seen.append([r["variant"] for r in json.loads(path.read_text())["results"]])
            return super().run(steps)

    monkeypatch.setattr(measure, "make_case", lambda w, v, q: Reader(v, []))
    session(path).measure(dense, ["none", "keras"])
    assert ["none"] in seen


def test_no_variant_starts_after_the_time_is_up(
    tmp_path: Path, dense: Workload, runs: list[tuple[str, int]]
) -> None:
    session(tmp_path / "r.json", seconds=-1.0).measure(dense, ["none", "keras"])
    assert runs == []


def test_whole_step_needs_a_train_step(
    tmp_path: Path, dense: Workload, runs: list[tuple[str, int]]
) -> None:
    run = session(tmp_path / "r.json")
    run.measure(dense, ["none", "tfscale-step"])
    assert [r.variant for r in run.results] == ["none"]
    run.measure(replace(dense, train_step=True), ["none", "tfscale-step"])
    assert [r.variant for r in run.results[1:]] == ["none", "tfscale-step"]


@pytest.mark.parametrize("train_step", [False, True])
def test_none_does_not_scale_the_loss(dense: Workload, train_step: bool) -> None:
    case = measure.make_case(replace(dense, train_step=train_step), "none", quick=True)
    assert case.scale() is None
    scaled = measure.make_case(replace(dense, train_step=train_step), "keras", quick=True)
    assert scaled.scale() == 2.0**15


def test_variants_train_from_the_same_weights(dense: Workload) -> None:
    first = [measure.make_case(dense, v, quick=True) for v in ("none", "keras")]
    losses = [case.run(1) for case in first]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    # Random labels can be memorized: steps that update nothing would not reach a lower loss.
    assert first[0].run(300) < losses[0]


def test_global_dtype_policy_is_restored(dense: Workload) -> None:
    before = keras.config.dtype_policy()
    try:
        keras.config.set_dtype_policy("float32")
        measure.make_case(dense, "none", quick=True)
        assert keras.config.dtype_policy().name == "float32"
    finally:
        keras.config.set_dtype_policy(before)


@pytest.mark.parametrize("name", ["transformer-graph", "embedding-graph", "convnet-train-step"])
def test_quick_sizes_give_a_finite_loss(name: str) -> None:
    case = measure.make_case(WORKLOADS[name], "none", quick=True)
    assert math.isfinite(case.run(3))


def test_transformer_has_the_documented_size() -> None:
    w = WORKLOADS["transformer-xla"]
    d, f, v = w.size["width"], w.size["ffn"], w.size["vocabulary"]
    layer = 4 * d * (d + 1) + (d * f + f) + (f * d + d) + 4 * d
    assert w.size["layers"] * layer + v * (2 * d + 1) == pytest.approx(51.4e6, rel=0.002)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
@pytest.mark.parametrize("name", ["transformer-graph", "mlp-graph"])
def test_torch_peer_has_as_many_parameters(name: str) -> None:
    workload = WORKLOADS[name]
    ours = measure.make_case(workload, "none", quick=True)
    peer = measure.make_case(workload, "torch-scaler", quick=True)
    assert peer.parameters == ours.parameters
    assert peer.run(2) > 0
