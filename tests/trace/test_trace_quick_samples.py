"""The quick stand-ins of results beside what torch itself makes, over torch's own samples of its operators."""

import functools
import itertools
import logging

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from t2n_hf.trace import quick_proxies
from t2n_hf.trace.quick_results import quick_result

pytestmark = pytest.mark.filterwarnings("ignore")

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
# Operators that have a quick result, and those that are made of them.
OWN = (
    *("add", "cat", "cos", "div", "exp", "mean", "mul", "neg", "nn.functional.gelu", "nn.functional.layer_norm"),
    *("nn.functional.linear", "nn.functional.local_response_norm", "nn.functional.relu", "nn.functional.silu"),
    *("nn.functional.tanhshrink", "pow", "reshape", "rsqrt", "sigmoid", "sin", "sub", "tanh", "transpose"),
    *("unsqueeze", "view", "matmul", "column_stack", "rsub"),
)
# Memory as it is found; operators for accelerators alone; other layouts.
LEFT_OUT = ("empty", "jiterator", "sparse")
WITH_QUICK_RESULTS = {
    f"aten.{name}"
    for name in (
        *("add.Tensor", "cat.default", "cos.default", "div.Tensor", "exp.default", "gelu.default"),
        *("layer_norm.default", "linear.default", "mul.Tensor", "neg.default", "pow.Tensor_Scalar", "relu.default"),
        *("reshape.default", "rsqrt.default", "sigmoid.default", "silu.default", "sin.default", "sub.Tensor"),
        *("tanh.default", "transpose.int", "unsqueeze.default", "view.default"),
    )
}


class Comparison:
    """Stands where a trace asks for a quick result: notes what differs from torch's, and gives the latter."""

    def __init__(self):
        self.quick, self.different, self.sample = set(), [], ""

    def __call__(self, func, args, kwargs):
        mine = quick_result(func, args, kwargs)
        if mine is None:
            return None
        self.quick.add(str(func))
        given = [shown(leaf) if isinstance(leaf, FakeTensor) else leaf for leaf in pytree.tree_leaves(args)]
        try:
            theirs = func(*args, **kwargs)
        except RuntimeError as error:
            self.different.append((self.sample, str(func), given, shown(mine), repr(error)[:200]))
            raise
        found = [(*shown(result), shares(result, args)) for result in (mine, theirs)]
        if found[0] != found[1]:
            self.different.append((self.sample, str(func), given, *found))
        return theirs


def shown(tensor):
    lengths = str(tuple(tensor.shape)), str(tensor.stride()), str(tensor.storage_offset())
    marks = tensor.layout, tensor.is_contiguous(), tensor.is_conj(), tensor.is_neg(), tensor.requires_grad
    return (*lengths, tensor.dtype, tensor.device, type(tensor), *marks)


def shares(result, args):
    """Which of the arguments lie in the memory of the result."""
    memory = result.untyped_storage()._cdata
    return [t.untyped_storage()._cdata == memory for t in pytree.tree_leaves(args) if isinstance(t, FakeTensor)]


@functools.cache
def infos():
    from torch.testing._internal.common_methods_invocations import op_db

    return [info for info in op_db if not any(word in info.name for word in LEFT_OUT)]


def samples(info, dtype, count):
    """The first samples, and calls that the operator has to refuse."""
    torch.manual_seed(0)
    try:
        # All of them, for a generator that is left halfway ends within a trace.
        found = list(info.sample_inputs("cpu", dtype))[:count]
    except RuntimeError:
        found = []  # torch cannot make samples of this dtype
    if dtype is torch.float32 and info.error_inputs_func is not None:
        found += [error.sample_input for error in list(info.error_inputs("cpu"))[:count]]
    return found


def trace(function, sample, mode):
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))

    def call(*tensors):
        rest = iter(tensors)
        given = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        first, args, kwargs = pytree.tree_unflatten(given, spec)
        with quick_proxies.quick_proxies():
            return function(first, *args, **kwargs)

    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    with torch.no_grad():
        return make_fx(call, tracing_mode=mode, pre_dispatch=True, _allow_non_fake_inputs=True)(*tensors)


def compared(monkeypatch, chosen, count, dtypes, modes):
    """The comparison over the samples of some operators, and how many traces went to their end."""
    comparison, done = Comparison(), 0
    monkeypatch.setattr(quick_proxies, "quick_result", comparison)
    logging.disable(logging.CRITICAL)  # torch logs what fake tensors cannot do
    try:
        for info, dtype in itertools.product(chosen, dtypes):
            if not info.supports_dtype(dtype, "cpu"):
                continue
            for (number, sample), mode in itertools.product(enumerate(samples(info, dtype, count)), modes):
                comparison.sample = f"{info.name} {dtype} {number} {mode}"
                try:
                    trace(info.op, sample, mode)
                except Exception:  # noqa: BLE001 - refused samples, and values that stand-ins do not have
                    continue
                done += 1
    finally:
        logging.disable(logging.NOTSET)
    return comparison, done


def test_quick_results_are_torchs_over_its_samples(monkeypatch):
    chosen = [info for info in infos() if info.name in OWN]
    comparison, done = compared(monkeypatch, chosen, 4, (torch.float32,), ("fake", "symbolic"))
    assert not comparison.different
    assert comparison.quick >= WITH_QUICK_RESULTS
    assert done > 150


@pytest.mark.slow
def test_quick_results_are_torchs_over_all_samples_of_their_operators(monkeypatch):
    chosen = [info for info in infos() if info.name in OWN]
    comparison, done = compared(monkeypatch, chosen, 100, DTYPES, ("fake", "symbolic"))
    assert not comparison.different
    assert done > 1000


@pytest.mark.slow
def test_quick_results_are_torchs_over_samples_of_every_operator(monkeypatch):
    comparison, done = compared(monkeypatch, infos(), 1, (torch.float32,), ("fake", "symbolic"))
    assert not comparison.different
    assert comparison.quick >= WITH_QUICK_RESULTS
    assert done > 700
