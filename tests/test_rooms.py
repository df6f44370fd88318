"""Table and picture in docs/how_it_works.md are true: nothing missing, imports only downwards."""

import ast
import importlib.util
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


def drawn():
    """The arrows of the picture, and the numbers of each of its boxes."""
    svg = (ROOT / "docs" / "img" / "rooms.svg").read_text()
    arrows = re.findall(r"<title>(\w+)&#45;&gt;(\w+)</title>", svg)
    labels = re.findall(r">(?:([\d, ]+)  )?(\w+)</text>", svg.replace("&#160;", " "))
    return set(arrows), {name: numbers for numbers, name in labels}


def redraw():
    spec = importlib.util.spec_from_file_location("draw_rooms", ROOT / "docs" / "rooms.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_the_picture_shows_the_imports_of_the_code():
    arrows, numbers = drawn()
    script = redraw()
    edges = {name: set(imports(ROOT / "tfscale" / f"{name}.py")) & set(numbers) for name in numbers}
    mend = "The picture is old: run python docs/rooms.py (it needs Graphviz: apt install graphviz)"
    assert set(numbers) == set(rooms()) - script.LEFT_OUT, mend
    assert all(other in edges[name] for name, other in arrows), mend
    # What is not drawn follows from what is.
    picture = {name: {other for start, other in arrows if start == name} for name in numbers}
    assert script.reached(picture) == script.reached(edges), mend


def test_the_picture_numbers_the_way_of_a_gradient_as_the_page_does():
    _, numbers = drawn()
    assert {name: n for name, n in numbers.items() if n} == redraw().stations()
