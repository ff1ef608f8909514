"""Operators over the samples that PyTorch itself tests them with, in floats, integers and booleans."""

import pytest
import torch
from op_harness import Case, build_and_run, compare
from torch.utils import _pytree as pytree

pytestmark = [pytest.mark.tract, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

DTYPES = (torch.float32, torch.int64, torch.bool)
MOST = 3

# Which of equal elements comes first, torch leaves open for these: their integers and booleans are not compared.
OF_FLOATS_ONLY = ("argsort", "kthvalue", "median", "msort", "sort", "topk")
# Some of the forms of these are refused: a mask beside other indices, the norm of singular values, rows that are
# shortened while they are read.
REFUSED = ("index_put", "nn.functional.embedding_bag", "norm")
NAMES = (
    *("abs", "acos", "acosh", "add", "addbmm", "addcdiv", "addcmul", "addmm", "addmv", "addr", "all", "amax", "amin"),
    *("aminmax", "angle", "any", "argmax", "argmin", "argsort", "asin", "asinh", "atan", "atan2", "atanh"),
    *("atleast_1d", "atleast_2d", "baddbmm", "bitwise_and", "bitwise_left_shift", "bitwise_not", "bitwise_or"),
    *("bitwise_right_shift", "bitwise_xor", "bmm", "broadcast_to", "bucketize", "cat", "cdist"),
    *("ceil", "chunk", "clamp", "clamp_max", "clamp_min", "column_stack", "copysign", "cos", "cosh", "count_nonzero"),
    *("cross", "cummax", "cummin", "cumprod", "cumsum", "diag", "diag_embed", "diagonal", "diagonal_scatter", "diff"),
    *("div", "dot", "dsplit", "dstack", "einsum", "eq", "erf", "erfc", "erfinv", "exp", "exp2", "expand", "expm1"),
    *("fill", "flatten", "flip", "fliplr", "floor", "floor_divide", "fmax", "fmin", "fmod", "frac"),
    *("gather", "ge", "gt", "heaviside", "histc", "hstack", "hypot", "index_add", "index_copy", "index_fill"),
    *("index_put", "index_select", "inner", "isclose", "isfinite", "isin", "isinf", "isnan", "kron", "kthvalue", "le"),
    *("lerp", "linspace", "log", "log10", "log1p", "log2", "log_softmax", "logaddexp", "logcumsumexp", "logical_and"),
    *("logical_not", "logical_or", "logical_xor", "logit", "logsumexp", "lt", "masked_fill", "masked_scatter"),
    *("matmul", "max", "maximum", "mean", "median", "meshgrid", "min", "minimum", "mm", "movedim", "msort", "mul"),
    *("mv", "nan_to_num", "nanmean", "nansum", "ne", "neg", "norm", "outer", "permute", "pow", "prod", "put"),
    *("ravel", "reciprocal", "remainder", "renorm", "repeat", "reshape", "roll", "rot90", "round"),
    *("rsqrt", "rsub", "scatter", "scatter_add", "scatter_reduce", "searchsorted", "select", "select_scatter", "sgn"),
    *("sigmoid", "sign", "signbit", "sin", "sinc", "sinh", "slice", "slice_scatter", "softmax"),
    *("sort", "split", "sqrt"),
    *("square", "squeeze", "stack", "std", "std_mean", "sub", "sum", "t", "take", "take_along_dim", "tan", "tanh"),
    *("tensordot", "tile", "topk", "trace", "transpose", "tril", "triu", "true_divide", "trunc", "unbind", "unflatten"),
    *("unfold", "unsqueeze", "var", "var_mean", "vdot", "view", "vstack", "where", "xlogy", "zeros_like"),
    *("nn.functional.celu", "nn.functional.cosine_similarity", "nn.functional.elu", "nn.functional.gelu"),
    *("nn.functional.glu", "nn.functional.hardshrink", "nn.functional.hardsigmoid", "nn.functional.hardswish"),
    *("nn.functional.layer_norm", "nn.functional.leaky_relu", "nn.functional.linear", "nn.functional.logsigmoid"),
    *("nn.functional.mish", "nn.functional.normalize", "nn.functional.prelu", "nn.functional.relu"),
    *("nn.functional.relu6", "nn.functional.rms_norm", "nn.functional.selu", "nn.functional.silu"),
    *("nn.functional.softmin", "nn.functional.softplus", "nn.functional.softshrink", "nn.functional.softsign"),
    *("nn.functional.tanhshrink", "nn.functional.threshold", "linalg.cross", "linalg.norm", "linalg.vector_norm"),
    *("nanmedian", "nanquantile", "nn.functional.bilinear", "nn.functional.embedding_bag", "quantile"),
    *("digamma", "i0", "mvlgamma", "polygamma", "special.entr", "special.erfcx", "special.i0e", "special.i1"),
    *("special.i1e", "special.log_ndtr", "special.ndtr", "special.ndtri", "special.xlog1py"),
)


class Call(torch.nn.Module):
    """An operator with its arguments, of which the tensors are given."""

    def __init__(self, function, sample):
        super().__init__()
        self.function = function
        self.leaves, self.spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        self.places = [place for place, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]

    @property
    def tensors(self):
        return tuple(self.leaves[place].detach().contiguous() for place in self.places)

    def forward(self, *tensors):
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        first, args, options = pytree.tree_unflatten(leaves, self.spec)
        return self.function(first, *args, **options)


def cases_of(names):
    """Some samples of each operator and dtype, by operator."""
    # Slow to import: only where the samples are needed.
    from torch.testing._internal.common_methods_invocations import op_db

    cases = {name: [] for name in names}
    for info in (info for info in op_db if info.name in names):
        for dtype in DTYPES:
            if not info.supports_dtype(dtype, "cpu") or (info.name in OF_FLOATS_ONLY and dtype is not torch.float32):
                continue
            torch.manual_seed(0)
            samples = list(info.sample_inputs("cpu", dtype, requires_grad=False))
            for number, sample in enumerate(samples[:: max(1, len(samples) // MOST)]):
                module = Call(info.op, sample).eval()
                if module.tensors and all(tensor.numel() > 0 for tensor in module.tensors):
                    name = f"{info.name}-{info.variant_test_name}-{str(dtype).removeprefix('torch.')}-{number}"
                    cases[info.name].append(Case(name, module, module.tensors, tolerance=1e-4))
    return cases


@pytest.fixture(scope="module")
def cases():
    return cases_of(NAMES)


@pytest.fixture(scope="module")
def archives(cases, tmp_path_factory):
    everything = [case for group in cases.values() for case in group]
    return build_and_run(everything, tmp_path_factory.mktemp("samples"))


@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_torch_on_its_samples(name, cases, archives):
    assert cases[name], "no sample of this operator takes a tensor"
    for case in cases[name]:
        why = archives / case.name / "build_error"
        if why.exists() and why.read_text().startswith(("EmitError", "MissingEmittersError")):
            assert name in REFUSED, why.read_text()
        else:
            compare(case, archives / case.name)
