"""What a command imports; in a process of its own, since modules stay."""

import subprocess
import sys

IMPORTED = """
import gc, sys
gc.freeze()
frozen = gc.get_freeze_count()
from t2n_hf.cli.imports import import_command
module = import_command("t2n_hf.cli.export")
assert "scipy" not in sys.modules, "scipy was imported, or is hidden"
assert callable(module.export) and gc.isenabled() and gc.get_freeze_count() > frozen
from transformers.utils import is_scipy_available
assert is_scipy_available()
from transformers.models.fnet import modeling_fnet
assert modeling_fnet.linalg.__name__ == "scipy.linalg"
"""
USED_BEFORE = """
import scipy, gc
from t2n_hf.cli.imports import import_command
import_command("t2n_hf.cli.export")
from transformers.loss import loss_for_object_detection
assert callable(loss_for_object_detection.linear_sum_assignment) and gc.get_freeze_count() == 0
"""


def run(program: str) -> None:
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_losses_do_without_scipy_and_models_that_need_it_have_it():
    run(IMPORTED)


def test_where_scipy_is_in_use_nothing_is_left_out():
    run(USED_BEFORE)
