"""The benchmark harness measures what it says, keeps what it measured, and shows it."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from dataclasses import replace

import keras
import pytest

from tfscale import bench

measure = bench.harness("measure")
variants = bench.harness("variants")
workloads = bench.harness("workloads")


def parse(*words):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args([str(word) for word in words])


def result(workload="w", variant="keras", ms=2.0, ratio=1.5, **more):
    base = measure.Result(workload, variant, "none", ms=ms, ratio=ratio, **more)
    return measure.asdict(base)


@pytest.fixture
def results(tmp_path):
    def write(name, *rows, card="none", quick=True):
        environment = {"date": "2026-01-02T03:04:05+00:00", "card": card, "cores": "2"}
        data = {"environment": environment, "settings": {"quick": quick}, "results": list(rows)}
        path = tmp_path / name
        path.write_text(json.dumps(data))
        return path

    return write


@pytest.fixture
def dense():
    """A workload small enough for a test."""
    size = {"layers": 1, "width": 4, "batch": 2}
    small = replace(workloads.WORKLOADS["mlp-graph"], quick_size=size)
    return replace(small, name="dense")


class Clockwork:
    """A case whose step takes no time, but writes down who ran."""

    parameters = variables = 1
    trace_s = first_step_s = 0.0

    def __init__(self, name, diary):
        self.name, self.diary = name, diary

    def run(self, steps):
        self.diary.append((self.name, steps))
        return 0.0

    def memory(self):
        return (100, 10)

    def scale(self):
        return 8.0


def session(path, **settings):
    settings = {"quick": True, "rounds": 3, "steps": 4, "seconds": 1e9, **settings}
    return measure.Session(path, **settings)


def test_variants_take_turns_so_that_drift_hits_all_alike(tmp_path, dense, monkeypatch):
    diary = []
    monkeypatch.setattr(measure, "make_case", lambda w, v, q: Clockwork(v, diary))
    session(tmp_path / "r.json").measure(dense, ["none", "keras"])
    timed = [name for name, steps in diary if steps == 4]
    assert timed == ["none", "keras", "keras", "none", "none", "keras"]


def test_ratio_compares_within_a_round_not_across_rounds():
    none = measure.Result("w", "none", "none", rounds_ms=[1.0, 10.0, 2.0])
    ours = measure.Result("w", "keras", "none", rounds_ms=[2.0, 10.0, 4.0])
    measure.summarize(ours, none)
    assert (ours.ms, ours.ratio) == (4.0, 2.0)
    assert ours.ratio_quartiles == (1.5, 2.0)


def test_broken_variant_costs_no_other_variant_its_figures(tmp_path, dense, monkeypatch):
    def make(workload, variant, quick):
        if variant == "keras":
            raise RuntimeError("no such kernel")
        return Clockwork(variant, [])

    monkeypatch.setattr(measure, "make_case", make)
    path = tmp_path / "r.json"
    session(path).measure(dense, ["none", "keras", "tfscale"])
    rows = {r["variant"]: r for r in json.loads(path.read_text())["results"]}
    assert "no such kernel" in rows["keras"]["error"]
    assert rows["keras"]["ms"] is None
    assert rows["tfscale"]["ratio"] is not None
    assert bench.run(parse("--from", path, "--out", tmp_path)) == 1


def test_results_are_on_disk_before_the_run_is_over(tmp_path, dense, monkeypatch):
    path = tmp_path / "deep" / "r.json"
    seen = []

    class Looks(Clockwork):
        def run(self, steps):
            if path.exists():
                seen.append([r["variant"] for r in json.loads(path.read_text())["results"]])
            return super().run(steps)

    monkeypatch.setattr(measure, "make_case", lambda w, v, q: Looks(v, []))
    session(path).measure(dense, ["none", "keras"])
    assert ["none"] in seen


def test_no_variant_is_begun_after_the_time_is_up(tmp_path, dense, monkeypatch):
    begun = []
    monkeypatch.setattr(measure, "make_case", lambda w, v, q: begun.append(v))
    session(tmp_path / "r.json", seconds=-1.0).measure(dense, ["none", "keras"])
    assert begun == []


def test_whole_step_is_not_measured_in_a_custom_loop(tmp_path, dense, monkeypatch):
    monkeypatch.setattr(measure, "make_case", lambda w, v, q: Clockwork(v, []))
    run = session(tmp_path / "r.json")
    run.measure(dense, ["none", "tfscale-step"])
    assert [r.variant for r in run.results] == ["none"]
    run.measure(replace(dense, train_step=True), ["none", "tfscale-step"])
    assert [r.variant for r in run.results[1:]] == ["none", "tfscale-step"]


@pytest.mark.parametrize("train_step", [False, True])
def test_none_is_really_without_loss_scaling(dense, train_step):
    case = measure.make_case(replace(dense, train_step=train_step), "none", quick=True)
    assert case.scale() is None
    scaled = measure.make_case(replace(dense, train_step=train_step), "keras", quick=True)
    assert scaled.scale() == 2.0**15


def test_every_variant_starts_from_the_same_weights_and_trains(dense):
    first = [measure.make_case(dense, v, quick=True) for v in ("none", "keras")]
    losses = [case.run(1) for case in first]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    # Random labels can be learnt by heart: a step that updates nothing would not get there.
    assert first[0].run(300) < losses[0]


def test_global_dtype_policy_is_left_as_it_was(dense):
    before = keras.config.dtype_policy()
    try:
        keras.config.set_dtype_policy("float32")
        measure.make_case(dense, "none", quick=True)
        assert keras.config.dtype_policy().name == "float32"
    finally:
        keras.config.set_dtype_policy(before)


@pytest.mark.parametrize("name", ["transformer-graph", "embedding-graph", "convnet-train-step"])
def test_quick_sizes_build_and_give_a_finite_loss(name):
    case = measure.make_case(workloads.WORKLOADS[name], "none", quick=True)
    assert math.isfinite(case.run(3))


def test_full_transformer_has_the_documented_size():
    w = workloads.WORKLOADS["transformer-xla"]
    d, f, v = w.size["width"], w.size["ffn"], w.size["vocabulary"]
    layer = 4 * d * (d + 1) + (d * f + f) + (f * d + d) + 4 * d
    assert w.size["layers"] * layer + v * (2 * d + 1) == pytest.approx(51.4e6, rel=0.002)


def test_table_shows_ratio_and_failures(results, capsys, tmp_path):
    path = results("a.json", result(), result(variant="tfscale", ms=None, ratio=None, error="x"))
    assert bench.run(parse("--from", path, "--out", tmp_path)) == 1
    out = capsys.readouterr().out
    assert "1.500" in out
    assert "failed" in out
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_later_file_replaces_a_pair_measured_twice(results, tmp_path):
    old = results("a.json", result(ratio=1.5), result(variant="tfscale", ratio=1.1))
    new = results("b.json", result(ratio=1.7))
    rows = {r["variant"]: r["ratio"] for r in bench.load([old, new])["results"]}
    assert rows == {"keras": 1.7, "tfscale": 1.1}
    more = results("c.json", result(workload="v"), result(variant="torch"))
    loaded = bench.load([old, more])["results"]
    assert [r["workload"] for r in loaded] == ["w", "w", "w", "v"]
    assert bench.run(parse("--from", old, new, "--out", tmp_path / "out")) == 0
    assert bench.load([tmp_path / "out" / "b.json"])["results"] == bench.load([old, new])["results"]


def test_variants_come_in_one_order_whatever_was_measured_first(results):
    path = results("r.json", *[result(variant=v) for v in ("torch", "mine", "tfscale", "none")])
    shown = [r["variant"] for r in bench.load([path])["results"]]
    assert shown == ["none", "tfscale", "torch", "mine"]


def test_results_of_two_cards_are_not_mixed(results):
    with pytest.raises(ValueError, match=r"agree on `card`.*H100.*none"):
        bench.load([results("a.json", card="H100"), results("b.json")])


def test_chart_has_a_panel_a_workload_and_no_bar_for_the_baseline(results):
    rows = [result(), result(variant="none", ratio=1.0), result(workload="v", ratio=1.2)]
    figure = bench.chart(bench.load([results("a.json", *rows)]))
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["w", "v"]
    assert [len(axes.patches) for axes in figure.axes] == [1, 1]


def test_a_bar_that_is_cut_says_its_figure(results):
    rows = [result(ratio=9.7, ratio_quartiles=(9.0, 11.0)), result(variant="tfscale", ratio=1.2)]
    [axes] = bench.chart(bench.load([results("a.json", *rows)])).axes
    assert [bar.get_width() for bar in axes.patches] == [2.5, 1.2]
    assert [text.get_text() for text in axes.texts] == ["9.70, cut", "1.20"]
    assert axes.get_xlim()[1] < 3


def test_chart_of_nothing_is_no_error(results):
    assert bench.chart(bench.load([results("a.json")])).axes == []


def test_unknown_names_are_refused_before_anything_runs(capsys):
    assert bench.run(parse("--quick", "--workloads", "transformer")) == 2
    assert "--workloads must name some of transformer-xla" in capsys.readouterr().err


def test_list_names_every_workload_and_variant(capsys):
    assert bench.run(parse("--list")) == 0
    out = capsys.readouterr().out
    for name in (*workloads.WORKLOADS, *variants.VARIANTS, *variants.BASELINES):
        assert name in out


def test_missing_extra_is_named_when_results_are_shown(results, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(ImportError, match=r"tfscale\[bench\]"):
        bench.run(parse("--from", results("a.json", result()), "--out", tmp_path))


def test_measuring_needs_neither_rich_nor_matplotlib(tmp_path, dense, monkeypatch, capsys):
    monkeypatch.setitem(workloads.WORKLOADS, "dense", dense)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    words = ("--quick", "--workloads", "dense", "--variants", "none", "--steps", 1, "--rounds", 1)
    assert bench.run(parse(*words, "--out", tmp_path)) == 0
    assert "tfscale[bench]" in capsys.readouterr().out
    assert len(list(tmp_path.glob("*-cpu-quick.json"))) == 1


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
@pytest.mark.parametrize("name", ["transformer-graph", "mlp-graph"])
def test_torch_peer_has_as_many_parameters(name):
    workload = workloads.WORKLOADS[name]
    ours = measure.make_case(workload, "none", quick=True)
    peer = measure.make_case(workload, "torch-scaler", quick=True)
    assert peer.parameters == ours.parameters
    assert peer.run(2) > 0
