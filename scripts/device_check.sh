#!/usr/bin/env bash
# Check the accelerator path on a machine that has one: load, generate, compare with the CPU, hold the budget, overlap
# copies with compute; prints the figures. Without an accelerator it says so and ends well.
# PYTHON names the interpreter (default: the environment of scripts/environment). Arguments go to device_check.py.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
python="${PYTHON:-$(scripts/environment)/bin/python}"
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$python" scripts/device_check.py "$@"
