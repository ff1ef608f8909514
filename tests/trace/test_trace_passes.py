import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from t2n_hf.errors import CaptureError
from t2n_hf.trace.passes import PASSES
from t2n_hf.trace.passes.aliases import drop_aliases, drop_idle_dropouts, drop_whole_copies
from t2n_hf.trace.passes.asserts import drop_asserts
from t2n_hf.trace.passes.dead_code import drop_dead_code
from t2n_hf.trace.passes.float_mask import float_masks
from t2n_hf.trace.passes.rms_norm import fuse_rms_norm
from t2n_hf.trace.passes.rope import ROPE_OP, fuse_rope
from t2n_hf.trace.passes.views import join_views
from t2n_hf.trace.passes.writes import replace_writes

aten = torch.ops.aten


def trace(function, *inputs):
    return make_fx(function, tracing_mode="fake", pre_dispatch=True)(*inputs)


def targets(graph: fx.Graph):
    return [node.target for node in graph.nodes if node.op == "call_function"]


def norm(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def rope(x, cos, sin):
    return x * cos + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin


def attention(q, m):
    return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=m)


def views(x):
    return x[:, None, :, None].flatten(1, 2) + 0.5


def aliases(x):
    return (nn.functional.dropout(x.clone().contiguous(), 0.5, False).to(torch.float32) + 0).detach()


def unused(x):
    x.exp()
    return x + 1


X, MASK = torch.randn(2, 5, 8), torch.ones(5, 5).tril().bool()
FUNCTIONS = {
    "norm": (norm, (X,)),
    "rope": (rope, (X, torch.randn(1, 5, 8), torch.randn(1, 5, 8))),
    "attention": (attention, (X, MASK)),
    "views": (views, (X,)),
    "aliases": (aliases, (X,)),
    "unused": (unused, (X,)),
}


@pytest.mark.parametrize("run", PASSES, ids=lambda run: run.__name__)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_pass_keeps_values_and_does_nothing_the_second_time(name, run):
    function, inputs = FUNCTIONS[name]
    module = trace(function, *inputs)
    graph, _ = run(module.graph)
    graph.lint()
    module.recompile()
    if ROPE_OP not in targets(graph):  # that operator is for the exporter; PyTorch runs it too, but see below
        torch.testing.assert_close(module(*inputs), function(*inputs), rtol=1e-5, atol=1e-5)
    before = [(node.name, node.target, node.args) for node in graph.nodes]
    again, changed = run(graph)
    assert not changed
    assert [(node.name, node.target, node.args) for node in again.nodes] == before


def test_the_written_out_norm_becomes_one_call():
    graph, changed = fuse_rms_norm(trace(norm, X).graph)
    assert changed
    drop_dead_code(graph)
    assert targets(graph) == [aten.rms_norm.default]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 1e-5),
        lambda x: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-5),
        lambda x: x * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + 1e-5),
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)),
    ],
    ids=["cube", "another axis", "another tensor", "no eps"],
)
def test_what_only_looks_like_a_norm_is_left(function):
    assert not fuse_rms_norm(trace(function, X).graph).changed


def test_rotation_by_halves_becomes_one_call_of_the_same_value():
    inputs = FUNCTIONS["rope"][1]
    module = trace(rope, *inputs)
    graph, changed = fuse_rope(module.graph)
    assert changed
    drop_dead_code(graph)
    assert targets(graph) == [ROPE_OP]
    module.recompile()
    torch.testing.assert_close(module(*inputs), rope(*inputs))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, c, s: x * c + torch.cat((x[..., 4:], x[..., :4]), -1) * s,
        lambda x, c, s: x * c + torch.cat((-x[..., 3:], x[..., :3]), -1) * s,
        lambda x, c, s: x * c + torch.cat((-c[..., 4:], c[..., :4]), -1) * s,
    ],
    ids=["no minus", "not in the middle", "another tensor"],
)
def test_what_only_looks_like_a_rotation_is_left(function):
    inputs = (torch.randn(1, 5, 8), *FUNCTIONS["rope"][1][1:])
    assert not fuse_rope(trace(function, *inputs).graph).changed


def test_layers_with_one_boolean_mask_share_the_mask_of_numbers():
    graph, _ = float_masks(trace(lambda q, m: attention(attention(q, m), m), X, MASK).graph)
    assert targets(graph).count(aten.where.Scalar) == 1


def test_a_row_that_is_masked_everywhere_stays_finite():
    mask = MASK.clone()
    mask[0] = False
    module = trace(attention, X, mask)
    float_masks(module.graph)
    module.recompile()
    assert torch.isfinite(module(X, mask)).all()


def test_views_of_views_are_joined_unless_something_else_uses_them():
    graph, changed = join_views(trace(views, X).graph)
    assert changed
    assert targets(graph).count(aten.reshape.default) == 1
    both = trace(lambda x: ((y := x[:, None]), y.flatten(1, 2)), X)
    assert not join_views(both.graph).changed


def test_copies_and_dropout_in_inference_go_away():
    graph, _ = drop_aliases(trace(aliases, X).graph)
    assert targets(graph) == [aten.add.Tensor]


def test_casts_and_dropout_that_do_something_stay():
    graph, changed = drop_aliases(trace(lambda x: nn.functional.dropout(x.to(torch.float16), 0.5, True), X).graph)
    assert not changed
    assert targets(graph) == [aten.to.dtype, aten.dropout.default]


def test_checks_go_away():
    class Checked(nn.Module):
        def forward(self, x):
            torch._check(x.shape[0] > 1)
            return x.to(torch.float16).to(torch.float32)

    exported = torch.export.export(Checked(), (X,), dynamic_shapes=({0: torch.export.Dim("S", min=2)},), strict=False)
    graph, changed = drop_asserts(exported.graph)
    assert changed
    assert not any("assert" in str(target) for target in targets(graph))


def test_unused_calls_go_away_and_those_that_write_stay():
    graph, _ = drop_dead_code(trace(unused, X).graph)
    assert targets(graph) == [aten.add.Tensor]


def written(x):
    y = x.clone()
    y[:, 1:3] = 5
    y[0].add_(x[1])
    y.mul_(2)
    y.permute(2, 0, 1)[0].add_(1)
    y.view(2, 40)[:, 1].mul_(3)
    y.transpose(1, 2)[:, :2, None].zero_()
    return y


def test_writes_become_whole_tensors_of_the_same_values():
    module = trace(written, X)
    graph, changed = replace_writes(module.graph)
    assert changed
    assert not any(target._schema.is_mutable for target in targets(graph))
    module.recompile()
    torch.testing.assert_close(module(X), written(X))
    assert not replace_writes(graph).changed


def copied(x):
    whole, wider, other = x.clone(), x.clone(), x.to(torch.int64)
    whole.copy_(x * 3)
    wider.copy_(x[:, :1] * 3)
    other.copy_(x * 3)
    return whole + wider + other


def test_a_copy_of_a_whole_tensor_is_what_it_copies():
    """The other two stay: one repeats what it copies, one rounds it."""
    module = trace(copied, X)
    graph, _ = replace_writes(module.graph)
    assert targets(graph).count(aten.copy.default) == 3
    graph, changed = drop_whole_copies(graph)
    assert changed
    assert targets(graph).count(aten.copy.default) == 2
    module.recompile()
    torch.testing.assert_close(module(X), copied(X))


def by_operators(x):
    y, n = x.abs() + 1, (x * 4).to(torch.int64)
    y.pow_(2)
    y.pow_(x.abs())
    y //= 2
    y.floor_divide_(x.abs() + 1)
    n |= 3
    n &= n + 1
    n ^= n // 2
    n <<= 2
    n >>= torch.ones_like(n)
    seen = x > 0
    seen[:, 1:] |= y[:, 1:] > 1
    return y, n, seen


def test_operators_that_write_become_those_that_do_not_whatever_their_names():
    module = trace(by_operators, X)
    graph, _ = replace_writes(module.graph)
    assert not any(target._schema.is_mutable for target in targets(graph) if hasattr(target, "_schema"))
    module.recompile()
    torch.testing.assert_close(tuple(module(X)), by_operators(X), rtol=0, atol=0)


def in_its_own_dtype(x):
    y, n = x.clone(), (x * 4).to(torch.int32)
    y[:, 1:].gt_(0)
    y[0].add_(x[1].double() / 3)
    n.mul_(torch.arange(8))
    return y, n


def test_what_is_written_keeps_the_dtype_of_its_tensor():
    module = trace(in_its_own_dtype, X)
    replace_writes(module.graph)
    module.recompile()
    for got, expected in zip(module(X), in_its_own_dtype(X), strict=True):
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected)


def seen_by_another_view(x):
    y = x.clone()
    part = y[:, :2]
    y[:, 1:3] = 5
    return part + 1


def through_a_repetition(x):
    y = x.clone()
    y.expand(3, 2, 5, 8).fill_(1)
    return y


def test_a_write_that_another_view_sees_is_seen_by_it():
    module = trace(seen_by_another_view, X)
    replace_writes(module.graph)
    module.recompile()
    torch.testing.assert_close(module(X), seen_by_another_view(X))


def test_a_write_through_a_repetition_is_refused():
    with pytest.raises(CaptureError, match=r"writes through aten\.expand"):
        replace_writes(trace(through_a_repetition, X).graph)


def test_a_write_is_seen_through_a_dropout_that_does_nothing():
    class Model(nn.Module):
        def forward(self, x):
            whole = x * 2
            nn.functional.dropout(whole, 0.5, training=False).add_(1)
            return whole

    x = torch.arange(6.0).reshape(2, 3)
    graph = torch.export.export(Model().eval(), (x,), strict=False).graph
    for run in (drop_idle_dropouts, replace_writes):
        run(graph)
    results = fx.Interpreter(fx.GraphModule({}, graph)).run(x)
    torch.testing.assert_close(results[0], x * 2 + 1)
