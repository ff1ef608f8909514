"""What importing a command leaves; in a process of its own, since modules stay."""

import subprocess
import sys

import pytest

PROGRAM = """
import gc, sys
if {alone}:
    gc.freeze()
frozen = gc.get_freeze_count()
from t2n_hf.cli.imports import import_command
module = import_command("t2n_hf.cli.export")
assert callable(module.export) and gc.isenabled()
assert (gc.get_freeze_count() > frozen) is {alone}
"""


@pytest.mark.parametrize("alone", [True, False])
def test_modules_are_kept_from_the_garbage_collector_in_a_process_of_its_own(alone):
    program = PROGRAM.format(alone=alone)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
