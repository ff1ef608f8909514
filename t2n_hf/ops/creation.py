"""Tensors made from numbers."""

from typing import Any, Final

import sympy
import torch

from t2n_hf.ops.dims import Length
from t2n_hf.ops.emit import Emit
from t2n_hf.ops.repetition import filled
from t2n_hf.ops.table import EMITTERS
from t2n_hf.ops.value import Number, Operand, Value

__all__: list[str] = []

_aten = torch.ops.aten
_emits = EMITTERS.emits

_ZEROS: Final = (
    _aten.zeros.default,
    _aten.zeros_like.default,
    _aten.new_zeros.default,
    _aten.zero.default,
    _aten.zero_.default,
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.empty_permuted.default,
    _aten.empty_strided.default,
)
_ONES: Final = (_aten.ones.default, _aten.ones_like.default, _aten.new_ones.default)


@_emits(*_ZEROS)
def zeros(emit: Emit, *_: object, **__: object) -> Value:
    """Zeros; also what torch leaves undefined."""
    return filled(emit, 0)


@_emits(*_ONES)
def ones(emit: Emit, *_: object, **__: object) -> Value:
    """Ones."""
    return filled(emit, 1)


@_emits(_aten.full.default, _aten.full_like.default, _aten.fill.Scalar, _aten.fill_.Scalar)
@_emits(_aten.fill.Tensor, _aten.fill_.Tensor)
def full(emit: Emit, _like: Any, number: Number | Value, **_: object) -> Value:  # noqa: ANN401 - a shape or a tensor
    """One value everywhere."""
    if isinstance(number, Value):
        return emit.broadcast(emit.cast(number, emit.dtype), emit.shape)
    return filled(emit, number)


@_emits(_aten.new_full.default)
def new_full(emit: Emit, _like: Value, _size: Any, number: Number | Value, **_: object) -> Value:  # noqa: ANN401
    """One value everywhere."""
    return full(emit, None, number)


@_emits(_aten.scalar_tensor.default)
def scalar_tensor(emit: Emit, number: Operand, **_: object) -> Value:
    """A number as a tensor of rank 0."""
    return emit.tensor(number, emit.dtype)


@_emits(_aten.arange.default)
def arange(emit: Emit, end: Number, **_: object) -> Value:
    """0, 1, ... below end."""
    return arange_step(emit, 0, end, 1)


@_emits(_aten.arange.start)
def arange_start(emit: Emit, start: Number, end: Number, **_: object) -> Value:
    """start, start + 1, ... below end."""
    return arange_step(emit, start, end, 1)


@_emits(_aten.arange.start_step)
def arange_step(emit: Emit, start: Number, end: Number, step: Number = 1, **_: object) -> Value:
    """start, start + step, ... up to end, not included."""
    if all(_whole(number) for number in (start, end, step)) and not isinstance(step, sympy.Expr):
        return emit.range(_length(start), _length(end), emit.dtype, int(step))
    # Steps that are no integers, or lengths: count, and scale.
    (count,) = emit.shape
    places = emit.range(0, count, emit.dtype)
    return emit.binary("add", emit.binary("mul", places, step, emit.dtype), start, emit.dtype)


def _whole(number: Number) -> bool:
    return isinstance(number, int | sympy.Expr) or (isinstance(number, float) and number.is_integer())


def _length(number: Number) -> Length:
    return number if isinstance(number, sympy.Expr) else int(number)


@_emits(_aten.linspace.default)
def linspace(emit: Emit, start: float, end: float, steps: int, **_: object) -> Value:
    """`steps` numbers from start to end, both included."""
    places = emit.range(0, steps, emit.dtype)
    step = (end - start) / (steps - 1) if steps > 1 else 0.0
    return emit.binary("add", emit.binary("mul", places, step, emit.dtype), start, emit.dtype)


@_emits(_aten.eye.default, _aten.eye.m)
def eye(emit: Emit, *_: object, **__: object) -> Value:
    """Ones on the diagonal, zeros elsewhere."""
    rows, columns = emit.shape
    down = emit.unsqueeze(emit.range(0, rows, torch.int64), [1])
    along = emit.unsqueeze(emit.range(0, columns, torch.int64), [0])
    return emit.cast(emit.binary("eq", down, along, torch.int64, torch.bool), emit.dtype)


@_emits(_aten.tril.default, _aten.tril_.default)
def tril(emit: Emit, x: Value, diagonal: int = 0) -> Value:
    """What is on and below a diagonal, zeros elsewhere."""
    return emit.unary("tract_core_trilu", x, upper=False, k=diagonal)


@_emits(_aten.triu.default, _aten.triu_.default)
def triu(emit: Emit, x: Value, diagonal: int = 0) -> Value:
    """What is on and above a diagonal, zeros elsewhere."""
    return emit.unary("tract_core_trilu", x, upper=True, k=diagonal)
