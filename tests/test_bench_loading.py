"""The loading benchmark runs whole on a tiny model, so that it cannot rot. Its figures are judged elsewhere."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
PARTS = {"decode", "prefill", "offload", "dispatch", "load", "pool", "export", "plots"}


def run(out: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "bench_loading.py"), "--quick", str(out), *flags]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_every_part_of_the_loading_benchmark_runs_and_is_written_into_the_page(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "loading.json").read_text())
    assert set(results["seconds"]) == PARTS
    # Offloaded, in a pool, by accelerate or resident: the same bf16 model says the same.
    assert results["offload"]["same tokens"]
    assert 0 < results["pool"]["scan"] <= 1
    page = (tmp_path / "benchmarks.md").read_text()
    assert page.count("<!-- loading: ") == 2
    for words in ("decode, resident Q4_0", "prefill of 8", "against accelerate", "on the fly", "cyclic scan", "export"):
        assert words in page


def test_a_part_that_does_not_exist_is_refused_by_name(tmp_path):
    done = run(tmp_path, "--only", "decode,speed")
    assert done.returncode == 2
    assert "no part speed" in done.stderr
