"""Table and picture in docs/how_it_works.md are true: nothing missing, imports only downwards."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tfscale"
# Modules by their path, such as "callbacks/monitor"; a folder's own names are "callbacks/__init__".
MODULES = {
    path.relative_to(PACKAGE).with_suffix("").as_posix(): path for path in PACKAGE.rglob("*.py")
}
del MODULES["_version"]

# From a layer to those it may import besides itself. What is in no other layer is the core.
MAY_IMPORT = {
    "_compat": set(),
    "core": {"_compat"},
    "diagnostics": {"_compat", "core"},
    "optimizer": {"_compat", "core"},
    "training": {"_compat", "core", "optimizer"},
    "callbacks": {"_compat", "core", "optimizer", "diagnostics"},
    "public": {"_compat", "core", "optimizer", "training", "callbacks", "diagnostics"},
    "cli": {"core", "callbacks", "diagnostics", "public"},
}
LAYERS = {
    "__init__": "public",
    "__main__": "cli",
    "bench": "cli",
    "linking": "training",
    "replica_fit": "training",
    "replica_jit": "training",
    "transaction": "training",
    "wrapping": "training",
}


def layer(module):
    first = module.split("/")[0]
    return LAYERS.get(first, first if first in MAY_IMPORT else "core")


def imports(module, ever=False):
    """The modules of the package that a module imports while it is imported itself, or `ever`."""
    tree = ast.parse(MODULES[module].read_text())
    for node in ast.walk(tree) if ever else tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tfscale":
            source = node.module.replace(".", "/").removeprefix("tfscale").removeprefix("/")
            for alias in node.names:
                inside = f"{source}/{alias.name}".removeprefix("/")
                folder = f"{source}/__init__".removeprefix("/")
                candidates = (inside, f"{inside}/__init__", source, folder)
                yield next(name for name in candidates if name in KNOWN)
        elif isinstance(node, ast.Import):
            yield from ("__init__" for alias in node.names if alias.name == "tfscale")


KNOWN = {*MODULES, "_version"}


def rooms():
    """The modules in the table, and the folders that it names as a whole, such as `_compat/`."""
    page = (ROOT / "docs" / "how_it_works.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([\w/]+?)(?:\.py|/)`", row)}


def test_every_module_is_in_the_table():
    found = rooms()
    # A folder's `__init__` only names what is in it.
    modules = {name: name.split("/")[0] for name in MODULES if not name.endswith("/__init__")}
    folders = {first for name, first in modules.items() if first != name} & found
    assert {name for name, first in modules.items() if first not in folders} == found - folders


@pytest.mark.parametrize("module", MODULES)
def test_a_layer_imports_only_from_layers_below(module):
    allowed = {layer(module), *MAY_IMPORT[layer(module)]}
    # Late imports save time; they are no way around the rule.
    for other in imports(module, ever=True):
        assert other == "_version" or layer(other) in allowed, f"{module} imports {other}"


def test_modules_do_not_import_each_other_in_a_circle():
    edges = {name: {*imports(name, ever=True)} - {"_version"} for name in MODULES}
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
    edges = {name: set() for name in numbers}
    for name in MODULES:
        box = name.split("/")[0]
        if box in edges:
            edges[box] |= {other.split("/")[0] for other in imports(name)} & set(numbers) - {box}
    old = "The picture is old: run python docs/rooms.py (it needs Graphviz: apt install graphviz)"
    assert set(numbers) == {name.split("/")[0] for name in rooms()} - script.NOT_DRAWN, old
    assert all(other in edges[name] for name, other in arrows), old
    # What is not drawn follows from what is.
    picture = {name: {other for start, other in arrows if start == name} for name in numbers}
    assert script.reached(picture) == script.reached(edges), old


def test_the_picture_numbers_gradients_as_the_page():
    _, numbers = drawn()
    assert {name: n for name, n in numbers.items() if n} == redraw().step_numbers()
