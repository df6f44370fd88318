"""Import is cheap, every public name is there, and what is said in several places is said alike."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

import tfscale

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "tfscale"
PROJECT = (ROOT / "pyproject.toml").read_text()


def new_modules(code):
    """What `code` imports that Keras and TensorFlow have not, in a process of its own."""
    script = (
        "import sys, keras, tensorflow\n"
        "before = set(sys.modules)\n"
        f"{code}\n"
        "print(*sorted(set(sys.modules) - before), sep='\\n')"
    )
    run = [sys.executable, "-c", script]
    return subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.slow
def test_import_brings_nothing_but_what_trains():
    modules = new_modules("import tfscale")
    others = {name.split(".")[0] for name in modules} - {"keras", "tensorflow", "tfscale"}
    assert others <= set(sys.stdlib_module_names)  # no matplotlib, rich, sklearn, tensorboard
    ours = {name.split(".")[1] for name in modules if name.startswith("tfscale.")}
    assert not ours & {"callbacks", "diagnostics", "cli", "__main__"}


def test_every_public_name_is_there_and_listed():
    assert set(tfscale.__all__) <= set(dir(tfscale))
    for name in tfscale.__all__:
        assert getattr(tfscale, name) is not None
    with pytest.raises(AttributeError, match="module 'tfscale' has no attribute 'prophile'"):
        tfscale.prophile  # noqa: B018


def test_type_checkers_know_names_imported_later():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = (n for n in tree.body if isinstance(n, ast.If) and n.test.id == "TYPE_CHECKING")
    checked = {
        statement.module.partition(".")[2]: [alias.name for alias in statement.names]
        for statement in block.body
    }
    assert checked == tfscale._LAZY
    assert (PACKAGE / "py.typed").exists()


def test_no_module_hides_a_public_name():
    # The import of `tfscale.name` would put the module in the place of what is called so.
    assert not {path.stem for path in PACKAGE.iterdir()} & set(tfscale.__all__)


def test_the_oldest_tested_versions_are_those_promised():
    oldest = dict(re.findall(r"^(\S+)==(\S+)\.\*$", (ROOT / ".ci/oldest.txt").read_text(), re.M))
    assert set(oldest) == {"keras", "tensorflow-cpu"}
    for package, version in oldest.items():
        bounds = re.findall(rf'"{package}>=([\d.]+)"', PROJECT)
        assert bounds == [version]
    assert f"tensorflow[and-cuda]>={oldest['tensorflow-cpu']}" in PROJECT
    page = (ROOT / "docs/install.md").read_text()
    assert f"TensorFlow {oldest['tensorflow-cpu']} and Keras {oldest['keras']}" in page


def test_only_extras_called_so_bring_a_tensorflow():
    extras = PROJECT.split("[project.optional-dependencies]\n")[1].split("\n[project.scripts]")[0]
    names = re.findall(r'^(\w+) = .*"[^"\n]*(?:tensorflow|\bcpu\b|\bgpu\b)', extras, re.M)
    assert names == ["cpu", "gpu"]
