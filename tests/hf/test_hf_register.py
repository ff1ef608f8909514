"""`import t2n_hf`: registers once, whatever is done to it, and does nothing else."""

import importlib
import multiprocessing
import subprocess
import sys

import pytest
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

import t2n_hf
from t2n_hf.errors import T2NError
from t2n_hf.hf.config import T2NConfig
from t2n_hf.hf.quantizer import T2NQuantizer, register


def registered():
    return AUTO_QUANTIZATION_CONFIG_MAPPING["t2n"] is T2NConfig and AUTO_QUANTIZER_MAPPING["t2n"] is T2NQuantizer


def in_another_process(queue):
    register()
    importlib.reload(t2n_hf)
    queue.put(registered())


def test_registering_again_changes_nothing():
    before = dict(AUTO_QUANTIZER_MAPPING), dict(AUTO_QUANTIZATION_CONFIG_MAPPING)
    register()
    importlib.import_module("t2n_hf")
    importlib.reload(t2n_hf)
    assert registered()
    assert (dict(AUTO_QUANTIZER_MAPPING), dict(AUTO_QUANTIZATION_CONFIG_MAPPING)) == before


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*use of fork")
def test_another_process_registers_too(method):
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=in_another_process, args=(queue,))
    process.start()
    assert queue.get(timeout=120)
    process.join(timeout=30)
    assert process.exitcode == 0


def test_a_package_that_is_imported_anew_takes_the_place_of_the_old_one():
    script = (
        "import sys, t2n_hf\n"
        "old = t2n_hf.T2NConfig\n"
        "for name in [n for n in sys.modules if n.startswith('t2n_hf')]: del sys.modules[name]\n"
        "import t2n_hf\n"
        "from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as known\n"
        "assert t2n_hf.T2NConfig is not old and known['t2n'] is t2n_hf.T2NConfig\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_name_of_somebody_else_is_not_taken(monkeypatch):
    class Other:
        pass

    monkeypatch.setitem(AUTO_QUANTIZER_MAPPING, "t2n", Other)
    with pytest.raises(T2NError, match="belongs to"):
        register()


def test_importing_changes_nothing_of_torch_and_imports_no_model():
    script = (
        "import sys, torch, warnings, logging\n"
        "from transformers.quantizers import auto\n"
        "threads, dtype, grad = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()\n"
        "handlers, filters = list(logging.getLogger().handlers), list(warnings.filters)\n"
        "import t2n_hf\n"
        "assert threads == torch.get_num_threads() and dtype == torch.get_default_dtype()\n"
        "assert grad == torch.is_grad_enabled()\n"
        "assert handlers == logging.getLogger().handlers and filters == warnings.filters\n"
        "loaded = set(sys.modules)\n"
        "assert not loaded & {'transformers.modeling_utils', 'tract', 'typer', 't2n_hf.export', 't2n_hf.hub.push'}\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_every_public_name_can_be_used():
    for name in t2n_hf.__all__:
        assert getattr(t2n_hf, name) is not None
        assert name in dir(t2n_hf)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = t2n_hf.nothing
