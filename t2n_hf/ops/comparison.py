"""Comparisons, choices, and logic.

tract 0.23 splits `lt`, `le` and `ge` of two index ranges wrongly when a length is symbolic (a wrong shape, or NaN). So
every order is written with `gt`, and `not`.
"""

from collections.abc import Callable
from typing import Final

import torch

from t2n_hf.ops.emit import Emit
from t2n_hf.ops.table import EMITTERS
from t2n_hf.ops.value import Operand, Value

__all__ = ["compare"]

_aten = torch.ops.aten
_emits = EMITTERS.emits


def _common(left: Operand, right: Operand) -> torch.dtype:
    """The dtype that torch compares in, booleans as integers: tract has no order and no equality on booleans."""
    tensors = [x for x in (left, right) if isinstance(x, Value)]
    numbers = [x for x in (left, right) if not isinstance(x, Value)]
    dtype = torch.promote_types(tensors[0].dtype, tensors[-1].dtype)
    if any(isinstance(x, float) for x in numbers) and not dtype.is_floating_point:
        dtype = torch.float32
    return torch.int64 if dtype is torch.bool else dtype


def compare(emit: Emit, op: str, left: Operand, right: Operand) -> Value:
    """`left op right` for op in eq, ne, gt, lt, ge, le, as booleans."""
    dtype = _common(left, right)

    def test(name: str, a: Operand, b: Operand) -> Value:
        return emit.binary(name, a, b, dtype, torch.bool)

    if op in ("eq", "ne", "gt"):
        return test(op, left, right)
    if op == "lt":
        return test("gt", right, left)
    above = (right, left) if op == "ge" else (left, right)
    if dtype.is_floating_point:  # with NaN no order holds, so this is not the opposite of another order
        strict = test("gt", above[1], above[0])
        return emit.binary("tract_core_bitor", strict, test("eq", left, right), torch.bool)
    return emit.unary("not", test("gt", *above))


def _comparison(op: str) -> Callable[[Emit, Operand, Operand], Value]:
    def emitter(emit: Emit, left: Operand, right: Operand) -> Value:
        return compare(emit, op, left, right)

    return emitter


_COMPARISONS: Final = {
    "eq": (_aten.eq.Tensor, _aten.eq.Scalar),
    "ne": (_aten.ne.Tensor, _aten.ne.Scalar, _aten.not_equal.Tensor, _aten.not_equal.Scalar),
    "gt": (_aten.gt.Tensor, _aten.gt.Scalar, _aten.greater.Tensor, _aten.greater.Scalar),
    "lt": (_aten.lt.Tensor, _aten.lt.Scalar, _aten.less.Tensor, _aten.less.Scalar),
    "ge": (_aten.ge.Tensor, _aten.ge.Scalar, _aten.greater_equal.Tensor, _aten.greater_equal.Scalar),
    "le": (_aten.le.Tensor, _aten.le.Scalar, _aten.less_equal.Tensor, _aten.less_equal.Scalar),
}
for _name, _overloads in _COMPARISONS.items():
    _emits(*_overloads)(_comparison(_name))


def _truth(emit: Emit, x: Operand) -> Operand:
    return emit.cast(x, torch.bool) if isinstance(x, Value) else bool(x)


# The bit operators serve for booleans too: on `and` of two conditions on index ranges (a sliding window's mask) tract
# 0.23.9 does not come to an end when it loads an archive that asserts something of their lengths.
def _bitwise(op: str) -> Callable[[Emit, Operand, Operand], Value]:
    def emitter(emit: Emit, left: Operand, right: Operand) -> Value:
        return emit.binary(f"tract_core_bit{op}", _operand(emit, left), _operand(emit, right), emit.dtype)

    return emitter


def _operand(emit: Emit, x: Operand) -> Operand:
    return x if isinstance(x, Value) else emit.full((), x, emit.dtype)


_BITWISE: Final = {
    "and": (
        _aten.bitwise_and.Tensor,
        _aten.bitwise_and.Scalar,
        _aten.bitwise_and_.Tensor,
        _aten.__and__.Tensor,
        _aten.__and__.Scalar,
        _aten.__iand__.Tensor,
    ),
    "or": (
        _aten.bitwise_or.Tensor,
        _aten.bitwise_or.Scalar,
        _aten.bitwise_or_.Tensor,
        _aten.__or__.Tensor,
        _aten.__or__.Scalar,
        _aten.__ior__.Tensor,
    ),
    "xor": (_aten.bitwise_xor.Tensor, _aten.bitwise_xor.Scalar, _aten.__xor__.Tensor, _aten.__xor__.Scalar),
}
for _name, _overloads in _BITWISE.items():
    _emits(*_overloads)(_bitwise(_name))


def _logical(op: str) -> Callable[[Emit, Value, Value], Value]:
    def emitter(emit: Emit, left: Value, right: Value) -> Value:
        return emit.binary(op, _truth(emit, left), _truth(emit, right), torch.bool)

    return emitter


for _name, _overloads in {
    "tract_core_bitand": (_aten.logical_and.default, _aten.logical_and_.default),
    "tract_core_bitor": (_aten.logical_or.default, _aten.logical_or_.default),
    "tract_core_bitxor": (_aten.logical_xor.default,),
}.items():
    _emits(*_overloads)(_logical(_name))


@_emits(_aten.logical_not.default, _aten.logical_not_.default)
def logical_not(emit: Emit, x: Value) -> Value:
    """Whether x is zero."""
    return emit.unary("not", emit.cast(x, torch.bool))


@_emits(_aten.bitwise_not.default)
def bitwise_not(emit: Emit, x: Value) -> Value:
    """Each bit turned; of an integer that is -1 - x."""
    if x.dtype is torch.bool:
        return emit.unary("not", x)
    return emit.binary("sub", -1, x, x.dtype)


@_emits(_aten.where.self, _aten.where.Scalar, _aten.where.ScalarSelf, _aten.where.ScalarOther)
def where(emit: Emit, condition: Value, left: Operand, right: Operand) -> Value:
    """`left` where the condition holds, else `right`."""
    if emit.dtype is torch.bool:  # select knows numbers
        chosen = emit.select(condition, _as_integer(emit, left), _as_integer(emit, right), torch.int64)
        return emit.cast(chosen, torch.bool)
    return emit.select(condition, left, right, emit.dtype)


def _as_integer(emit: Emit, x: Operand) -> Operand:
    return emit.cast(x, torch.int64) if isinstance(x, Value) else int(x)


@_emits(_aten.masked_fill.Scalar, _aten.masked_fill.Tensor, _aten.masked_fill_.Scalar, _aten.masked_fill_.Tensor)
def masked_fill(emit: Emit, x: Value, mask: Value, value: Operand) -> Value:
    """Value where mask, else x."""
    return where(emit, mask, value, x)


@_emits(_aten.isnan.default)
def isnan(emit: Emit, x: Value) -> Value:
    """Whether x is not equal to itself."""
    return emit.binary("ne", x, x, _common(x, x), torch.bool)


@_emits(_aten.isinf.default)
def isinf(emit: Emit, x: Value) -> Value:
    """Whether x is plus or minus infinity."""
    if not x.dtype.is_floating_point:
        return emit.full(x.shape, 0, torch.bool)
    return emit.binary("eq", emit.unary("abs", x), float("inf"), x.dtype, torch.bool)
