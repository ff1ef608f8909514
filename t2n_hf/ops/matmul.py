"""Products of matrices."""

from collections.abc import Sequence

import torch

from t2n_hf.ops.dims import product
from t2n_hf.ops.emit import Emit
from t2n_hf.ops.table import EMITTERS
from t2n_hf.ops.value import Operand, Value

__all__: list[str] = []

_aten = torch.ops.aten
_emits = EMITTERS.emits


def _product(emit: Emit, left: Value, right: Value, *, transpose_right: bool = False) -> Value:
    """`left @ right` in the node's dtype; tract multiplies floats only, so integers go through f32, exact to 2**24."""
    dtype = emit.dtype
    if dtype.is_floating_point:
        return emit.matmul(emit.cast(left, dtype), emit.cast(right, dtype), transpose_right=transpose_right)
    a, b = emit.cast(left, torch.float32), emit.cast(right, torch.float32)
    return emit.cast(emit.matmul(a, b, transpose_right=transpose_right), dtype)


@_emits(_aten.linear.default)
def linear(emit: Emit, x: Value, weight: Value, bias: Value | None = None) -> Value:
    """`x @ weight.T + bias`; a vector for a weight is the only row of one."""
    if weight.rank == 1:
        product = matmul(emit, x, weight)
    elif x.rank == 1:
        product = emit.squeeze(_product(emit, emit.unsqueeze(x, [0]), weight, transpose_right=True), [0])
    else:
        product = _product(emit, x, weight, transpose_right=True)
    return product if bias is None else emit.binary("add", product, bias, emit.dtype)


@_emits(_aten.matmul.default, _aten.mm.default, _aten.bmm.default)
def matmul(emit: Emit, left: Value, right: Value) -> Value:
    """`left @ right`; a vector on the left is a row, on the right a column."""
    row, column = left.rank == 1, right.rank == 1
    a = emit.unsqueeze(left, [0]) if row else left
    b = emit.unsqueeze(right, [1]) if column else right
    product = _product(emit, a, b)
    axes = [product.rank - 2] * row + [product.rank - 1] * column
    return emit.squeeze(product, axes)


@_emits(_aten.mv.default, _aten.dot.default)
def vector_product(emit: Emit, left: Value, right: Value) -> Value:
    """A matrix or a vector times a vector."""
    return matmul(emit, left, right)


def _with_sum(emit: Emit, start: Value, product: Value, beta: Operand, alpha: Operand) -> Value:
    scaled = product if alpha == 1 else emit.binary("mul", product, alpha, emit.dtype)
    if beta == 0:
        return scaled
    added: Value = start if beta == 1 else emit.binary("mul", start, beta, emit.dtype)
    return emit.binary("add", scaled, added, emit.dtype)


@_emits(_aten.addmm.default, _aten.baddbmm.default)
def addmm(emit: Emit, start: Value, left: Value, right: Value, beta: Operand = 1, alpha: Operand = 1) -> Value:
    """Beta * start + alpha * (left @ right)."""
    return _with_sum(emit, start, _product(emit, left, right), beta, alpha)


@_emits(_aten.addmv.default)
def addmv(emit: Emit, start: Value, left: Value, right: Value, beta: Operand = 1, alpha: Operand = 1) -> Value:
    """Beta * start + alpha * (left @ vector)."""
    return _with_sum(emit, start, matmul(emit, left, right), beta, alpha)


@_emits(_aten.outer.default, _aten.ger.default)
def outer(emit: Emit, left: Value, right: Value) -> Value:
    """Each element of one vector times each of another."""
    op = "tract_core_bitand" if emit.dtype is torch.bool else "mul"
    return emit.binary(op, emit.unsqueeze(left, [1]), emit.unsqueeze(right, [0]), emit.dtype)


@_emits(_aten.addbmm.default)
def addbmm(emit: Emit, start: Value, left: Value, right: Value, beta: Operand = 1, alpha: Operand = 1) -> Value:
    """Beta * start + alpha * (the sum of left @ right over their first axis)."""
    total = emit.reduce("sum_reduce", _product(emit, left, right), [0], keepdim=False)
    return _with_sum(emit, start, total, beta, alpha)


@_emits(_aten.bilinear.default)
def bilinear(emit: Emit, left: Value, right: Value, weight: Value, bias: Value | None = None) -> Value:
    """For each matrix of `weight`, what it makes of two vectors, the last axes of left and right: a number."""
    count, rows, columns = weight.shape
    flat = emit.reshape(emit.transpose(weight, [1, 0, 2]), (rows, count * columns))
    first = emit.unsqueeze(left, [0]) if left.rank == 1 else left
    wide = emit.reshape(_product(emit, first, flat), (*left.shape[:-1], count, columns))
    products = emit.binary("mul", wide, emit.unsqueeze(right, [right.rank - 1]), emit.dtype)
    total = emit.reduce("sum_reduce", products, [products.rank - 1], keepdim=False)
    return total if bias is None else emit.binary("add", total, bias, emit.dtype)


def _summed(emit: Emit, x: Value, axes: Sequence[int], other: Value, others: Sequence[int]) -> Value:
    """Sum `x` over those of its `axes` that meet an axis of length 1 of the other."""
    alone = [axis for axis, met in zip(axes, others, strict=True) if other.shape[met] == 1 and x.shape[axis] != 1]
    return emit.reduce("sum_reduce", x, alone, keepdim=True) if alone else x


@_emits(_aten.tensordot.default)
def tensordot(emit: Emit, left: Value, right: Value, dims_self: Sequence[int], dims_other: Sequence[int]) -> Value:
    """The sum of products over axes of two tensors, the other axes of both in their order.

    As in torch, an axis of length 1 meets one of any length, whose elements then are summed.
    """
    mine, theirs = ([axis % x.rank for axis in dims] for x, dims in ((left, dims_self), (right, dims_other)))
    left, right = _summed(emit, left, mine, right, theirs), _summed(emit, right, theirs, left, mine)
    rows = [axis for axis in range(left.rank) if axis not in mine]
    columns = [axis for axis in range(right.rank) if axis not in theirs]
    depth = product(left.shape[axis] for axis in mine)
    a = emit.reshape(emit.transpose(left, rows + mine), (product(left.shape[axis] for axis in rows), depth))
    b = emit.reshape(emit.transpose(right, theirs + columns), (depth, product(right.shape[axis] for axis in columns)))
    return emit.reshape(_product(emit, a, b), emit.shape)
