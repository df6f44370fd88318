"""The table of modules in docs/how_it_works.md is true: nothing missing, imports only downwards."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def rooms():
    """Names of the modules in the order of the table, and the row of each."""
    page = (ROOT / "docs" / "how_it_works.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    return {
        name: number for number, row in enumerate(rows) for name in re.findall(r"`(\w+)\.py`", row)
    }


def imports(path):
    """The modules of the package that a module imports while it is imported itself."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tfscale":
            if node.module == "tfscale":
                yield from (alias.name for alias in node.names)
            else:
                yield node.module.split(".")[1]


def test_every_module_is_in_the_table():
    modules = {path.stem for path in (ROOT / "tfscale").glob("*.py")} - {"_version"}
    assert set(rooms()) == modules


def test_imports_go_only_downwards():
    known = rooms()
    for path in (ROOT / "tfscale").glob("*.py"):
        for other in imports(path):
            if other in known and path.stem != "_version":
                assert known[other] >= known[path.stem], f"{path.stem} imports {other}"


def test_modules_of_one_row_do_not_import_each_other_in_a_circle():
    known = rooms()
    edges = {p.stem: set(imports(p)) & set(known) for p in (ROOT / "tfscale").glob("*.py")}
    done: set = set()
    while len(done) < len(edges):
        ready = {name for name in edges if name not in done and edges[name] <= done}
        assert ready, f"circle among {set(edges) - done}"
        done |= ready
