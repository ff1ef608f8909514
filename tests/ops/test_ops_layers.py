"""Products, normalisations, attention, convolutions and poolings, against PyTorch."""

import pytest
import torch
from op_harness import Case, build_and_run, compare
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.tract


def floats(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def seeded(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point():
            buffer.copy_(floats(*buffer.shape).abs() + 0.5) if "var" in name else buffer.copy_(floats(*buffer.shape))
    return module.eval()


class Concatenating(nn.Module):
    """GPT-2's linear layer: x @ weight, through addmm of a matrix."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(8, 6)), nn.Parameter(torch.empty(6))

    def forward(self, x):
        return torch.addmm(self.bias, x.reshape(-1, 8), self.weight).view(*x.shape[:-1], 6)


X, A, B = floats(2, 5, 8), floats(2, 5, 4), floats(2, 4, 5)
S, IMAGE = {(0, 1): "S"}, floats(2, 4, 9, 8)
LONG = ((torch.cat([X, X], 1)[:, :9],), (X[:, :1],))
Q, K, V, MASK = floats(1, 4, 5, 8), floats(1, 4, 7, 8, seed=1), floats(1, 4, 7, 8, seed=2), floats(1, 1, 5, 7) > -0.5
QKV = {(0, 2): "S", (1, 2): "T", (2, 2): "T"}
OTHER_QKV = (floats(1, 4, 1, 8), floats(1, 4, 3, 8), floats(1, 4, 3, 8))


def layer(name, module, x=X, lengths=S, others=LONG, tolerance=1e-5):
    return Case(name, seeded(module), (x,), lengths, others if x is X else (), tolerance)


def fixed(name, function, *inputs, lengths=None, others=(), tolerance=1e-5):
    return Case(name, function, inputs, lengths or {}, others, tolerance)


PRODUCTS = [
    layer("linear", nn.Linear(8, 6)),
    layer("linear_without_bias", nn.Linear(8, 6, bias=False)),
    layer("linear_of_vector", nn.Linear(8, 6), floats(8), {}),
    layer("linear_of_matrix", nn.Linear(8, 6), floats(5, 8), {(0, 0): "S"}),
    layer("linear_of_rank_four", nn.Linear(8, 6), floats(2, 3, 5, 8), {(0, 2): "S"}),
    layer("addmm", Concatenating()),
    layer("bilinear_by_einsum", nn.Linear(8, 8)),
    fixed("matmul", torch.matmul, A, B, lengths={(0, 1): "S", (1, 2): "S"}),
    fixed("matmul_broadcast", torch.matmul, floats(3, 1, 5, 4), floats(2, 4, 6)),
    fixed("matmul_vector_right", torch.matmul, A, floats(4)),
    fixed("matmul_vector_left", torch.matmul, floats(5), A),
    fixed("matmul_vectors", torch.matmul, floats(5), floats(5, seed=1)),
    fixed("matmul_of_ints", torch.matmul, (A * 3).long(), (B * 3).long()),
    fixed("bmm", torch.bmm, A, B),
    fixed("mm", torch.mm, A[0], B[0]),
    fixed("mv", torch.mv, A[0], floats(4)),
    fixed("dot", torch.dot, floats(5), floats(5, seed=1)),
    fixed("outer", torch.outer, floats(5), floats(4), lengths={(0, 0): "S"}),
    fixed("linear_by_a_vector", F.linear, X, floats(8), lengths=S),
    fixed("linear_of_a_vector_by_a_vector", F.linear, floats(8), floats(8, seed=1)),
    fixed("addmm_scaled", lambda x, a, b: torch.addmm(x, a, b, beta=0.5, alpha=2.0), floats(5, 5), A[0], B[0]),
    fixed("baddbmm", torch.baddbmm, floats(2, 5, 5), A, B),
    fixed("baddbmm_without_sum", lambda x, a, b: torch.baddbmm(x, a, b, beta=0.0, alpha=0.5), floats(2, 5, 5), A, B),
    fixed("einsum", lambda a, b: torch.einsum("bik,bkj->bij", a, b), A, B, lengths={(0, 1): "S", (1, 2): "S"}),
    fixed("einsum_implicit", lambda a, b: torch.einsum("bik,bkj", a, b), A, B),
    fixed("einsum_of_diagonal_sum", lambda a: torch.einsum("bik->bk", a), A),
]

NORMS = [
    layer("layer_norm", nn.LayerNorm(8)),
    layer("layer_norm_plain", nn.LayerNorm(8, elementwise_affine=False)),
    layer("layer_norm_two_axes", nn.LayerNorm((5, 8)), X, {}, ()),
    layer("rms_norm", nn.RMSNorm(8)),
    layer("rms_norm_two_axes", nn.RMSNorm((5, 8)), X, {}, ()),
    Case(
        "rms_norm_written_out", lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), (X,), S, LONG, 1e-5
    ),
    layer("group_norm", nn.GroupNorm(2, 4), IMAGE, {(0, 2): "H"}),
    layer("instance_norm", nn.InstanceNorm2d(4, affine=True), IMAGE, {}),
    layer("batch_norm", nn.BatchNorm2d(4), IMAGE, {(0, 0): "B", (0, 3): "W"}),
    layer("batch_norm_1d", nn.BatchNorm1d(4), floats(3, 4, 7), {(0, 2): "S"}),
    layer("batch_norm_plain", nn.BatchNorm2d(4, affine=False), IMAGE, {}),
]

ATTENTION = [
    fixed("attention", F.scaled_dot_product_attention, Q, K, V, lengths=QKV, others=(OTHER_QKV,)),
    fixed(
        "attention_masked",
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        Q,
        K,
        V,
        MASK,
        lengths={**QKV, (3, 2): "S", (3, 3): "T"},
    ),
    fixed(
        "attention_float_mask",
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        Q,
        K,
        V,
        floats(5, 7),
    ),
    fixed(
        "attention_mask_of_one_row",
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        Q,
        K,
        V,
        MASK[:, :, :1],
    ),
    fixed(
        "attention_causal",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        Q,
        Q,
        V[:, :, :5],
        lengths={(0, 2): "S", (1, 2): "S", (2, 2): "S"},
        others=((Q[:, :, :1],) * 3,),
    ),
    fixed(
        "attention_causal_wide",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        Q,
        K,
        V,
        lengths=QKV,
    ),
    fixed("attention_scaled", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.3), Q, K, V),
    fixed(
        "attention_grouped",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        Q,
        K[:, :2],
        V[:, :2],
        lengths=QKV,
    ),
    fixed("attention_rank_three", F.scaled_dot_product_attention, Q[0], K[0], V[0]),
    fixed(
        "rope",
        lambda x, c, s: x * c + torch.cat((-x[..., 4:], x[..., :4]), -1) * s,
        Q,
        floats(1, 1, 5, 8),
        floats(1, 1, 5, 8, seed=1),
        lengths={(0, 2): "S", (1, 2): "S", (2, 2): "S"},
    ),
]

SPATIAL = [
    layer("conv2d", nn.Conv2d(4, 6, 3), IMAGE, {(0, 0): "B"}),
    layer("conv2d_full", nn.Conv2d(4, 6, 3, stride=2, padding=1, dilation=2), IMAGE, {}),
    layer("conv2d_same", nn.Conv2d(4, 6, 3, padding="same"), IMAGE, {(0, 2): "H"}),
    layer("conv2d_depthwise", nn.Conv2d(4, 4, 3, padding=1, groups=4), IMAGE, {}),
    layer("conv2d_groups", nn.Conv2d(4, 6, 3, groups=2, bias=False), IMAGE, {}),
    layer("conv2d_patches", nn.Conv2d(4, 6, 2, stride=2), floats(2, 4, 8, 8), {(0, 0): "B"}),
    layer("conv2d_unbatched", nn.Conv2d(4, 6, 3), IMAGE[0], {}),
    layer("conv1d", nn.Conv1d(4, 6, 3, padding=1), floats(2, 4, 9), {(0, 2): "S"}),
    layer("conv1d_strided", nn.Conv1d(4, 6, 3, stride=2, padding=1), floats(2, 4, 9), {}),
    layer("conv1d_valid", nn.Conv1d(4, 6, 3, padding="valid"), floats(2, 4, 9), {}),
    layer("conv3d", nn.Conv3d(2, 3, 2), floats(1, 2, 4, 5, 6), {}),
    layer("deconv2d", nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1), IMAGE, {}),
    layer("deconv1d", nn.ConvTranspose1d(4, 6, 4, stride=2), floats(2, 4, 9), {}),
    fixed("max_pool2d", lambda x: F.max_pool2d(x, 3, 2, 1), IMAGE),
    fixed("max_pool2d_plain", lambda x: F.max_pool2d(x, 2), IMAGE),
    fixed("max_pool1d", lambda x: F.max_pool1d(x, 3, 1, 1), floats(2, 4, 9)),
    fixed("avg_pool2d", lambda x: F.avg_pool2d(x, 2), IMAGE),
    fixed("avg_pool2d_padded", lambda x: F.avg_pool2d(x, 3, 2, 1), IMAGE),
    fixed("avg_pool2d_uncounted", lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), IMAGE),
    fixed("avg_pool1d", lambda x: F.avg_pool1d(x, 3), floats(2, 4, 9)),
    fixed("adaptive_to_one", lambda x: F.adaptive_avg_pool2d(x, 1), IMAGE, lengths={(0, 2): "H"}),
    fixed("adaptive_divided", lambda x: F.adaptive_avg_pool2d(x, (3, 4)), IMAGE),
    fixed("pad", lambda x: F.pad(x, (1, 2, 0, 3), value=0.5), X, lengths=S),
    fixed("pad_symbolic_axis", lambda x: F.pad(x, (0, 0, 2, 1)), X, lengths=S, others=LONG),
    fixed("pad_negative", lambda x: F.pad(x, (-1, 2)), X, lengths=S),
    fixed("pad_reflect", lambda x: F.pad(x, (1, 2), mode="reflect"), IMAGE[0]),
    fixed("pad_replicate", lambda x: F.pad(x, (1, 2), mode="replicate"), IMAGE[0]),
    fixed("pad_bool", lambda x: F.pad(x > 0, (1, 0), value=True), X),
    fixed("upsample_nearest", lambda x: F.interpolate(x, scale_factor=2.0), IMAGE),
    fixed("upsample_nearest_1d", lambda x: F.interpolate(x, scale_factor=3.0), floats(2, 4, 9)),
]

CASES = PRODUCTS + NORMS + ATTENTION + SPATIAL


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    return build_and_run(CASES, tmp_path_factory.mktemp("layers"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_torch(case, archives):
    compare(case, archives / case.name)
