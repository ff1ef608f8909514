"""The format room knows no torch, so that it can be tested in milliseconds."""

import ast
from pathlib import Path

import t2n_hf.nnef

ALLOWED = {"numpy", "isal", "t2n_hf"}
ROOMS_BELOW = {"errors", "dtypes", "atomic", "nnef"}


def _imports(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
    return names


def test_only_numpy_isal_and_the_standard_library_are_imported():
    import sys

    found = [(path.name, name) for path in Path(t2n_hf.nnef.__file__).parent.rglob("*.py") for name in _imports(path)]
    assert len(found) > 20
    for file, name in found:
        top, _, rest = name.partition(".")
        assert top in sys.stdlib_module_names or top in ALLOWED, (file, name)
        if top == "t2n_hf":
            assert rest.partition(".")[0] in ROOMS_BELOW, (file, name)
