"""Run archives with every version of tract of the last two minor lines that PyPI serves.

    scripts/tract_matrix.py                 the cases of tests/ops, each against PyTorch: which version runs which
    scripts/tract_matrix.py --models        tiny models of every kind (tests/export/model_versions.py), the same
    scripts/tract_matrix.py FOLDER ...      exports of text generation: does each version say the same as the newest?

Wheels are kept in .cache/tract-wheels, one folder for each version. `t2n_hf/nnef/versions.py` is what was learned.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/ops"), str(ROOT / "tests/export")]

from t2n_hf.errors import TractError  # noqa: E402
from t2n_hf.nnef.versions import version_key  # noqa: E402
from t2n_hf.store.manifest import ExportManifest  # noqa: E402
from t2n_hf.tract.runner import TractRunner  # noqa: E402

WHEELS = ROOT / ".cache/tract-wheels"
MINOR_LINES = 2
TIMEOUT_S = 300.0
TOLERANCES = {"f32": 1e-4, "f16": 2e-2}


def served() -> list[str]:
    """Versions of the last minor lines, as pip finds them for this Python; the newest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", "tract", "--disable-pip-version-check"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    line = next(line for line in text.splitlines() if line.startswith("Available versions:"))
    versions = sorted(line.partition(":")[2].replace(" ", "").split(","), key=version_key, reverse=True)
    lines = list(dict.fromkeys(version_key(version)[:2] for version in versions))[:MINOR_LINES]
    return [version for version in versions if version_key(version)[:2] in lines]


def unpacked(version: str) -> Path:
    """The folder that holds this version's package `tract`, fetched when it is not there."""
    folder = WHEELS / version
    if not (folder / "tract").is_dir():
        WHEELS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=WHEELS) as scratch:
            options = ["--no-deps", "--only-binary", ":all:", "--quiet", "--disable-pip-version-check", "-d", scratch]
            subprocess.run([sys.executable, "-m", "pip", "download", *options, f"tract=={version}"], check=True)
            with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
                wheel.extractall(f"{scratch}/whole")
            Path(scratch, "whole").rename(folder)
    return folder


def steps_of(folder: Path, tract_folder: Path) -> list[np.ndarray]:
    """Logits of a text generation export after three steps of other lengths each."""
    manifest = ExportManifest.read(folder)
    feedback = {f"out{name[2:]}": name for name in (row["name"] for row in manifest.inputs) if name.startswith("in_")}
    random = np.random.default_rng(0)
    with TractRunner(folder / manifest.archive, timeout_s=TIMEOUT_S, tract_folder=tract_folder) as runner:
        ids = [random.integers(3, 100, (1, length)) for length in (5, 1, 7)]
        return [runner.step({"input_ids": step}, feedback)["outputs"] for step in ids]


def run_exports(folders: list[Path], versions: list[str]) -> dict[str, dict[str, str]]:
    """Folder -> version -> "right" or what went wrong."""
    table: dict[str, dict[str, str]] = {}
    for folder in folders:
        want = steps_of(folder, unpacked(versions[0]))
        rows = table.setdefault(str(folder), {})
        for version in versions:
            try:
                got = steps_of(folder, unpacked(version))
            except TractError as error:
                rows[version] = str(error).strip().splitlines()[-1][:160]
                continue
            errors = [np.abs(a - b).max() / np.abs(b).max() for a, b in zip(got, want, strict=True)]
            rows[version] = (
                "right"
                if max(errors) < TOLERANCES[ExportManifest.read(folder).dtype]
                else f"differs by {max(errors):.1e}"
            )
    return table


def run_cases(versions: list[str]) -> dict[str, dict[str, str]]:
    """Case of tests/ops -> version -> "right" or what went wrong."""
    from case_matrix import built_cases, outcomes

    with tempfile.TemporaryDirectory() as scratch:
        built = built_cases(Path(scratch))
        results = {version: outcomes(built, unpacked(version)) for version in versions}
    return {name: {version: results[version][name] for version in versions} for name in built}


def run_models(versions: list[str], target: str | None) -> dict[str, dict[str, str]]:
    """Model -> version -> "right" or what went wrong; it says so where the manifest would promise that it is right."""
    from model_versions import MODELS, built_models, model_outcome

    table: dict[str, dict[str, str]] = {}
    for name in MODELS:
        with tempfile.TemporaryDirectory() as scratch:
            built = built_models(Path(scratch), [name], target)[name]
            rows = table.setdefault(f"{name} (least tract {built.least})", {})
            for version in versions:
                outcome = model_outcome(built, unpacked(version))
                promised = version_key(version) >= version_key(built.least)
                rows[version] = f"PROMISED, BUT {outcome}" if promised and outcome != "right" else outcome
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--models", action="store_true", help="run tiny models of every kind")
    parser.add_argument("--target", help="with --models: what they are exported for (tract==X.Y.Z)")
    parser.add_argument("--versions", help="only these, separated by commas")
    parser.add_argument("--fetch", action="store_true", help="only fetch the wheels of these versions")
    parser.add_argument("--json", type=Path, help="write the table here too")
    options = parser.parse_args()
    versions = options.versions.split(",") if options.versions else served()
    if options.fetch:
        for version in versions:
            unpacked(version)
        return
    if options.models:
        table = run_models(versions, options.target)
    else:
        table = run_exports(options.folders, versions) if options.folders else run_cases(versions)
    for version in versions:
        wrong = {name: rows[version] for name, rows in table.items() if rows[version] != "right"}
        print(f"{version}: {len(table) - len(wrong)} of {len(table)} right")
        for name, what in sorted(wrong.items()):
            print(f"  {name}: {what}")
    if options.json:
        options.json.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
