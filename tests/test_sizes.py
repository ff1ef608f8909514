"""One idea per file: modules stay under 400 lines, and nothing is called utils, helper, manager, base or common."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted([*(ROOT / "t2n_hf").rglob("*.py"), *(ROOT / "plugins").glob("*/src/**/*.py")])


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_is_short_and_named_for_what_it_holds(path):
    lines = path.read_text().count("\n")
    assert lines <= 400, f"{lines} lines"
    assert path.stem not in {"utils", "util", "helper", "helpers", "manager", "base", "common"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_has_no_stub_and_no_unsafe_loader(path):
    text = path.read_text()
    found = re.findall(
        r"TODO|FIXME|XXX|raise NotImplementedError\b|weights_only=False|sys\.path\.(?:insert|append)", text
    )
    assert not found


def test_nothing_tracked_names_a_machine_or_how_the_project_was_made():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout: nothing is tracked")
    bad = []
    for name in filter(None, listed.stdout.decode().split("\0")):
        path = ROOT / name
        if not path.is_file() or path.suffix in {".png", ".safetensors"} or path == Path(__file__):
            continue
        text = path.read_text(errors="replace")
        bad += [f"{name}: {word}" for word in re.findall(r"\.\./shared|(?<![\w.])/work/\w+|/root/\w+", text)]
    assert not bad
