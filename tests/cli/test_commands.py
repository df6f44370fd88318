"""`python -m tfscale profile` and `python -m tfscale lint`, and what they say about bad input."""

import json
import shutil
import zipfile

import keras
import numpy as np
import pytest

from tfscale import _compat
from tfscale.__main__ import main
from tfscale.diagnostics.profile_report import Profile

pytestmark = pytest.mark.skipif(_compat.KERAS < (3, 12), reason="such a Keras is refused")


def model(*layers, compiled=True, dtype="float32"):
    net = keras.Sequential(
        [keras.Input((4,)), *layers, keras.layers.Dense(1, dtype=dtype, name="out")], name="net"
    )
    if compiled:
        net.compile("adam", loss="mse", auto_scale_loss=False)
    return net


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    path = tmp_path_factory.mktemp("files")
    model().save(path / "model.keras")
    model(compiled=False).save(path / "uncompiled.keras")
    x, y = np.ones((10, 4), "float32"), np.zeros((10, 1), "float32")
    arrays = {
        "batch": {"x": x, "y": y},
        "weighted": {"x": x, "y": y, "sample_weight": np.full(10, 2.0**-30, "float32")},
        "no_y": {"x": x, "target": y},
        "lengths": {"x": x, "y": y[:7]},
        "wide": {"x": np.ones((10, 5), "float32"), "y": y},
        "wide_y": {"x": x, "y": np.zeros((10, 2, 3), "float32")},
        "scalar": {"x": 1.0, "y": 2.0},
        "empty": {"x": x[:0], "y": y[:0]},
        "objects": {"x": np.array([{}] * 10), "y": y},
        "nan": {"x": x * np.nan, "y": y},
    }
    for name, content in arrays.items():
        np.savez(path / f"{name}.npz", **content)
    (path / "text.keras").write_text("no model")
    (path / "model.h5").write_text("no model")
    (path / "text.npz").write_text("no arrays")
    return path


@pytest.fixture
def folder(files, tmp_path, monkeypatch):
    """Files to choose from, in the current folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture
def _no_picture(monkeypatch):
    """For tests of the text: a picture takes most of the time of a profile."""
    monkeypatch.setattr(Profile, "plot", lambda profile, path: None)


def test_profile_prints_table_and_proposal_and_draws(folder, capsys):
    options = ["--data", "batch.npz", "--steps", "2", "--batch-size", "4", "--output", "out.png"]
    assert main(["profile", "model.keras", *options]) == 0
    out = capsys.readouterr().out
    assert "Measuring 2 batches of 4" in out
    assert "Gradients of net: 2 batches, measured in float32" in out
    assert "out/kernel" in out
    assert "Proposal: NoScaling(). If computed in float16" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out, "colours and cursor movements belong on a terminal"
    assert (folder / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("_no_picture")
@pytest.mark.parametrize("compiled", [False, True])
def test_profile_takes_weights_and_the_named_loss(folder, capsys, compiled):
    def own_loss(y, predicted):
        return keras.ops.abs(y - predicted)

    net = model(compiled=False)
    if compiled:
        net.compile("adam", loss=own_loss)
    net.save("own.keras")
    options = ["--data", "weighted.npz", "--loss", "mse"]
    assert main(["profile", "own.keras", *options]) == 0
    assert "Proposal: Static(2**" in capsys.readouterr().out, "the weights make gradients tiny"


def test_profile_shows_the_twenty_that_lose_most(folder, capsys):
    model(*[keras.layers.Dense(4, name=f"layer_{i}") for i in range(7)]).save("deep.keras")
    assert main(["profile", "deep.keras", "--data", "batch.npz"]) == 0
    out = capsys.readouterr().out
    # 8 kernels, 8 biases and the outputs of 7 layers; that of the model should stay in float32.
    assert "the 20 of 23 gradients that lose most" in " ".join(out.split())
    shown = [line for line in out.splitlines() if "layer_" in line or line.startswith(" out/")]
    assert len(shown) == 20
    assert (folder / "tfscale-profile.png").exists()


@pytest.mark.usefixtures("_no_picture")
def test_profile_takes_several_inputs_and_outputs(folder, capsys):
    a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
    outputs = [keras.layers.Dense(1, name="c")(a), keras.layers.Dense(1, name="d")(b)]
    net = keras.Model({"a": a, "b": b}, outputs)
    net.compile("adam", loss=["mse", "mse"])
    net.save("net.keras")
    x, y = np.ones((10, 4), "float32"), np.ones((10, 1), "float32")
    np.savez("named.npz", a=x, b=x, c=y, d=y)
    np.savez("lacking.npz", a=x, c=y, d=y)
    np.savez("wide.npz", a=x, b=y, c=y, d=y)
    assert main(["profile", "net.keras", "--data", "named.npz"]) == 0
    assert main(["profile", "net.keras", "--data", "lacking.npz"]) == 2
    error = capsys.readouterr().err
    assert "x and y, or one for each of a, b, c, d, and sample_weight" in error
    assert "without x, but with a, c, d" in error
    assert main(["profile", "net.keras", "--data", "wide.npz"]) == 2
    assert "Received: x a (10, 4) float32, x b (10, 1) float32, y 0" in capsys.readouterr().err


@pytest.mark.usefixtures("_no_picture")
def test_profile_of_the_demo_needs_no_file(folder, capsys):
    assert main(["profile", "demo", "--steps", "1", "--batch-size", "2"]) == 0
    out = capsys.readouterr().out
    assert "Gradients of demo: 1 batch, measured in float16" in out
    assert "Proposal: Static(2**" in out


@pytest.mark.parametrize(
    ("options", "expected", "received"),
    [
        (["a.keras", "--data", "batch.npz"], "must be a file that exists", "a.keras"),
        (["model.h5", "--data", "batch.npz"], "model.save('model.keras')", "model.h5"),
        (["text.keras", "--data", "batch.npz"], "model.save('model.keras')", "text.keras"),
        (["uncompiled.keras", "--data", "batch.npz"], "add --loss", "no --loss"),
        (["model.keras"], "--data must name an .npz file", "no --data"),
        (["model.keras", "--data", "a.npz"], "--data must be a file that exists", "a.npz"),
        (["model.keras", "--data", "text.npz"], "numpy.savez(", "text.npz"),
        (["model.keras", "--data", "no_y.npz"], "arrays x and y", "without y, but with x, target"),
        (["model.keras", "--data", "lengths.npz"], "same length", "y (7, 1) float32"),
        (["model.keras", "--data", "scalar.npz"], "same length", "x () float64"),
        (["model.keras", "--data", "empty.npz"], "at least one", "x (0, 4) float32"),
        (["model.keras", "--data", "objects.npz"], "arrays of numbers", "objects.npz"),
        (["model.keras", "--data", "wide.npz"], "x (None, 4)", "x (10, 5) float32"),
        (["model.keras", "--data", "wide_y.npz"], "y ((None, 1))", "y (10, 2, 3) float32"),
        (["model.keras", "--data", "nan.npz"], "finite gradients", "find_nonfinite"),
        (["model.keras", "--data", "batch.npz", "--loss", "msee"], "name of a Keras loss", "msee"),
        (["demo", "--data", "batch.npz"], "demo brings its own data", "batch.npz"),
    ],
)
def test_bad_input_ends_with_status_2_and_one_sentence(folder, capsys, options, expected, received):
    assert main(["profile", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tfscale profile: ")
    assert error.count("\n") == 1
    assert all(noise not in error for noise in ("{{", "\x1b", "[Op:", "encountered"))
    advice, _, got = error.partition("Received")
    assert expected in advice
    assert received in got
    assert not (folder / "tfscale-profile.png").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--output", "nowhere/a.png"], "nowhere does not. Received: nowhere/a.png"),
        (["--output", "a.txt"], "must name a .png file. Received: a.txt"),
        (["--steps", "0"], "--steps: must be a whole number, at least 1. Received: 0"),
    ],
)
def test_wrong_option_ends_before_anything_is_read(capsys, options, sentence):
    with pytest.raises(SystemExit) as stop:
        main(["profile", "model.keras", *options])
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err


def test_missing_package_is_named_with_its_extra(folder, capsys, monkeypatch):
    missing = lambda name: name == "tensorflow" or None  # noqa: E731
    monkeypatch.setattr("importlib.util.find_spec", missing)
    assert main(["profile", "model.keras", "--data", "batch.npz"]) == 1
    assert "matplotlib, rich, not installed here; install with: pip install 'tfscale[bench]'" in (
        capsys.readouterr().err
    )


def test_lint_status_says_whether_there_are_findings(folder, capsys):
    assert main(["lint", "model.keras"]) == 0
    assert capsys.readouterr().out == "net: no finding\n"
    model(dtype="mixed_float16").save("half.keras")
    assert main(["lint", "half.keras"]) == 1
    out = capsys.readouterr().out
    assert "[no-loss-scaling]" in out
    assert "tfscale.wrap(optimizer)" in out


def test_a_model_that_keras_scales_has_no_finding(folder, capsys):
    keras.config.set_dtype_policy("mixed_float16")
    net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, dtype="mixed_float16")])
    net.add(keras.layers.Activation("linear", dtype="float32"))
    net.compile("adam", loss="mse")
    net.save("scaled.keras")
    keras.config.set_dtype_policy("float32")
    assert main(["lint", "scaled.keras"]) == 0, capsys.readouterr().out


def test_lint_of_bad_input_ends_with_status_2(folder, capsys):
    assert main(["lint", "a.keras"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tfscale lint: MODEL must be a file that exists")
    assert error.count("\n") == 1


def test_file_names_the_class_it_needs_and_the_call(folder, capsys):
    class Doubled(keras.layers.Layer):
        def call(self, x):
            return 2 * x

    model(Doubled()).save("own.keras")
    assert main(["lint", "own.keras"]) == 2
    error = capsys.readouterr().err
    assert "call tfscale.lint(model). Received: own.keras" in error
    assert "Could not locate class 'Doubled'" in error


@pytest.mark.parametrize("kind", ["class", "function"])
def test_no_module_that_a_file_names_is_imported(folder, capsys, monkeypatch, kind):
    monkeypatch.syspath_prepend(folder)
    named = {"class_name": "X", "config": {}} if kind == "class" else {"class_name": "function"}
    loss = {"module": "foreign", "registered_name": "X", "config": "x", **named}
    with zipfile.ZipFile("model.keras") as old, zipfile.ZipFile("bad.keras", "w") as new:
        config = json.loads(old.read("config.json"))
        config["compile_config"]["loss"] = loss
        new.writestr("config.json", json.dumps(config))
        for name in ("metadata.json", "model.weights.h5"):
            new.writestr(name, old.read(name))
    (folder / "foreign.py").write_text("raise SystemExit")
    assert main(["lint", "bad.keras"]) == 2
    assert "Keras says: Could not locate" in capsys.readouterr().err


def test_a_keras_that_runs_what_a_file_names_is_refused(folder, capsys, monkeypatch):
    monkeypatch.setattr(keras, "version", lambda: "3.11.3")
    assert main(["lint", "model.keras"]) == 2
    assert "needs Keras 3.12 or newer" in capsys.readouterr().err
