"""Recurrences of state-space models in tract, against their definition in PyTorch, at lengths that were not traced."""

import pytest
import torch
from op_harness import Case, build_and_run, compare, floats

from t2n_hf.ops.state_space import gated_scan, linear_scan, mlstm_scan, wkv_scan

pytestmark = pytest.mark.tract

STATE = (2, 3, 4)  # batch, rows, columns


def gated(length, batch=2, *, seed=0):
    """query, key, value, decay, state, rate, beta: columns are summed over."""
    shapes = [(length, batch, 1, 4), (length, batch, 1, 4), (length, batch, 3, 1), (length, batch, 3, 1)]
    query, key, value, decay = (floats(*shape, seed=seed + at) for at, shape in enumerate(shapes))
    state, rate = floats(batch, 3, 4, seed=seed + 5), -floats(1, 3, 4, seed=seed + 6).abs()
    beta = torch.sigmoid(floats(length, batch, 3, 1, seed=seed + 7))
    return query, key, value, decay.abs(), state, rate, beta


def with_rate(query, key, value, decay, state, rate, beta):
    return gated_scan(query, key, value, decay, state, 2, rate)


def delta_rule(query, key, value, decay, state, rate, beta):
    return gated_scan(query, key, value, -decay, state, 2, None, beta)


def over_rows(query, key, value, decay, state, rate, beta):
    turned = [x.transpose(-1, -2) for x in (query, key, value, decay, state, rate, beta)]
    return gated_scan(*turned[:5], 1, turned[5], turned[6])


def linear(length, batch=2, *, seed=0):
    factor, term = torch.sigmoid(floats(length, batch, 3, seed=seed)), floats(length, batch, 3, seed=seed + 1)
    return factor, term, floats(batch, 3, seed=seed + 2)


def wkv(length, batch=2, *, seed=0):
    key, value = floats(length, batch, 3, seed=seed) * 4, floats(length, batch, 3, seed=seed + 1)
    decay, first = -floats(3, seed=7).abs(), floats(3, seed=8)
    top, bottom, peak = (floats(batch, 3, seed=seed + at) for at in (2, 3, 4))
    return key, value, decay, first, top, bottom.abs(), peak


def mlstm(length, batch=2, *, seed=0):
    """query, key, value, both gates, memory, normalizer, peak: 3 heads, keys of 4, values of 5."""
    shapes = [(length, batch, 3, width) for width in (4, 4, 5, 1)]
    query, key, value, write = (floats(*shape, seed=seed + at) for at, shape in enumerate(shapes))
    keep = torch.nn.functional.logsigmoid(floats(length, batch, 3, 1, seed=seed + 4))
    memory, normalizer, peak = (
        floats(batch, 3, *rest, seed=seed + at) for at, rest in ((5, (4, 5)), (6, (4,)), (7, (1,)))
    )
    return query, key, value, write * 4, keep, memory, normalizer, peak


def with_eps(*tensors):
    return mlstm_scan(*tensors, 1e-3)


def free(count, sequences, batched):
    return {(place, 0): "S" for place in sequences} | {(p, 0 if p not in sequences else 1): "B" for p in batched}


GATED_LENGTHS = free(7, (0, 1, 2, 3, 6), (0, 1, 2, 3, 4, 6))
CASES = [
    Case(
        name,
        function,
        gated(5),
        GATED_LENGTHS,
        (gated(1, 2, seed=9), gated(8, 3, seed=10)),
        1e-5,
    )
    for name, function in (("with_rate", with_rate), ("delta_rule", delta_rule), ("over_rows", over_rows))
] + [
    Case("linear", linear_scan, linear(5), free(3, (0, 1), (0, 1, 2)), (linear(1), linear(7, 3)), 1e-5),
    Case("mlstm", with_eps, mlstm(5), free(8, range(5), range(8)), (mlstm(1), mlstm(7, 3)), 1e-5),
    Case("wkv", wkv_scan, wkv(5), free(7, (0, 1), (0, 1, 4, 5, 6)), (wkv(1), wkv(7, 3)), 1e-5),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return build_and_run(CASES, tmp_path_factory.mktemp("state_space"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_walk_in_tract_is_that_of_pytorch(case, results):
    compare(case, results / case.name)


def test_a_walk_can_be_cut_anywhere():
    query, key, value, decay, state, _, beta = gated(6)
    whole, last = gated_scan(query, key, value, -decay, state, 2, None, beta)
    first, between = gated_scan(query[:4], key[:4], value[:4], -decay[:4], state, 2, None, beta[:4])
    second, end = gated_scan(query[4:], key[4:], value[4:], -decay[4:], between, 2, None, beta[4:])
    torch.testing.assert_close(torch.cat([first, second]), whole)
    torch.testing.assert_close(end, last)


def test_the_delta_rule_recalls_what_was_written_last():
    """Keys of length 1 and beta 1: reading with the key gives the value, whatever the state was."""
    key = torch.nn.functional.normalize(floats(3, 1, 1, 4), dim=-1)
    value, state = floats(3, 1, 3, 1, seed=1), floats(1, 3, 4, seed=2)
    outputs, _ = gated_scan(key, key, value, torch.zeros(3, 1, 1, 1), state, 2, None, torch.ones(3, 1, 1, 1))
    torch.testing.assert_close(outputs, value[..., 0])


def test_what_a_matrix_memory_gives_does_not_depend_on_how_its_exponents_are_kept_small():
    query, key, value, write, keep, memory, normalizer, peak = (x.double() for x in mlstm(6))
    outputs, *_ = mlstm_scan(query, key, value, write, keep, memory, normalizer, peak, 0.0)
    memory, normalizer = memory * peak[..., None].exp(), normalizer * peak.exp()
    for t in range(6):
        memory = (
            memory * keep[t, ..., None].exp() + write[t, ..., None].exp() * key[t, ..., None] * value[t][..., None, :]
        )
        normalizer = normalizer * keep[t].exp() + write[t].exp() * key[t]
        weight = torch.einsum("bhk,bhk->bh", query[t], normalizer).abs().clamp(min=1.0)
        wanted = torch.einsum("bhk,bhkv->bhv", query[t], memory) / weight[..., None]
        torch.testing.assert_close(outputs[t], wanted)
