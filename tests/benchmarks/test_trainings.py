"""Real trainings: what is run, what a bad batch is, what the results say."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from benchmarks.trainings import data, faults, plots, report, trial
from benchmarks.trainings.__main__ import jobs, main, parser
from benchmarks.trainings.cost import approach, largest
from benchmarks.trainings.names import FAULTS, TRAININGS, VARIANTS, parse
from benchmarks.trainings.tasks import TASKS
from benchmarks.trainings.trial import Trial
from benchmarks.trainings.variants import compile_model, precision
from benchmarks.trainings.worker import Job

Json = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Random data in the form of the real one."""
    rng = np.random.default_rng(0)
    text = {p: rng.integers(97, 123, 200, np.uint8) for p in ("train", "valid")}
    data.pack(tmp_path / data.TEXT, text)
    images = {f"{p}_x": rng.integers(0, 256, (20, 28, 28), np.uint8) for p in ("train", "valid")}
    labels = {f"{p}_y": rng.integers(0, 10, 20, np.uint8) for p in ("train", "valid")}
    data.pack(tmp_path / data.IMAGES, images | labels)
    return tmp_path


@pytest.fixture
def results() -> Json:
    """The results of two variants of the classifier, one of which broke."""

    def run(seed: int, **values: Any) -> Json:
        curve = {"val_accuracy": [0.5, 0.75 + seed / 100]}
        return {
            "seed": seed,
            "steps": 8,
            "every": 4,
            "final": curve["val_accuracy"][-1],
            "curve": curve,
            "scale": [[0, 1.0]],
            "skipped": [],
            **values,
        }

    bad = run(0, fault="nan", scale=[[0, 32768.0], [4, 16384.0]], skipped=[3, 7])
    bad["statistics"] = [1.0, None]
    return {
        "environment": {},
        "jobs": {
            "quality/images/wrap": {
                "runs": [run(0), run(2)],
                "gradients_lost": {"end": {"variables_at_1": 0.25, "all_at_1": 0.5}},
            },
            "quality/images/float16": {"runs": [run(0, final=None), run(1)]},
            "faults/images/keras": {"runs": [bad]},
            "timing/images/float32": {"rounds_ms": [4.0, 8.0, 4.0]},
            "timing/images/wrap": {"rounds_ms": [2.0, 5.0, 2.0], "peak_bytes": 2**30},
            "memory/images/wrap": {"batch": 96},
        },
    }


def chosen(*words: str) -> list[Json]:
    args = parser().parse_args([*words, "--data", "d"])
    return jobs(args)


def test_names_choose_the_jobs() -> None:
    assert len(chosen("all")) == 3 * 3 * 6 + 3 * 3
    assert [j["training"] for j in chosen("lm", "--only", "keras,wrap")] == ["lm", "lm"]
    found = chosen("faults", "--only", "images,burst,wrap", "--policy", "wrap(hysteresis=2)")
    assert [j["variant"] for j in found] == ["wrap", "wrap(hysteresis=2)"]
    assert all(j["faults"] == ["burst"] and j["seeds"] == [0] for j in found)


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["all", "--only", "lm,adam"]) == 2
    assert "--only must name some of quality" in capsys.readouterr().err
    assert main(["faults", "--policy", "keras(hysteresis=2)"]) == 2
    assert "Received: 'keras(hysteresis=2)'" in capsys.readouterr().err


def test_variant_may_have_settings() -> None:
    assert parse("wrap") == ("wrap", {})
    assert parse("compile(max_scale=2**20, hysteresis=2)") == (
        "compile",
        {"max_scale": 2**20, "hysteresis": 2},
    )
    for wrong in ("adam", "wrap(2", "float32(hysteresis=2)", "wrap(2)", "wrap(a=b)"):
        with pytest.raises(ValueError, match="must be one of float32"):
            parse(wrong)


def test_missing_data_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="trainings fetch --data"):
        data.load(tmp_path, data.TEXT)


def test_idx_file_keeps_shape(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    sizes = np.array([2, 3], ">u4").tobytes()
    path.write_bytes(gzip.compress(b"\0\0\x08\x02" + sizes + bytes(range(6))))
    np.testing.assert_array_equal(data.read_idx(path), [[0, 1, 2], [3, 4, 5]])
    path.write_bytes(gzip.compress(b"\0\0\x0d\x01" + sizes))
    with pytest.raises(ValueError, match="IDX file of bytes"):
        data.read_idx(path)


@pytest.mark.parametrize("name", TRAININGS)
def test_batches_depend_on_the_seed_alone(name: str, folder: Path) -> None:
    task = TASKS[name](folder, tiny=True)

    def first(seed: int) -> list[np.ndarray]:
        batch = next(iter(task.batches(seed)))
        return [part.numpy() for part in keras.tree.flatten(batch)]

    for one, again in zip(first(3), first(3), strict=True):
        np.testing.assert_array_equal(one, again)
    assert any((one != other).any() for one, other in zip(first(3), first(4), strict=True))
    assert len(list(task.validation())) == task.valid_batches


@pytest.mark.parametrize("name", TRAININGS)
def test_output_is_float32_in_half_precision(name: str, folder: Path) -> None:
    task = TASKS[name](folder, tiny=True)
    with precision("float16"):
        model = task.build()
    assert "float16" in {layer.compute_dtype for layer in model.layers}
    x, y = next(iter(task.batches(0)))
    assert model(x).dtype == "float32"
    assert model(x).shape[: len(y.shape)] == y.shape


def test_bad_batches_come_when_they_should() -> None:
    assert np.flatnonzero(faults.schedule("nan", 1500)).tolist() == list(range(199, 1500, 200))
    assert np.flatnonzero(faults.schedule("outlier", 400)).tolist() == [99, 199, 299, 399]
    assert np.flatnonzero(faults.schedule("burst", 1500)).tolist() == list(range(300, 312))
    assert all(faults.schedule(fault, 8).any() for fault in FAULTS)


@pytest.mark.parametrize("name", ["lm", "images"])
def test_bad_batch_differs_where_it_should(name: str, folder: Path) -> None:
    task = TASKS[name](folder, tiny=True)
    for fault in FAULTS:
        bad = faults.schedule(fault, task.steps)
        clean, spoiled = iter(task.batches(0)), iter(faults.spoiled(task, 0, fault))
        for step in range(task.steps):
            (x, y), (new_x, new_y, weights) = next(clean), next(spoiled)
            np.testing.assert_array_equal(y, new_y)
            samples = [np.isnan(a).reshape(task.batch, -1).any(1).sum() for a in (new_x, weights)]
            assert sum(samples) == (fault == "nan" and bad[step])
            assert (np.max(weights) > 1) == (fault != "nan" and bad[step])
            if not bad[step]:
                np.testing.assert_array_equal(x, new_x)


def test_batch_that_fits_was_seen_to_fit() -> None:
    def read(batch: int) -> int:
        return 1000 + 10 * batch

    first, *_, found = approach(read, 64, 5000, [])
    assert first == [[64, 1640]]
    assert largest(found, 5000) == 400
    assert largest(found, 500) is None
    *_, again = approach(read, 64, 5000, first)
    assert again == found
    assert list(approach(lambda batch: None, 64, 5000, [])) == []


def test_row_has_all_that_was_measured(results: Json) -> None:
    row = report.row(results, "images", "wrap")
    assert row["final"] == pytest.approx((0.76, 0.75, 0.77))
    assert (row["ms"], row["ratio"], row["batch"], row["skipped"]) == (2.0, 0.5, 96, 0)
    assert report.row(results, "images", "float16") == {"final": None, "skipped": 0}
    table = report.tables(results)
    assert "| wrap | 0.7600 (0.7500 to 0.7700) | 0 | 2.00 | 0.50 | 1.00 | 96 |" in table
    assert "| float16 | not finite |" in table
    assert "loses 25.00% of the gradients of the variables and 50.00% of all" in table


def test_pictures_show_what_is_there(results: Json, tmp_path: Path) -> None:
    made = plots.draw(results, tmp_path / "r.json")
    assert [path.name for path in made] == ["r-curves.svg", "r-faults-images.svg"]
    figure = plots.faults(results, "images")
    assert figure is not None
    assert [axes.get_ylabel().split("\n")[0] for axes in figure.axes] == [
        "validation accuracy",
        "loss scale",
        "largest moving statistic",
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the skipped steps
@pytest.mark.parametrize("variant", ["keras", "compile"])
def test_bad_batch_and_moving_statistics(variant: str, folder: Path) -> None:
    task = TASKS["images"](folder, tiny=True)
    tried = Trial(task, variant)
    # A few steps of a small model: eager code takes less than to trace it.
    tried.model.run_eagerly = True
    bad = tried.train(0, faults.spoiled(task, 0, "nan"))
    assert bad["skipped"] == [3, 7]
    scales = [32768.0] if variant == "compile" else [32768.0, 16384.0, 8192.0]
    assert [scale for _, scale in bad["scale"]] == scales
    assert (None in bad["statistics"]) == (variant == "keras")
    first = tried.train(0)
    assert first["final"] is not None
    assert None not in first["statistics"]
    assert first["scale"][0] == [0, 32768.0]
    if variant == "compile":
        assert tried.train(0) == first


@pytest.mark.slow
def test_command_runs_and_continues(folder: Path) -> None:
    out = folder / "r.json"

    def run(*words: str) -> tuple[int, int]:
        command = [sys.executable, "-m", "benchmarks.trainings", "all", "--tiny", "--jobs", "2"]
        command += ["--data", str(folder), "--out", str(out), "--rounds", "1", "--timed-steps", "2"]
        command += ["--only", "lm,wrap,nan,faults,timing", *words]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.returncode, done.stdout.count("begins")

    assert run() == (0, 2)
    assert run() == (0, 0)
    # One more seed is one job to do, for which no time is left.
    assert run("--fault-seeds", "2", "--seconds", "0") == (1, 0)
    found = json.loads(out.read_text())["jobs"]
    assert set(found) == {"faults/lm/wrap", "timing/lm/wrap"}
    assert found["faults/lm/wrap"]["runs"][0]["scale"] == [[0, 32768.0]]
    assert len(found["timing/lm/wrap"]["rounds_ms"]) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the skipped steps
def test_job_does_what_is_left_of_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_eager(*args: Any, **settings: Any) -> None:
        compile_model(*args, **{**settings, "jit_compile": False}, run_eagerly=True)

    monkeypatch.setattr(trial, "compile_model", compile_eager)
    known: dict[str, Json] = {}

    def run(*words: str) -> None:
        given = ("all", "--tiny", "--data", str(folder), "--only", "lm,wrap,quality,memory")
        for job in jobs(parser().parse_args([*given, *words])):
            (folder / "job").write_text(json.dumps(job))
            (folder / "result").write_text(json.dumps(known.get(job["part"], {})))
            Job(folder / "job", folder / "result").run()
            known[job["part"]] = json.loads((folder / "result").read_text())

    run("--seeds", "1")
    first = known["quality"]
    assert first["gradients_lost"]["end"]["step"] == 8
    assert known["memory"]["batch"] is None  # nothing tells the memory of a CPU
    run("--seeds", "2", "--only", "lm,wrap,quality")
    assert [r["seed"] for r in known["quality"]["runs"]] == [0, 1]
    assert known["quality"]["runs"][0] == first["runs"][0]
    assert known["quality"]["runs"][1]["curve"] != first["runs"][0]["curve"]
    assert known["quality"]["gradients_lost"] == first["gradients_lost"]


def test_order_of_variants_is_that_of_the_pictures() -> None:
    assert list(plots.LINES) == list(VARIANTS)
