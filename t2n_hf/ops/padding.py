"""Elements put around the ends of axes, or taken away there."""

from collections.abc import Sequence
from typing import Final

import sympy
import torch

from t2n_hf.ops.dims import Length, same
from t2n_hf.ops.emit import Emit
from t2n_hf.ops.table import EMITTERS
from t2n_hf.ops.value import Value

__all__: list[str] = []

_aten = torch.ops.aten
_emits = EMITTERS.emits

# Modes by the names that tract has for them.
_MODES: Final = {"reflect": "reflect", "replicate": "replicated"}


@_emits(_aten.pad.default)
def pad(emit: Emit, x: Value, amounts: Sequence[Length], mode: str = "constant", value: float | None = None) -> Value:
    """Elements put around the last axes; `amounts` are (before, after) from the last axis on. Negative ones cut."""
    sides = _sides(x.rank, amounts)
    if mode == "constant":
        return _cut(emit, _filled(emit, x, sides, 0 if value is None else value), sides)
    if mode == "circular":
        return _circular(emit, x, sides)
    return _mirrored(emit, x, sides, mode)


@_emits(_aten.constant_pad_nd.default)
def constant_pad_nd(emit: Emit, x: Value, amounts: Sequence[Length], value: float = 0) -> Value:
    """One value put around the last axes."""
    return pad(emit, x, amounts, "constant", value)


@_emits(_aten.reflection_pad1d.default, _aten.reflection_pad2d.default, _aten.reflection_pad3d.default)
def reflection_pad(emit: Emit, x: Value, amounts: Sequence[Length]) -> Value:
    """The axes mirrored at their first and last elements."""
    return pad(emit, x, amounts, "reflect")


@_emits(_aten.replication_pad1d.default, _aten.replication_pad2d.default, _aten.replication_pad3d.default)
def replication_pad(emit: Emit, x: Value, amounts: Sequence[Length]) -> Value:
    """The first and last elements repeated."""
    return pad(emit, x, amounts, "replicate")


@_emits(_aten._pad_circular.default)
def pad_circular(emit: Emit, x: Value, amounts: Sequence[Length]) -> Value:
    """The axes begun again at their ends."""
    return pad(emit, x, amounts, "circular")


def _sides(rank: int, amounts: Sequence[Length]) -> list[tuple[Length, Length]]:
    """(before, after) for each axis, from the first on."""
    sides: list[tuple[Length, Length]] = [(0, 0)] * rank
    for place in range(len(amounts) // 2):
        sides[rank - 1 - place] = (amounts[2 * place], amounts[2 * place + 1])
    return sides


def _added(amount: Length) -> Length:
    """How much is put there: an amount may be negative, and a free one turn out to be."""
    return max(amount, 0) if isinstance(amount, int) else _most(amount, 0)


def _most(amount: sympy.Expr, other: int) -> Length:
    """The greater of the two; just the amount where it cannot be negative, as symbols are lengths."""
    terms = sympy.Add.make_args(sympy.expand(amount))
    surely = all(not term.could_extract_minus_sign() for term in terms) or type(amount).__name__ in {"Mod", "PythonMod"}
    return amount if surely else sympy.Max(amount, other)


def _cut(emit: Emit, x: Value, sides: Sequence[tuple[Length, Length]]) -> Value:
    """What negative amounts leave."""
    for axis, (before, after) in enumerate(sides):
        begin, end = _added(before) - before, _added(after) - after
        if not (same(begin, 0) and same(end, 0)):
            x = emit.slice(x, axis, begin, x.shape[axis] - end)
    return x


def _filled(emit: Emit, x: Value, sides: Sequence[tuple[Length, Length]], value: float) -> Value:
    added = [(_added(before), _added(after)) for before, after in sides]
    if not any(not same(n, 0) for side in added for n in side):
        return x
    # The value of tract's pad is a float of 32 bits.
    if x.dtype.is_floating_point and all(isinstance(n, int) for side in added for n in side):
        shape = [length + before + after for length, (before, after) in zip(x.shape, added, strict=True)]
        return emit.call("pad", x, out=(shape, x.dtype), padding=added, border="constant", value=float(value))
    return _joined(emit, x, added, value)


def _joined(emit: Emit, x: Value, sides: Sequence[tuple[Length, Length]], value: float) -> Value:
    """Constant blocks joined around: for lengths that are symbols, and for any dtype."""
    for axis, side in enumerate(sides):
        blocks = [None if same(n, 0) else [*x.shape[:axis], n, *x.shape[axis + 1 :]] for n in side]
        before, after = [None if shape is None else emit.full(tuple(shape), value, x.dtype) for shape in blocks]
        x = emit.concat([part for part in (before, x, after) if part is not None], axis, x.dtype)
    return x


def _circular(emit: Emit, x: Value, sides: Sequence[tuple[Length, Length]]) -> Value:
    # torch goes round what the negative amounts leave.
    x = _cut(emit, x, sides)
    for axis, (before, after) in enumerate(sides):
        length, front, back = x.shape[axis], _added(before), _added(after)
        parts = [] if same(front, 0) else [emit.slice(x, axis, length - front, length)]
        parts += [x] + ([] if same(back, 0) else [emit.slice(x, axis, 0, back)])
        x = emit.concat(parts, axis, x.dtype)
    return x


def _mirrored(emit: Emit, x: Value, sides: Sequence[tuple[Length, Length]], mode: str) -> Value:
    if mode not in _MODES:
        raise emit.refuse(f"a padding of mode {mode!r}; expected constant, circular, {' or '.join(_MODES)}")
    added = [(_added(before), _added(after)) for before, after in sides]
    if all(isinstance(n, int) for side in added for n in side):
        shape = [length + before + after for length, (before, after) in zip(x.shape, added, strict=True)]
        return _cut(emit, emit.call("pad", x, out=(shape, x.dtype), padding=added, border=_MODES[mode]), sides)
    for axis, (before, after) in enumerate(added):
        if not (same(before, 0) and same(after, 0)):
            x = emit.gather(x, _mirrored_places(emit, x.shape[axis], before, after, mode), axis)
    return _cut(emit, x, sides)


def _mirrored_places(emit: Emit, length: Length, before: Length, after: Length, mode: str) -> Value:
    """Which element of an axis stands at each place of the longer one."""
    places = emit.range(0, length + before + after, torch.int64)
    places = emit.binary("sub", places, emit.full((), before, torch.int64), torch.int64)
    last = emit.full((), length - 1, torch.int64)
    if mode == "replicate":
        return emit.binary("min", emit.binary("max", places, 0, torch.int64), last, torch.int64)
    from_end = emit.binary("sub", last, emit.unary("abs", places), torch.int64)
    return emit.binary("sub", last, emit.unary("abs", from_end), torch.int64)
