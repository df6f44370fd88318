"""Writes the project's home and version into the files that name them: `python docs/home.py`.

The home is `project.urls` in `pyproject.toml`, the version is in `tfscale/_version.py`. README and
pages have relative links. `hooks.py` turns those that leave the site into links to the home;
`setup.py` does so for the README on the package index.
"""

from __future__ import annotations

import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!https?:|#)([^)\s]+)\)")


def urls() -> dict[str, str]:
    """The table `project.urls`."""
    table = (ROOT / "pyproject.toml").read_text().split("[project.urls]\n")[1].split("\n\n")[0]
    return dict(re.findall(r'^(\w+) = "(.*)"$', table, re.MULTILINE))


def version() -> str:
    text = (ROOT / "tfscale" / "_version.py").read_text()
    return re.findall(r'^__version__ = "(.*)"$', text, re.MULTILINE)[0]


def name() -> str:
    """Owner and repository."""
    return urls()["Repository"].removeprefix("https://github.com/")


def address(path: str, is_image: bool = False) -> str:
    """The address of a file of the checkout; a notebook opens in Colab."""
    if path.endswith(".ipynb"):
        return f"https://colab.research.google.com/github/{name()}/blob/main/{path}"
    return f"{urls()['Repository']}/{'raw' if is_image else 'blob'}/main/{path}"


def absolute(markdown: str, leaving: str = "") -> str:
    """The text with links to the home instead of relative links that start with `leaving`."""

    def changed(found: re.Match[str]) -> str:
        mark, text, target = found.groups()
        if not target.startswith(leaving):
            return found[0]
        return f"{mark}{text}({address(target.removeprefix(leaving), bool(mark))})"

    return LINK.sub(changed, markdown)


def places() -> dict[str, dict[str, str]]:
    """For each file that names home or version: patterns, and their replacements."""
    colab = address("X.ipynb").removesuffix("/blob/main/X.ipynb")
    install = {r"git\+https://[^\s\"'\\]+": f"git+{urls()['Repository']}"}
    badge = {r"https://colab\.research\.google\.com/github/[\w.-]+/[\w.-]+": colab}
    notebooks = [f"colab/{path.name}" for path in sorted((ROOT / "colab").glob("*.ipynb"))]
    return {
        "CITATION.cff": {
            r"(?m)^version: .*$": f"version: {version()}",
            r"(?m)^repository-code: .*$": f"repository-code: {urls()['Repository']}",
            r"(?m)^url: .*$": f"url: {urls()['Documentation']}",
        },
        "docs/install.md": install,
        **{notebook: {**install, **badge} for notebook in notebooks},
    }


def written(file: str) -> str:
    """The text of a file with the current home and version."""
    text = (ROOT / file).read_text()
    for pattern, new in places()[file].items():
        text, times = re.subn(pattern, lambda _, new=new: new, text)
        if not times:
            raise ValueError(f"{file} must name {new}, as {pattern}. Found: nothing like it")
    return text


if __name__ == "__main__":
    for file in places():
        (ROOT / file).write_text(written(file))
