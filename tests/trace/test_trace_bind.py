"""Calls of layers are bound as `inspect` binds them, whatever the signature."""

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from t2n_hf.trace.layers import PieceError, bind

A, B, C = (torch.full((2,), float(value)) for value in range(3))


class Plain(nn.Module):
    def forward(self, x, mask=None, *, cache=None):
        return x


class Rest(nn.Module):
    def forward(self, x, /, *more, scale=1.0, **options):
        return x


class OnlyRest(nn.Module):
    def forward(self, *args, **kwargs):
        return args


CALLS = [
    (Plain, (A,), {}),
    (Plain, (A, B), {"cache": C}),
    (Plain, (), {"cache": C, "x": A}),
    (Plain, (), {"x": A, "cache": C}),
    (Rest, (A,), {}),
    (Rest, (A, B, C), {"scale": 2.0}),
    (Rest, (A,), {"second": B, "x": C, "first": A}),
    (OnlyRest, (), {}),
    (OnlyRest, (A, B), {"args": C}),
]


def plainly(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, list[Any]]]:
    bound = inspect.signature(layer.forward).bind(*args, **kwargs)
    found = []
    for name, value in bound.arguments.items():
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            found += [(key, [one]) for key, one in value.items()]
        else:
            found.append((name, list(value) if isinstance(value, tuple) else [value]))
    return found


@pytest.mark.parametrize("own_forward", [False, True])
@pytest.mark.parametrize(("kind", "args", "kwargs"), CALLS)
def test_arguments_have_the_names_order_and_values_that_inspect_gives(kind, args, kwargs, own_forward: bool):
    layer = kind()
    if own_forward:
        layer.forward = layer.forward
    expected = plainly(layer, args, kwargs)
    for _ in range(2):  # the second call of a form is bound by the first one
        call = bind(layer, args, kwargs, "a layer")
        again = call.rebuilt(list(call.leaves))
        for found in (
            [(one.name, call.leaves[one.start : one.stop]) for one in call.arguments],
            plainly(layer, again.args, again.kwargs),
        ):
            assert [name for name, _ in found] == [name for name, _ in expected]
            assert [list(map(id, values)) for _, values in found] == [list(map(id, values)) for _, values in expected]


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((A, B, C), {}), ((A,), {"x": B}), ((A,), {"other": B})])
def test_calls_that_do_not_fit_are_refused_each_time(args, kwargs):
    for _ in range(2):
        with pytest.raises(PieceError, match="does not fit its signature"):
            bind(Plain(), args, kwargs, "a layer")
