"""Every example on the pages runs, in order, and prints what the page says; tables are true."""

import importlib.util
import multiprocessing
import os
import pathlib
import re
import runpy

import pytest

import tfscale

ROOT = pathlib.Path(__file__).parent.parent
BLOCK = re.compile(
    r"^```python(?! no-run)(?: needs (\w+))?[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
PRINTS = re.compile(r"^```text prints\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [
    page
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
    if BLOCK.search(page.read_text())
]
# Forked from one that has imported everything and done nothing.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tensorflow", "keras", "tfscale"])


def script(text: str) -> str:
    """The page with everything blank but its examples, so that line numbers are those of the page.

    A block marked "python no-run" is shown only, one marked "python needs NAME" is run if there is
    such a package.
    """
    lines = [""] * text.count("\n")
    for block in BLOCK.finditer(text):
        if block[1] and not importlib.util.find_spec(block[1]):
            continue
        first = text.count("\n", 0, block.start(2))
        code = block[2].splitlines()
        lines[first : first + len(code)] = code
    return "\n".join(lines) + "\n"


def prints(text: str) -> list[str]:
    """The blocks marked "text prints": what the page says that its examples print."""
    return [block[1] for block in PRINTS.finditer(text)]


def run_script(path: pathlib.Path) -> None:
    """Runs a script in its folder and writes beside it what it prints, and its errors."""
    os.environ["MPLBACKEND"] = "Agg"
    os.chdir(path.parent)
    for stream, suffix in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(path.with_suffix(suffix), os.O_WRONLY | os.O_CREAT), stream)
    runpy.run_path(path.name, run_name="__main__")


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_of_a_page_run(page, tmp_path):
    path = tmp_path / page.with_suffix(".py").name
    path.write_text(script(page.read_text()))
    # In a process of its own, as a reader would: pages set policies, strategies and seeds.
    process = PROCESSES.Process(target=run_script, args=[path])
    process.start()
    process.join(300)
    process.kill()
    assert process.exitcode == 0, path.with_suffix(".err").read_text()[-3000:]
    printed = path.with_suffix(".out").read_text()
    for promised in prints(page.read_text()):
        assert promised in printed


def test_line_numbers_are_those_of_the_page():
    page = (
        "# Title\n\n```python\na = 1\n```\ntext\n```python no-run\nb\n```\n"
        "```python needs nothing_like_it\nb\n```\n```python needs keras\nc = a\n```\n"
    )
    assert script(page).splitlines() == ["", "", "", "a = 1", *[""] * 9, "c = a", ""]


def tables():
    """The script that writes the tables of step times."""
    spec = importlib.util.spec_from_file_location("write_tables", ROOT / "docs" / "tables.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md", "docs/does_it_work.md"])
def test_step_times_are_those_of_the_result_files(page):
    text = (ROOT / page).read_text()
    assert tables().written(page) == text, "Step times are old: run python docs/tables.py"


def test_every_public_name_is_on_the_page_of_the_api():
    listed = set(
        re.findall(r"^::: tfscale\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    )
    assert listed == set(tfscale.__all__) - {"__version__"}


def test_the_page_of_lint_lists_its_rules():
    page = (ROOT / "docs/profile.md").read_text()
    table = page.split("### The rules of `lint`")[1].split("\n\n")[1]
    listed = re.findall(r"^\|[^|]*\| `([a-z0-9-]+)`", table, re.MULTILINE)
    code = "".join(path.read_text() for path in ROOT.glob("tfscale/diagnostics/lint*.py"))
    assert set(listed) == set(re.findall(r'Finding\(\s*"([a-z0-9-]+)"', code))
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("recipes", "checkpoint resume accumulation"),
        ("policies", "fp16 bf16 t4"),
        ("install", "colab kaggle wsl2 mac"),
        ("faq", "faq nan loss slower get_scaled_loss"),
    ],
)
def test_a_page_contains_the_words_people_search_for(page, words):
    lines = (ROOT / "docs" / f"{page}.md").read_text().lower().splitlines()
    found = " ".join(line for line in lines if line.startswith(("#", "|")))
    assert set(words.split()) <= set(re.findall(r"\w+", found))


def test_readme_first_page_and_notebook_begin_alike():
    first = BLOCK.search((ROOT / "README.md").read_text())[2]
    assert BLOCK.search((ROOT / "docs/index.md").read_text())[2] == first
    lines = [line.split("(")[0] for line in first.splitlines() if re.search(r"# [123]\. ", line)]
    assert len(lines) == 3
    notebook = (ROOT / "colab/1_quick_start.ipynb").read_text()
    assert all(f"{line}(" in notebook for line in lines)
