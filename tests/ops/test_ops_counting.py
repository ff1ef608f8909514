"""What is counted is calculated at one choice of lengths, as numpy does; what is not known is not guessed."""

import numpy as np
import pytest
import sympy
import torch

from t2n_hf.nnef.ir import Name
from t2n_hf.ops.counting import counted, says_both
from t2n_hf.ops.value import Value

S = sympy.Symbol("S")  # 11 here
PLACES = counted("tract_core_range", (0, S, 1), {}, (S,))


def value(example, *shape):
    return Value(Name("x"), shape, torch.int64, known=True, example=example)


@pytest.mark.parametrize(
    ("op", "operands", "options", "shape", "expected"),
    [
        ("mul", (value(PLACES, S), 2), {}, (S,), np.arange(11) * 2),
        ("sub", (S, value(PLACES, S)), {}, (S,), 11 - np.arange(11)),
        ("neg", (value(PLACES, S),), {}, (S,), -np.arange(11)),
        ("unsqueeze", (value(PLACES, S),), {"axes": [1]}, (S, 1), np.arange(11)[:, None]),
        ("tract_core_broadcast", (value(PLACES, S),), {}, (2, S), np.tile(np.arange(11), (2, 1))),
        ("concat", ([value(PLACES, S)] * 2,), {"axis": 0}, (2 * S,), np.tile(np.arange(11), 2)),
        ("tract_core_gather", (value(PLACES, S), value(PLACES[::-1], S)), {"axis": 0}, (S,), np.arange(11)[::-1]),
        ("tract_core_cast", (value(PLACES, S),), {"to": "bool"}, (S,), np.arange(11) > 0),
        ("gt", (value(PLACES, S), 3), {}, (S,), np.arange(11) > 3),
    ],
)
def test_operators_give_what_numpy_does(op, operands, options, shape, expected):
    found = counted(op, operands, options, shape)
    assert found.shape == expected.shape
    assert np.array_equal(found, expected)


def test_what_is_not_known_or_too_large_or_cannot_be_is_nothing():
    assert counted("erf", (value(PLACES, S),), {}, (S,)) is None
    assert counted("add", (value(None, S), 1), {}, (S,)) is None
    assert counted("tract_core_range", (0, S**9, 1), {}, (S**9,)) is None
    assert counted("tract_core_range", (0, S - 400, 1), {}, (S - 400,)) is None
    assert counted("reshape", (value(PLACES, S),), {}, (S, 2)) is None


def test_a_comparison_says_both_when_it_is_true_here_and_false_there():
    assert says_both(value(PLACES > 3, S))
    assert not says_both(value(PLACES >= 0, S))
    assert not says_both(value(PLACES < 0, S))
    assert not says_both(value(None, S))
