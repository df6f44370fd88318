"""The project's home and version have one place each, and links work in a checkout."""

import importlib.util
import pathlib
import re

import pytest

import tfscale

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("[bc]*/README.md")]
MENTION = re.compile(r"github\.com/[\w.-]+/tfscale\b|\bgithub/[\w.-]+/tfscale\b|\w+\.github\.io")


def load_home():
    """The script that writes home and version."""
    spec = importlib.util.spec_from_file_location("home", ROOT / "docs" / "home.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


home = load_home()


@pytest.mark.parametrize("file", home.places())
def test_home_and_version_are_those_of_the_project(file):
    assert home.written(file) == (ROOT / file).read_text(), "run python docs/home.py"
    assert home.version() == tfscale.__version__


def test_no_other_file_mentions_the_home():
    kinds = {".cff", ".ipynb", ".md", ".py", ".toml", ".yml"}
    folders = ["", "benchmarks", "colab", "docs", "tests", "tfscale", ".github"]
    paths = {p for f in folders for p in (ROOT / f).glob("**/*" if f else "*") if p.suffix in kinds}
    found = set()
    for path in paths - {pathlib.Path(__file__)}:
        file, text = path.relative_to(ROOT).as_posix(), path.read_text()
        for pattern in home.places().get(file, ()):
            text = re.sub(pattern, "", text)
        if MENTION.search(text):
            found.add(file)
    assert found == {"pyproject.toml"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_to_files(page):
    for _, _, target in home.LINK.findall(page.read_text()):
        assert (page.parent / target.partition("#")[0]).exists(), target


def test_links_out_of_the_site_lead_to_the_home(monkeypatch):
    urls = {"Repository": "https://github.com/someone/else", "Documentation": ""}
    monkeypatch.setattr(home, "urls", lambda: urls)
    page = "[a](../LICENSE) ![b](../docs/b.png) [c](../colab/c.ipynb)\n[d](e.md#f) [g](https://h)"
    repository = "https://github.com/someone/else"
    assert home.absolute(page, leaving="../").split() == [
        f"[a]({repository}/blob/main/LICENSE)",
        f"![b]({repository}/raw/main/docs/b.png)",
        "[c](https://colab.research.google.com/github/someone/else/blob/main/colab/c.ipynb)",
        "[d](e.md#f)",
        "[g](https://h)",
    ]
