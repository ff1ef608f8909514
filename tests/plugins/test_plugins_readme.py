"""plugins/README.md teaches to write a plugin: what it shows is built, installed beside t2n_hf, and tested."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def written_from(text: str, folder: Path) -> list[str]:
    """Write every code block that a file name stands before; return the names."""
    blocks = re.findall(r"^`([^`\n]+)`:\n\n```\w+\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    for name, body in blocks:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(body)
    return [name for name, _ in blocks]


def run(*command: str | Path, path: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


def installed(source: Path, target: Path) -> None:
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    done = run(sys.executable, "-m", "pip", "install", *options, "--target", target, source, path=target, cwd=source)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A folder of installed distributions that holds nothing yet."""
    return tmp_path / "site"


def test_the_plugin_of_the_text_builds_and_conforms(tmp_path, environment):
    names = written_from((ROOT / "plugins" / "README.md").read_text(), tmp_path / "source")
    assert names == ["pyproject.toml", "src/t2n_hf_signs/__init__.py", "tests/test_signs.py"]
    installed(tmp_path / "source", environment)
    tests = tmp_path / "source" / "tests"
    done = run(sys.executable, "-m", "pytest", "-q", "-W", "error", tests, path=environment, cwd=tests)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_a_plugin_is_found_by_its_entry_point_alone(tmp_path, environment):
    shutil.copytree(ROOT / "plugins" / "t2n-hf-int8", tmp_path / "int8", ignore=shutil.ignore_patterns("*.egg-info"))
    installed(tmp_path / "int8", environment)
    program = (
        "import sys\n"
        "from t2n_hf.registry import class_of_tag, format_class, list_plugins\n"
        "assert 't2n_hf_int8' not in sys.modules\n"
        "cls = format_class('int8_rows')\n"
        "assert cls is class_of_tag('t2n_hf_int8.int8_rows.v1')\n"
        "print([p.error for p in list_plugins() if p.short == 'int8_rows'], sys.modules[cls.__module__].__file__)\n"
    )
    done = run(sys.executable, "-c", program, path=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[None]")
    assert str(environment) in done.stdout


def test_a_plugin_that_does_not_load_is_named_and_hurts_nobody_else(tmp_path, environment):
    written_from((ROOT / "plugins" / "README.md").read_text(), tmp_path / "source")
    module = tmp_path / "source" / "src" / "t2n_hf_signs" / "__init__.py"
    module.write_text("import a_module_that_is_not_there\n")
    installed(tmp_path / "source", environment)
    program = (
        "import warnings\n"
        "from t2n_hf.registry import format_class, list_plugins\n"
        "assert format_class('q4_0').__name__ == 'QTensorTractScaleOnly'\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    try:\n"
        "        format_class('signs')\n"
        "    except KeyError as error:\n"
        "        print(error)\n"
        "print(caught[0].message)\n"
        "print([p.error for p in list_plugins() if p.short == 'signs'])\n"
    )
    done = run(sys.executable, "-c", program, path=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "t2n-hf-signs 0.1.0 declares it but does not load" in done.stdout
    assert "ModuleNotFoundError" in done.stdout


def test_two_plugins_with_one_tag_are_both_named(tmp_path, environment):
    for name in ("t2n-hf-signs", "t2n-hf-other"):
        source = tmp_path / name
        written_from((ROOT / "plugins" / "README.md").read_text(), source)
        text = (source / "pyproject.toml").read_text().replace('name = "t2n-hf-signs"', f'name = "{name}"')
        text = text.replace("t2n_hf_signs:Signs", f"{name.replace('-', '_')}:Signs")
        (source / "pyproject.toml").write_text(text)
        if name != "t2n-hf-signs":
            (source / "src" / "t2n_hf_signs").rename(source / "src" / name.replace("-", "_"))
        installed(source, environment)
    program = (
        "from t2n_hf.registry import format_class\n"
        "try:\n"
        "    format_class('signs')\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    done = run(sys.executable, "-c", program, path=environment, cwd=tmp_path)
    assert "t2n-hf-signs 0.1.0" in done.stdout, done.stderr
    assert "t2n-hf-other 0.1.0" in done.stdout
