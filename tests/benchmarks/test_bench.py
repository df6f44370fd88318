"""The command measures, and shows what it or an earlier run has measured."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.report import chart, load
from benchmarks.variants import BASELINES, VARIANTS
from benchmarks.workloads import WORKLOADS, Workload
from tfscale import __main__ as commands

Make = Callable[..., dict[str, Any]]
Write = Callable[..., Path]


def bench(*words: Any) -> int:
    return main([str(word) for word in words])


def test_table_shows_ratio_quartiles_and_failures(
    result: Make, results: Write, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    good = result(ratio_quartiles=(1.4, 1.75))
    path = results("a.json", good, result(variant="tfscale", ms=None, ratio=None, error="x"))
    assert bench("--from", path, "--out", tmp_path) == 1
    out = capsys.readouterr().out
    assert "1.500 (1.400 to 1.750)" in out
    assert "median of per-round ratios" in out
    assert "failed" in out
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_later_file_replaces_a_pair(result: Make, results: Write, tmp_path: Path) -> None:
    old = results("a.json", result(ratio=1.5), result(variant="tfscale", ratio=1.1))
    new = results("b.json", result(ratio=1.7))
    rows = {r["variant"]: r["ratio"] for r in load([old, new])["results"]}
    assert rows == {"keras": 1.7, "tfscale": 1.1}
    more = results("c.json", result(workload="v"), result(variant="torch"))
    loaded = load([old, more])["results"]
    assert [r["workload"] for r in loaded] == ["w", "w", "w", "v"]
    assert bench("--from", old, new, "--out", tmp_path / "out") == 0
    assert load([tmp_path / "out" / "b.json"])["results"] == load([old, new])["results"]


def test_variants_have_one_order(result: Make, results: Write) -> None:
    path = results("r.json", *[result(variant=v) for v in ("torch", "mine", "tfscale", "none")])
    shown = [r["variant"] for r in load([path])["results"]]
    assert shown == ["none", "tfscale", "torch", "mine"]


def test_results_of_two_cards_are_not_mixed(
    results: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = results("a.json", card="H100"), results("b.json")
    with pytest.raises(ValueError, match=r"agree on `card`.*H100.*none"):
        load(list(paths))
    assert bench("--from", *paths) == 2
    assert "agree on `card`" in capsys.readouterr().err


@pytest.mark.parametrize("text", [None, "no JSON", "[]"])
def test_a_file_without_results_is_named(
    text: str | None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "a.json"
    if text is not None:
        path.write_text(text)
    assert bench("--from", path) == 2
    error = capsys.readouterr().err
    assert error == f"--from must name files that `python -m benchmarks` wrote. Received: {path}\n"


def test_chart_has_a_panel_for_each_workload(result: Make, results: Write) -> None:
    rows = [result(), result(variant="none", ratio=1.0), result(workload="v", ratio=1.2)]
    figure = chart(load([results("a.json", *rows)]))
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["w", "v"]
    assert [len(axes.patches) for axes in figure.axes] == [1, 1]


def test_cut_bar_shows_its_figure(result: Make, results: Write) -> None:
    rows = [result(ratio=9.7, ratio_quartiles=(9.0, 11.0)), result(variant="tfscale", ratio=1.2)]
    [axes] = chart(load([results("a.json", *rows)])).axes
    assert [bar.get_width() for bar in axes.patches] == [2.5, 1.2]
    assert [text.get_text() for text in axes.texts] == ["9.70, cut", "1.20"]
    assert axes.get_xlim()[1] < 3


def test_chart_of_nothing_is_no_error(results: Write) -> None:
    assert chart(load([results("a.json")])).axes == []


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--quick", "--workloads", "transformer") == 2
    assert "--workloads must name some of transformer-xla" in capsys.readouterr().err


def test_list_names_workloads_and_variants(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["bench", "--list"]) == 0
    assert {*WORKLOADS, *VARIANTS, *BASELINES} <= set(capsys.readouterr().out.split())


def test_missing_extra_is_named(
    result: Make,
    results: Write,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert bench("--from", results("a.json", result()), "--out", tmp_path) == 1
    assert "pip install 'tfscale[bench]'" in capsys.readouterr().err


def test_measuring_needs_no_extra(
    tmp_path: Path,
    dense: Workload,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(WORKLOADS, "dense", dense)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    words = ("--quick", "--workloads", "dense", "--variants", "none", "--steps", 1, "--rounds", 1)
    assert bench(*words, "--out", tmp_path) == 0
    out = capsys.readouterr().out
    assert "median of per-round ratios (quartiles)" in out
    assert "tfscale[bench]" in out
    assert len(list(tmp_path.glob("*-cpu-quick.json"))) == 1


def test_command_needs_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "__file__", str(tmp_path / "tfscale" / "__main__.py"))
    assert commands.main(["bench", "--list"]) == 1
    error = capsys.readouterr().err
    assert "tfscale bench: this command needs a checkout of the repository" in error
