"""Lengths as text for tract."""

import pytest
import sympy
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod

from t2n_hf.errors import EmitError
from t2n_hf.nnef.ir import Dim
from t2n_hf.ops.dims import broadcast_shapes, dim, same

S, P = sympy.symbols("S P", integer=True)


@pytest.mark.parametrize(
    ("length", "text"),
    [
        (S + P, "P+S"),
        (S - 1, "S-1"),
        (1 - S, "1-S"),
        (-S, "0-S"),
        (1 - P - 2 * S, "1-P-2*S"),
        (3 * S * P, "3*P*S"),
        (2 * (S + P), "2*P+2*S"),
        (S**2, "S*S"),
        (FloorDiv(S + 1, 2) * 3, "3*((S+1)/2)"),
        (Mod(S, 3), "S-(S/3)*3"),
        (Max(S - 3, 0), "max(0,S-3)"),
        (Min(S, P, 4), "min(min(4,P),S)"),
        (sympy.Rational(1, 2) * S, "(S)/2"),
    ],
    ids=str,
)
def test_a_length_is_written_so_that_tract_reads_it_right(length, text):
    assert dim(length) == Dim(text)


def test_a_length_that_is_a_number_is_a_plain_integer():
    assert dim(sympy.Integer(4)) == 4
    assert dim(S - S + 2) == 2


def test_a_length_without_a_form_in_tract_is_refused():
    with pytest.raises(EmitError, match="no form in tract"):
        dim(sympy.sqrt(S))


def test_lengths_are_compared_whatever_their_form():
    assert same(S + P, P + S)
    assert same((S + 1) * 2, 2 * S + 2)
    assert not same(S, P)


def test_shapes_broadcast_aligned_on_the_right():
    assert broadcast_shapes((S, 1), (3, 1, 4)) == (3, S, 4)
