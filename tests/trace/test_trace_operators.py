"""dispatch_trace against torch's own samples of its operators: the graph computes what the operator computes."""

import copy
import functools
import itertools
import logging

import pytest
import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from t2n_hf.errors import CaptureError
from t2n_hf.trace import dispatch_trace

pytestmark = pytest.mark.filterwarnings("ignore")

MODES = {
    "gradients": torch.enable_grad,
    "no_gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "fake": torch.no_grad,
}
SAMPLES = 4  # of each operator
OPERATORS = (
    *("add", "addmm", "amax", "as_strided", "baddbmm", "cat", "clamp", "conj", "cumsum", "diff", "einsum", "expand"),
    *("fft.rfft", "gather", "index_put", "index_select", "linalg.solve", "linalg.svd", "logsumexp", "masked_select"),
    *("matmul", "max", "meshgrid", "movedim", "nn.functional.batch_norm", "nn.functional.conv2d", "nn.functional.gelu"),
    *("nn.functional.group_norm", "nn.functional.interpolate", "nn.functional.layer_norm", "nn.functional.linear"),
    *("nn.functional.max_pool2d", "nn.functional.pad", "nn.functional.scaled_dot_product_attention", "nonzero", "ones"),
    *("repeat_interleave", "resize_", "scatter_reduce", "softmax", "sort", "split", "squeeze", "stack", "std", "svd"),
    *("tensor_split", "topk", "unbind", "unfold", "unique", "var_mean", "view_as_complex", "where"),
)
# Memory as it is found; operators for accelerators alone; other layouts, which are refused.
LEFT_OUT = ("empty", "jiterator", "sparse")


@functools.cache
def infos():
    from torch.testing._internal.common_methods_invocations import op_db

    return [info for info in op_db if not any(word in info.name for word in LEFT_OUT)]


def samples(info):
    """(input, *args), kwargs of the first samples."""
    known = info.supported_dtypes("cpu")
    dtype = next((d for d in (torch.float32, torch.complex64, torch.int64, torch.bool) if d in known), None)
    if dtype is None:
        return
    torch.manual_seed(0)
    for sample in itertools.islice(info.sample_inputs("cpu", dtype), SAMPLES):
        yield (sample.input, *sample.args), sample.kwargs


def copied(tree):
    return pytree.tree_map_only(torch.Tensor, copy.deepcopy, tree, is_leaf=_is_size)


def faked(tree):
    mode = FakeTensorMode()
    return pytree.tree_map_only(torch.Tensor, lambda tensor: mode.from_tensor(tensor), tree, is_leaf=_is_size)


def _is_size(node):
    return isinstance(node, torch.Size)


def seeded(function, args, kwargs):
    torch.manual_seed(42)  # the samples of random operators call them with this seed
    return function(*args, **kwargs)


def assert_same(result, expected):
    for ours, theirs in zip(pytree.tree_leaves(result), pytree.tree_leaves(expected), strict=True):
        if isinstance(theirs, torch.Tensor):
            tensors = ours.resolve_conj().resolve_neg(), theirs.resolve_conj().resolve_neg()
            torch.testing.assert_close(*tensors, rtol=1e-4, atol=1e-4, equal_nan=True)
        else:
            assert ours == theirs or (ours != ours and theirs != theirs)


def check(function, args, kwargs, mode):
    """Trace `function`, and run the graph beside it; arguments must survive the trace."""
    before = copied((args, kwargs))
    with MODES[mode]():
        expected = seeded(function, *copied((args, kwargs)))
        module = dispatch_trace(function, *(faked((args, kwargs)) if mode == "fake" else (args, kwargs)))
        assert_same((args, kwargs), before)
        assert_same(seeded(module, args, kwargs), expected)
    calls = [node.target for node in module.graph.nodes if node.op == "call_function"]
    assert all(isinstance(target, OpOverload) or target.__name__ == "getitem" for target in calls)


@pytest.mark.parametrize("mode", ["no_gradients", "inference"])
@pytest.mark.parametrize("name", OPERATORS)
def test_the_graph_computes_what_the_operator_does(name, mode):
    found = [info for info in infos() if info.name == name]
    assert found
    for info in found:
        for args, kwargs in samples(info):
            check(info.op, args, kwargs, mode)


@pytest.mark.parametrize(
    "name", ["add", "clamp", "cumsum", "index_put", "masked_fill", "mul", "sigmoid", "sub", "tril"]
)
def test_written_in_place_through_a_view_it_reaches_the_whole_tensor(name):
    (info, *_) = [info for info in infos() if info.name == name]

    def function(x, *args, **kwargs):
        whole = torch.stack([x, x + 1])
        info.inplace_variant(whole[0], *args, **kwargs)
        return whole * 2, whole[0]

    done = 0
    for args, kwargs in samples(info):
        try:
            function(*copied(args), **copied(kwargs))
        except RuntimeError:
            continue  # a sample whose result has another shape cannot be written in place
        check(function, args, kwargs, "no_gradients")
        done += 1
    assert done


@pytest.mark.parametrize("name", ["add", "addmm", "cat", "cumsum", "matmul", "mean", "sort", "amax", "topk", "where"])
def test_written_into_out_tensors_it_gives_them(name):
    (info, *_) = [info for info in infos() if info.name == name]
    assert info.supports_out

    def function(*args, **kwargs):
        like = info.op(*args, **kwargs)
        out = pytree.tree_map_only(torch.Tensor, torch.zeros_like, like)
        info.op(*args, **kwargs, out=tuple(out) if isinstance(out, tuple | list) else out)
        return pytree.tree_leaves(out), [leaf * 1 for leaf in pytree.tree_leaves(out)]

    for args, kwargs in samples(info):
        if "out" not in kwargs:
            check(function, args, kwargs, "no_gradients")


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_over_all_of_torchs_samples_every_graph_computes_what_the_operator_does(mode):
    logging.disable(logging.CRITICAL)  # torch logs what fake tensors cannot do
    done, wrong, refused = set(), [], []
    for info in infos():
        for args, kwargs in samples(info):
            try:
                check(info.op, args, kwargs, mode)
            except CaptureError as error:
                (refused if "needs the values" in str(error) else wrong).append((info.name, str(error)[:200]))
            except Exception as error:  # noqa: BLE001 - all of them are to be seen at once
                wrong.append((info.name, repr(error)[:200]))
            else:
                done.add(info.name)
    logging.disable(logging.NOTSET)
    assert not wrong
    assert mode == "fake" or not refused
    assert len(done) > 550
