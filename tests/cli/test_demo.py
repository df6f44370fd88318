"""The command line and its demo."""

import importlib.util
import io
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tfscale import __version__, load_tensorflow
from tfscale.__main__ import main
from tfscale.cli import demo, demo_training


def tfscale(*options, cwd):
    """Runs `python -m tfscale` in a process of its own, without a terminal."""
    set_by_the_command = {"TF_CPP_MIN_LOG_LEVEL", "TF_ENABLE_ONEDNN_OPTS"}
    environment = {name: v for name, v in os.environ.items() if name not in set_by_the_command}
    # The package under test, wherever the process starts and whether or not it is installed.
    environment["PYTHONPATH"] = str(Path(demo.__file__).parents[2])
    environment["TF_NUM_INTRAOP_THREADS"] = "1"
    return subprocess.run(
        [sys.executable, "-m", "tfscale", *options],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("option", "output"), [("--version", f"tfscale {__version__}\n"), ("--help", "tfscale[cpu]")]
)
def test_version_and_help_need_no_tensorflow(option, output, tmp_path):
    for module in ("keras", "tensorflow"):
        (tmp_path / f"{module}.py").write_text("raise AssertionError('not needed')")
    done = tfscale(option, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert output in done.stdout


def test_without_tensorflow_the_extras_are_named(capsys, monkeypatch):
    found = importlib.util.find_spec
    hidden = lambda name: None if name == "tensorflow" else found(name)  # noqa: E731
    monkeypatch.setattr("importlib.util.find_spec", hidden)
    with pytest.raises(ImportError, match=r"'tfscale\[cpu\]', or .* 'tfscale\[gpu\]'"):
        load_tensorflow()
    assert main(["lint", "model.keras"]) == 1
    assert "tfscale lint: tfscale needs TensorFlow" in capsys.readouterr().err


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    assert {"bench", "demo", "lint", "profile"} <= set(capsys.readouterr().out.split())


def test_help_of_a_command_names_its_options(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert all(option in out for option in ("--seed", "--epochs", "--output", "float16"))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["dmeo"], "invalid choice: 'dmeo'"),
        (["demo", "--epoch-count", "3"], "unrecognized arguments: --epoch-count 3"),
        (["demo", "--epochs", "-3"], "--epochs: must be a whole number, at least 1. Received: -3"),
        (["demo", "--epochs", "0"], "--epochs: must be a whole number, at least 1. Received: 0"),
        (["demo", "--epochs", "two"], "at least 1. Received: two"),
        (["demo", "--seed", "-1"], "--seed: must be a whole number from 0 to 2**32 - 1"),
        (["demo", "--seed", str(2**32)], "--seed: must be a whole number from 0 to 2**32 - 1"),
        (["demo", "--output", "nowhere/a.png"], "nowhere does not. Received: nowhere/a.png"),
        (["demo", "--output", "folder.png"], "must name a .png file. Received: folder.png"),
        (["demo", "--output", "a.txt"], "must name a .png file. Received: a.txt"),
    ],
)
def test_wrong_option_ends_with_2_and_a_sentence(options, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(SystemExit) as stop:
        main(options)
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err


def test_missing_package_is_named_without_tensorflow(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name != "sklearn" and found(name))
    assert main(["demo"]) == 1
    error = capsys.readouterr().err
    assert "sklearn" in error
    assert "pip install 'tfscale[demo]'" in error


@pytest.mark.slow
def test_seed_decides_the_run():
    def accuracy(seed):
        runs = [demo_training.Run("float32", "float32")]
        demo.train_all(runs, seed, 1, Console(file=io.StringIO()))
        return runs[0].accuracy

    assert accuracy(3) == accuracy(3) != accuracy(4)


def test_picture_tells_runs_apart_without_colour():
    runs = demo_training.four_runs()
    for number, one in enumerate(runs):
        one.accuracy = [0.1, 0.5, 0.9 + 0.001 * number]
    axes = demo.draw(runs).axes[0]
    assert {text.get_text() for text in axes.texts} == {f"{one.name}: 90%" for one in runs}
    heights = sorted(text.get_position()[1] for text in axes.texts)
    assert all(high - low > 0.05 for low, high in itertools.pairwise(heights))
    styles = {
        (line.get_linestyle(), line.get_marker(), line.get_linewidth()) for line in axes.lines
    }
    assert len(styles) == len(runs)


@pytest.mark.slow
def test_demo_shows_that_float16_needs_scaling(tmp_path):
    done = tfscale("demo", "--epochs", "10", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "no line of TensorFlow's log"
    assert done.stdout.startswith("A network learns from gradients: ")
    assert re.search(r"with loss scaling for \d+%\.$", " ".join(done.stdout.split()))
    assert "\x1b" not in done.stdout, "colours and cursor movements belong on a terminal"
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert (tmp_path / "tfscale-demo.png").read_bytes().startswith(b"\x89PNG")

    rows = re.findall(r"│ (.+?) +│ +([\d.]+)% │ +(\S+) │ +(\S+) │ +([\d.]+)% │", done.stdout)
    names = [row[0] for row in rows]
    assert names == ["float32", "float16, unscaled", "float16, tfscale", "bfloat16"]
    accuracy = {row[0]: float(row[1]) for row in rows}
    lost = {row[0]: float(row[4]) for row in rows}
    assert abs(accuracy["float16, tfscale"] - accuracy["float32"]) < 5
    assert accuracy["float16, unscaled"] < accuracy["float32"] - 15
    assert lost["float32"] == 0
    assert lost["float16, unscaled"] > 20
    assert lost["float16, tfscale"] < 5
    assert lost["bfloat16"] < 1
