"""The notebooks run from top to bottom, and what is committed of them reads well."""

import json
import pathlib
import re

import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).parent.parent
NOTEBOOKS = sorted(ROOT.glob("colab/*.ipynb"))
BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"

# The committed run is the long one; every cell of it runs here, with fewer epochs and steps. The
# models that are trained again and again run eagerly: what takes long is to trace them.
SHORTER = {
    "epochs=12": "epochs=1",
    "range(1, 13)": "range(1, 2)",
    "BATCH, EPOCHS = 479, 25": "BATCH, EPOCHS = 479, 1",
    "range(8)": "range(1)",
    "take(1500)": "take(60)",
}
EAGER = {"jit_compile=False,": "run_eagerly=True,"}
# One process runs all notebooks, and none finds what an earlier one left.
FRESH = """import sys
if keras := sys.modules.get("keras"):
    keras.config.set_dtype_policy("float32")
    keras.utils.clear_session()
%reset -f"""

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def check_outputs(notebook):
    """No cell failed or wrote to stderr, and the last one shows a picture."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output.text for output in outputs if output.get("name") == "stderr"]
    assert any("image/png" in output.get("data", {}) for output in code_cells(notebook)[-1].outputs)


def test_there_are_four():
    assert [path.name[0] for path in NOTEBOOKS] == ["1", "2", "3", "4"]


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """Each notebook, run in the same process, since each would take long to import TensorFlow."""
    notebooks = {path: nbformat.read(path, as_version=4) for path in NOTEBOOKS}
    together = nbformat.v4.new_notebook()
    for notebook in notebooks.values():
        cells = code_cells(notebook)
        assert any(long in cell.source for cell in cells for long in SHORTER)
        for cell in cells:
            cell.outputs = []
            for long, short in {**SHORTER, **EAGER}.items():
                cell.source = cell.source.replace(long, short)
        together.cells += [nbformat.v4.new_code_cell(FRESH), *cells]
    client = nbclient.NotebookClient(
        together,
        timeout=500,
        allow_errors=True,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path_factory.mktemp("notebooks"))}},
    )
    with pytest.MonkeyPatch.context() as patched:
        # The package under test, whether or not it is installed.
        patched.setenv("PYTHONPATH", str(ROOT))
        patched.setenv("TF_NUM_INTRAOP_THREADS", "1")
        client.execute()
    return notebooks


@pytest.mark.slow
@every_notebook
def test_a_notebook_runs_and_ends_with_a_picture(path, executed):
    check_outputs(executed[path])


@every_notebook
def test_a_notebook_has_the_outputs_of_one_run(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    check_outputs(notebook)
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1))
    assert path.stat().st_size < 400_000


@every_notebook
def test_the_outputs_name_no_machine(path):
    outputs = [cell.outputs for cell in code_cells(nbformat.read(path, as_version=4))]
    found = re.findall(r"/(?:tmp|root|home|usr|content|Users)/|site-packages", json.dumps(outputs))
    assert not found


@every_notebook
def test_a_notebook_opens_in_colab_and_installs_first(path):
    notebook = nbformat.read(path, as_version=4)
    assert notebook.cells[0].source.startswith(BADGE)
    assert f"/blob/main/colab/{path.name})" in notebook.cells[0].source.splitlines()[0]
    assert "%pip install -q {source}\n" in notebook.cells[1].source


@every_notebook
def test_the_links_between_notebooks_lead_somewhere(path):
    text = "\n".join(c.source for c in nbformat.read(path, 4).cells if c.cell_type == "markdown")
    for target in re.findall(r"\]\((\w+\.ipynb)\)", text):
        assert (path.parent / target).exists(), target
