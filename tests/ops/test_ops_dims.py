"""Lengths as text for tract."""

import pytest
import sympy
from torch.utils._sympy.functions import (
    CeilToInt,
    FloorDiv,
    FloorToInt,
    IntTrueDiv,
    Max,
    Min,
    Mod,
    PythonMod,
    ToFloat,
    TruncToInt,
)

from t2n_hf.errors import EmitError
from t2n_hf.nnef.ir import Dim
from t2n_hf.ops.dims import broadcast_shapes, dim, length_of, same

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
        (S - Mod(S, 3), "S-(S-(S/3)*3)"),
        (S - FloorDiv(-S, 4), "S-(0-((S+3)/4))"),
        (S - FloorDiv(S, 2), "(S+1)/2"),
        (4 * S - 4 * FloorDiv(S, 2) - 1, "4*((S+1)/2)-1"),
        (S * P - sympy.floor(S * P / 2), "(P*S+1)/2"),
        (S + Mod(S, 2), "2*((S+1)/2)"),
        (2 * S - FloorDiv(S, 2), "2*S-S/2"),
        (FloorDiv(S - FloorDiv(S, 2), 2), "((S+1)/2)/2"),
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


@pytest.mark.parametrize(
    ("length", "simple"),
    [
        (FloorDiv(S * P + S - 1, S), P),
        (FloorDiv(3 * S * P**2 + 2 * S, S), 3 * P**2 + 2),
        (4 * FloorDiv(S - 1, S), 0),
        (FloorDiv(P + S, S), FloorDiv(P + S, S)),
        (FloorDiv(S + 1, S), FloorDiv(S + 1, S)),
        (FloorDiv(S * P / 2, S), FloorDiv(S * P / 2, S)),
        (FloorDiv(FloorDiv(S, 2) * S, S), FloorDiv(FloorDiv(S, 2) * S, S)),
    ],
    ids=str,
)
def test_a_multiple_of_a_length_is_divided_by_it(length, simple):
    assert length_of(length, {S: S, P: P}) == simple


def test_lengths_are_compared_whatever_their_form():
    assert same(S + P, P + S)
    assert same((S + 1) * 2, 2 * S + 2)
    assert not same(S, P)


def test_shapes_broadcast_aligned_on_the_right():
    assert broadcast_shapes((S, 1), (3, 1, 4)) == (3, S, 4)


class Whole(int):
    """An integer with tract's arithmetic: its division rounds towards 0."""

    def __add__(self, other):
        return Whole(int(self) + int(other))

    def __sub__(self, other):
        return Whole(int(self) - int(other))

    def __mul__(self, other):
        return Whole(int(self) * int(other))

    __radd__, __rmul__ = __add__, __mul__

    def __rsub__(self, other):
        return Whole(int(other) - int(self))

    def __truediv__(self, other):
        return Whole(abs(int(self)) // int(other) * (1 if self >= 0 else -1))


DIVISIONS = [
    FloorDiv(S + 1, 2) * 3,
    FloorDiv(-S, 4),
    FloorDiv(1 - S, 4) + S,
    2 * S - FloorDiv(1 - S, 4),
    S - Mod(S, 3),
    2 * S - PythonMod(-S, 4),
    2 * S - FloorDiv(S, 2) * 2 - Mod(S, 4),
    Mod(S, 3),
    Mod(S + 2, 3) + 1,
    PythonMod(-S, 4),
    PythonMod(-S - 1, 4) + S,
    sympy.floor((S + 3) / 2) - 1,
    sympy.ceiling((S + 3) / 2),
    sympy.ceiling(S / 4) * 4,
    TruncToInt(sympy.Float(1.5) * ToFloat(S)),
    TruncToInt(sympy.Float(0.25) * ToFloat(S + 2)) + 1,
    CeilToInt(sympy.Float(0.25) * ToFloat(S)),
]


@pytest.mark.parametrize("length", DIVISIONS, ids=str)
def test_divisions_come_out_the_same_by_the_arithmetic_of_tract(length):
    text = str(dim(length_of(length, {S: S})))
    for number in range(1, 25):
        assert eval(text, {"S": Whole(number)}) == int(length.subs(S, number)), f"{text} at S={number}"


def test_lengths_that_floats_led_to_are_whole_again():
    assert same(length_of(TruncToInt(sympy.Float(2.0) * ToFloat(S)), {S: S}), 2 * S)
    with pytest.raises(EmitError, match=r"product with 1\.4.*factor such as"):
        length_of(TruncToInt(sympy.Float(1.4) * ToFloat(S)), {S: S})


@pytest.mark.parametrize(
    ("length", "text"),
    [
        (CeilToInt(IntTrueDiv(S, 3)), "(S+2)/3"),
        (FloorToInt(IntTrueDiv(S, 3)), "S/3"),
        (FloorToInt(2 * IntTrueDiv(S, 3)), "(2*S)/3"),
        (CeilToInt(IntTrueDiv(S, 4) + IntTrueDiv(S, 2)), "(3*S+3)/4"),
    ],
    ids=str,
)
def test_a_quotient_that_is_rounded_is_rounded_once(length, text):
    assert dim(length_of(length, {S: S, P: P})) == Dim(text)


def test_what_floats_round_before_the_module_does_is_refused():
    with pytest.raises(EmitError, match="rounded from more than a quotient by 49, which floats do not hold"):
        length_of(FloorToInt(49 * IntTrueDiv(S, 49)), {S: S})
