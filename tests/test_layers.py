"""Imports point down: the rooms of t2n_hf stand on each other in one order, without cycles or late imports."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "t2n_hf"

LAYERS = [
    {"errors"},
    {"dtypes", "atomic", "garbage", "places", "views"},
    {"nnef", "store", "residency"},
    {"contract"},
    {"registry"},
    {"ops", "tensor", "trace"},
    {"hf", "tract", "hub"},
    {"export"},
    {"cli"},
]
HEIGHT = {room: height for height, rooms in enumerate(LAYERS) for room in rooms}
FOREIGN = {  # who may import what from elsewhere
    "torch": {"nnef": False, "errors": False, "dtypes": False},
    "transformers": {room: room in {"hf", "tract", "cli", "export"} for room in HEIGHT},
    "accelerate": {room: room in {"hf", "tract"} for room in HEIGHT},
    "huggingface_hub": {room: room in {"hub", "hf", "tract", "cli"} for room in HEIGHT},
    "tract": {room: room == "tract" for room in HEIGHT},
}


def imports_of(tree: ast.AST) -> list[tuple[int, str, bool]]:
    """(line, dotted name, inside a function) of every import."""
    found = []
    late = {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(outer)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name, id(node) in late) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [(node.lineno, f"{node.module}.{alias.name}", id(node) in late) for alias in node.names]
    return found


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_what_stands_below_its_room(path):
    room = room_of(path)
    bad = []
    for line, name, late in imports_of(ast.parse(path.read_text())):
        head, _, rest = name.partition(".")
        if head != "t2n_hf":
            allowed = FOREIGN.get(head, {}).get(room, True)
            if not allowed and room not in ("__init__", "__main__", "testing"):
                bad.append(f"line {line}: room {room} must not import {head}")
            continue
        if late:
            bad.append(f"line {line}: {name} is imported inside a function")
        if room in ("__init__", "__main__", "testing"):
            continue
        target = rest.partition(".")[0]
        if target != room and HEIGHT[target] >= HEIGHT[room]:
            bad.append(f"line {line}: room {room} must not import {target}")
    assert not bad


def test_no_import_cycle_inside_the_package():
    names = {}
    for path in modules():
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    edges = {}
    for name, path in names.items():
        targets = set()
        for _, imported, late in imports_of(ast.parse(path.read_text())):
            if late or not imported.startswith("t2n_hf"):
                continue
            module = imported if imported in names else imported.rpartition(".")[0]
            if module in names and module != name:
                targets.add(module)
        edges[name] = targets
    done, path_now = set(), []

    def visit(name):
        if name in path_now:
            raise AssertionError(" -> ".join([*path_now[path_now.index(name) :], name]))
        if name in done:
            return
        path_now.append(name)
        for target in sorted(edges[name]):
            visit(target)
        path_now.pop()
        done.add(name)

    for name in sorted(edges):
        visit(name)


def test_every_room_has_a_height():
    rooms = {room_of(path) for path in modules()} - {"__init__", "__main__", "testing"}
    assert rooms <= set(HEIGHT), f"rooms without a place in LAYERS: {rooms - set(HEIGHT)}"
