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
        name: number
        for number, row in enumerate(rows)
        for name in re.findall(r"`(\w+)(?:\.py|/)`", row)
    }


def modules():
    """From the name of a module or folder of the package to its files."""
    package = ROOT / "tfscale"
    folders = {path.parent for path in package.glob("*/__init__.py")}
    files = {path.stem: [path] for path in package.glob("*.py")}
    return {**files, **{folder.name: sorted(folder.rglob("*.py")) for folder in folders}}


def imports(name):
    """The other modules of the package that a module imports while it is imported itself."""
    nodes = [node for path in modules()[name] for node in ast.parse(path.read_text()).body]
    found = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tfscale":
            _, *inside = node.module.split(".")
            found |= set(inside[:1]) or {alias.name for alias in node.names}
    return found - {name}


def test_every_module_is_in_the_table():
    assert set(rooms()) == set(modules()) - {"_version"}


def test_imports_go_only_downwards():
    known = rooms()
    for name in known:
        for other in imports(name) & set(known):
            assert known[other] >= known[name], f"{name} imports {other}"


def test_modules_of_one_row_do_not_import_each_other_in_a_circle():
    known = rooms()
    edges = {name: imports(name) & set(known) for name in known}
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
    edges = {name: imports(name) & set(numbers) for name in numbers}
    mend = "The picture is old: run python docs/rooms.py (it needs Graphviz: apt install graphviz)"
    assert set(numbers) == set(rooms()) - script.LEFT_OUT, mend
    assert all(other in edges[name] for name, other in arrows), mend
    # What is not drawn follows from what is.
    picture = {name: {other for start, other in arrows if start == name} for name in numbers}
    assert script.reached(picture) == script.reached(edges), mend


def test_the_picture_numbers_the_way_of_a_gradient_as_the_page_does():
    _, numbers = drawn()
    assert {name: n for name, n in numbers.items() if n} == redraw().stations()
