"""Writes calls of NNEF and tract operators, keeping track of shapes and dtypes, by the rules that tract's parser has.

Ranks are aligned before every call (tract would align them on the left), axes are never negative, numbers next
to tensors have the tensors' dtype, and dtypes are made equal by casts.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

import sympy
import torch

from t2n_hf.errors import EmitError
from t2n_hf.nnef.ir import Assign, Name
from t2n_hf.nnef.names import Namer
from t2n_hf.ops.bodies import Bodies
from t2n_hf.ops.counting import counted, says_both
from t2n_hf.ops.dims import Length, Shape, added_axes, broadcast_shapes, dim, dims, is_fixed, is_lost, same
from t2n_hf.ops.joins import is_join
from t2n_hf.ops.value import Number, Operand, Value, is_looked_up, is_number, tract_dtype, values_in

__all__ = ["Builder", "Out"]

# Block formats that tract multiplies by. It fails to make a product with any other one runnable.
_MULTIPLIED: Final = frozenset({"q4_0"})
_ROUNDED: Final = frozenset({"ceil", "floor"})
_COMPARED: Final = frozenset({"eq", "gt", "ne"})

Out: TypeAlias = tuple[Iterable[Length], torch.dtype]


class Builder:
    """Appends calls to `body`.

    Attributes:
        body: what was written so far.
        base: stem of the names that new values get.
        site: the operator that is being written and where it comes from, for messages.
        forced_dense: name of a block weight -> why its format cannot be used.
        fragments: bodies of loops, shared by all that write one document.
    """

    def __init__(self, namer: Namer, fragments: Bodies | None = None) -> None:
        self.body: list[Assign] = []
        self.base = "value"
        self.site = ""
        self.forced_dense: dict[str, str] = {}
        self.fragments = Bodies() if fragments is None else fragments
        self._namer = namer
        self._known: dict[str, list[Value]] = {}

    # Calls

    def call(self, op: str, *args: Any, out: Out, **kwargs: Any) -> Value:  # noqa: ANN401 - operands and lists of them
        """Write `name = op(*args, **kwargs)`, where the result has shape and dtype `out`."""
        return self.call_many(op, *args, outs=[out], **kwargs)[0]

    def call_many(self, op: str, *args: Any, outs: Sequence[Out], **kwargs: Any) -> list[Value]:  # noqa: ANN401
        """Write a call with several results; one that was written before is not repeated."""
        arguments = tuple(self._argument(arg) for arg in args)
        named = {key: self._argument(value) for key, value in kwargs.items()}
        key = repr((op, arguments, named))
        if key not in self._known:
            given = list(values_in((args, kwargs)))
            known, filled = (all(getattr(value, kind, False) for value in given) for kind in ("known", "filled"))
            filled, rows = filled and op != "tract_core_range", is_looked_up(op, named, given)
            values = [
                Value(Name(self._namer.unique(self.base)), (*shape,), dtype, known=known, filled=filled, looked_up=rows)
                for shape, dtype in outs
            ]
            if known:
                values = [replace(value, example=counted(op, args, kwargs, value.shape)) for value in values]
            self.body.append(Assign(tuple(value.name.text for value in values), op, arguments, named))
            self._known[key] = values
        return list(self._known[key])

    def _argument(self, arg: Any) -> Any:  # noqa: ANN401 - an argument of the graph model
        if isinstance(arg, Value):
            if arg.block is not None:
                self.forced_dense.setdefault(arg.name.text, f"{self.site} needs its dense values")
            return arg.name
        if isinstance(arg, sympy.Expr):
            return dim(arg)
        if isinstance(arg, list | tuple):
            return type(arg)(self._argument(item) for item in arg)
        return arg

    # Numbers and dtypes

    def literal(self, number: Number, dtype: torch.dtype) -> Any:  # noqa: ANN401 - a literal or a value
        """A number as an operand beside tensors of `dtype`."""
        if isinstance(number, sympy.Expr) and not number.is_number:
            return self._symbolic(number, dtype)
        if dtype is torch.bool:
            return bool(number)
        if number != number:  # NaN has no literal
            minus = self.call("tract_core_broadcast", -1.0, out=((), torch.float32), shape=[])
            return self.cast(self.unary("sqrt", minus), dtype)
        if dtype is torch.float32:
            return float(number)
        # Beside a constant a literal stays f32 and makes the result f32: any other dtype is said.
        literal = float(number) if dtype.is_floating_point else int(number)
        return self.call("tract_core_cast", literal, out=((), dtype), to=tract_dtype(dtype))

    def _symbolic(self, number: sympy.Expr, dtype: torch.dtype) -> Value:
        value = self.call("tract_core_cast", number, out=((), torch.int64), to="i64")
        return self.cast(value, dtype)

    def tensor(self, operand: Operand, dtype: torch.dtype, shape: Shape = ()) -> Value:
        """An operand as a tensor of `dtype`; a number becomes a tensor of `shape`, a tensor keeps its own."""
        if isinstance(operand, Value):
            return self.cast(operand, dtype)
        return self.full(shape, operand, dtype)

    def full(self, shape: Shape, number: Number, dtype: torch.dtype) -> Value:
        """A tensor with one value everywhere."""
        if isinstance(number, sympy.Expr) and not number.is_number:
            value = self._symbolic(number, dtype)
            return self.broadcast(value, shape) if shape else value
        if dtype is torch.bool:  # a boolean literal cannot be broadcast
            return self.cast(self.full(shape, float(number), torch.float32), dtype)
        literal = self.literal(number, dtype)
        if not shape and isinstance(literal, Value):
            return literal
        return self._once_filled(self.call("tract_core_broadcast", literal, out=(shape, dtype), shape=dims(shape)))

    def _once_filled(self, value: Value) -> Value:
        return self.unseen(value) if value.filled and not value.dtype.is_floating_point else value

    def unseen(self, value: Value) -> Value:
        """The same tensor, of which tract does not see what numbers are in it.

        It takes whole numbers and booleans that it knows to be 0 or 1 everywhere for masks, and comparisons of places
        that it can prove: of a product with them, or a choice by them, it keeps the other operand alone, in the shape
        that this one has. Where lengths are numbers it does not.
        """
        if is_fixed(value.shape):
            return value
        axis = next(axis for axis, length in enumerate(value.shape) if not isinstance(length, int))
        return self.gather(value, self.range(0, value.shape[axis], torch.int64), axis)

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        """Convert a tensor; nothing is written when it has the dtype."""
        if value.dtype is dtype:
            return value
        result = self.call("tract_core_cast", value, out=(value.shape, dtype), to=tract_dtype(dtype))
        if value.known and dtype.is_floating_point and not value.dtype.is_floating_point and is_fixed(value.shape):
            return self._no_length(result)
        is_cut = value.dtype.is_floating_point and not dtype.is_floating_point
        hides = value.known and (value.dtype is torch.bool or is_cut)
        return self.unseen(result) if hides else self._once_filled(result)

    def wide(self, value: Value) -> Value:
        """The tensor in f32 where it is f16: for what tract sums up in the dtype of its operands, as torch does not.

        Products of matrices are summed up in f32 anyway.
        """
        return self.cast(value, torch.float32) if value.dtype is torch.float16 else value

    # Element by element

    def unary(self, op: str, x: Value, dtype: torch.dtype | None = None, **kwargs: Any) -> Value:  # noqa: ANN401
        """`op(x)`, of the shape of `x`."""
        if op == "abs" and x.dtype is torch.float64:  # tract has it of f64 since 0.23.5
            return self.binary("max", x, self.call("neg", x, out=(x.shape, x.dtype)), x.dtype)
        value = self.call(op, x, out=(x.shape, dtype or x.dtype), **kwargs)
        return self._no_length(value) if op in _ROUNDED and (x.known or x.filled) else value

    def _no_length(self, whole: Value) -> Value:
        """The same whole numbers, as floats, of which tract does not know what they are.

        Of lengths and places it calculates in whole numbers: `S*0.5 - floor(S*0.5)` is 0 to it, and so is what that is
        multiplied with. It does not see through this.
        """
        if whole.dtype is torch.float64:  # which it does not round
            return self.reduce("sum_reduce", self.unsqueeze(whole, [0]), [0], keepdim=False)
        return self.call("tract_core_round_even", whole, out=(whole.shape, whole.dtype))

    def binary(
        self, op: str, left: Operand, right: Operand, dtype: torch.dtype, result: torch.dtype | None = None
    ) -> Value:
        """`op(left, right)` computed in `dtype` and broadcast as torch does; `result` is the dtype that comes out."""
        a, b = self.aligned([left, right], dtype)
        shape = broadcast_shapes(*(x.shape for x in (a, b) if isinstance(x, Value)))
        value = self.call(op, a, b, out=(shape, result or dtype))
        is_cut = op == "div" and not dtype.is_floating_point
        if value.known and (is_cut or (op in _COMPARED and not says_both(value))):
            return self.unseen(value)
        by_zero = op == "mul" and any(is_number(x) and x == 0 for x in (left, right))
        by_bits = op == "tract_core_bitand" and any(isinstance(x, Value) and x.filled for x in (left, right))
        # What these give tract may know without the other operand.
        return self._once_filled(replace(value, filled=True)) if by_zero or by_bits else value

    def aligned(self, operands: Sequence[Operand], dtype: torch.dtype) -> list[Any]:
        """Operands of one dtype and, but for numbers and tensors of rank 0, of one rank. At least one is a tensor."""
        values = [x for x in operands if isinstance(x, Value)]
        if not values:
            return [self.tensor(x, dtype) for x in operands]
        rank = max(x.rank for x in values)
        return [
            self.raised(self.cast(x, dtype), rank) if isinstance(x, Value) else self.literal(x, dtype) for x in operands
        ]

    def select(self, condition: Operand, left: Operand, right: Operand, dtype: torch.dtype) -> Value:
        """`left` where `condition`, else `right`, both in `dtype`."""
        shape = broadcast_shapes(*(x.shape for x in (condition, left, right) if isinstance(x, Value)))
        test = self.raised(self.tensor(condition, torch.bool, (1,) * len(shape)), len(shape))
        branches = [self._branch(x, dtype, len(shape)) for x in (left, right)]
        return self.call("select", test, *branches, out=(shape, dtype))

    def _branch(self, operand: Operand, dtype: torch.dtype, rank: int) -> Any:  # noqa: ANN401 - a literal or a value
        # A literal beside the condition is f32: any other dtype needs a tensor.
        plain = is_number(operand) and not isinstance(operand, sympy.Expr) and operand == operand
        if dtype is torch.float32 and plain:
            return float(operand)  # type: ignore[arg-type]
        return self.raised(self.tensor(operand, dtype, (1,) * rank), rank)

    # Shapes

    def raised(self, value: Value, rank: int) -> Value:
        """The tensor with axes of length 1 in front, up to `rank`. Rank 0 goes with any rank as it is."""
        if value.rank in (0, rank):
            return value
        return self.unsqueeze(value, list(range(rank - value.rank)))

    def unsqueeze(self, value: Value, axes: Sequence[int]) -> Value:
        """Insert axes of length 1; `axes` count in the result."""
        if not axes:
            return value
        rest = iter(value.shape)
        shape = [1 if axis in axes else next(rest) for axis in range(value.rank + len(axes))]
        return self.call("unsqueeze", value, out=(shape, value.dtype), axes=sorted(axes))

    def squeeze(self, value: Value, axes: Sequence[int]) -> Value:
        """Remove axes of length 1."""
        if not axes:
            return value
        shape = [length for axis, length in enumerate(value.shape) if axis not in axes]
        return self.call("squeeze", value, out=(shape, value.dtype), axes=sorted(axes))

    def transpose(self, value: Value, order: Sequence[int]) -> Value:
        """Put axis `order[i]` at place i. Of a block weight the last two are swapped by the way that it is used."""
        order = list(order)
        if order == list(range(value.rank)):
            return value
        shape = tuple(value.shape[axis] for axis in order)
        if value.block is not None and order == [*range(value.rank - 2), value.rank - 1, value.rank - 2]:
            return replace(value, shape=shape, transposed=not value.transposed)
        return self.call("transpose", value, out=(shape, value.dtype), axes=order)

    def reshape(self, value: Value, shape: Iterable[Length]) -> Value:
        """Another shape for the same elements, written for the part of the axes that changes."""
        old, new = value.shape, tuple(shape)
        if len(new) > len(old) and (axes := added_axes(old, new)) is not None:
            return self.unsqueeze(value, axes)
        if len(new) < len(old) and (axes := added_axes(new, old)) is not None:
            return self.squeeze(value, axes)
        shortest = min(len(old), len(new))
        head = next((i for i in range(shortest) if not same(old[i], new[i])), shortest)
        tail = next((i for i in range(shortest - head) if not same(old[-1 - i], new[-1 - i])), shortest - head)
        if head == len(old) == len(new):
            return value
        middle, count = new[head : len(new) - tail], len(old) - tail - head
        out = (new, value.dtype)
        return self.call("reshape", value, out=out, shape=dims(middle), axis_start=head, axis_count=count)

    def broadcast(self, value: Value, shape: Iterable[Length]) -> Value:
        """Repeat axes of length 1, and add axes in front, up to `shape`."""
        new = tuple(shape)
        if len(new) == value.rank and all(map(same, value.shape, new)):
            return value
        raised = self.raised(value, len(new))
        return self._once_filled(self.call("tract_core_broadcast", raised, out=(new, value.dtype), shape=dims(new)))

    def slice(self, value: Value, axis: int, begin: Length, end: Length, stride: int = 1) -> Value:
        """`value[begin:end:stride]` along one axis; 0 <= begin <= end <= length, stride > 0."""
        if stride != 1:
            # tract moves a slice with a stride up through the graph, and fails at some reshapes on the way.
            return self.gather(value, self.range(begin, end, torch.int64, stride), axis)
        if same(begin, 0) and same(end, value.shape[axis]):
            return value
        kept = end - begin
        shape = [*value.shape[:axis], int(kept) if _is_whole(kept) else kept, *value.shape[axis + 1 :]]
        if value.looked_up and kept == 1 and isinstance(begin, int) and value.dtype.is_floating_point:
            # tract makes a slice of one place by itself.
            twice = self.gather(value, self.full((2,), begin, torch.int64), axis)
            return self.reduce("max_reduce", twice, [axis], keepdim=True)
        if is_lost(begin, end) or value.looked_up:
            return self.gather(value, self.range(begin, end, torch.int64), axis)
        return self.call("slice", value, out=(shape, value.dtype), axes=[axis], begin=[dim(begin)], end=[dim(end)])

    def concat(self, values: Sequence[Value], axis: int, dtype: torch.dtype) -> Value:
        """Join tensors along an axis."""
        parts = [self.cast(value, dtype) for value in values]
        if len(parts) == 1:
            return parts[0]
        total: Length = sum(value.shape[axis] for value in parts)
        shape = [*parts[0].shape[:axis], total, *parts[0].shape[axis + 1 :]]
        return self.call("concat", parts, out=(shape, dtype), axis=axis)

    def joined_along(self, value: Value, axis: int) -> bool:
        """Whether the value was written as a join along this axis."""
        written = next((a for a in reversed(self.body) if value.name.text in a.results), None)
        return written is not None and written.op == "concat" and written.kwargs["axis"] == axis

    def range(self, begin: Length, end: Length, dtype: torch.dtype, step: int = 1) -> Value:
        """begin, begin + step, ... below (above, for a negative step) end, as a tensor of rank 1."""
        count = end - begin if step == 1 else sympy.ceiling(sympy.sympify(end - begin) / step)
        shape = (int(count) if _is_whole(count) else count,)
        if is_lost(begin, end):
            places = self.range(0, sympy.expand(end - begin), dtype, step)
            return self.binary("add", places, begin, dtype)
        symbols = self.call("tract_core_range", begin, end, step, out=(shape, torch.int64))
        return self.call("tract_core_cast", symbols, out=(shape, dtype), to=tract_dtype(dtype))

    # Sums and products

    def reduce(
        self, op: str, value: Value, axes: Sequence[int], *, keepdim: bool, dtype: torch.dtype | None = None
    ) -> Value:
        """`op` over axes; tract keeps them, so they are squeezed away unless `keepdim`."""
        if not axes:  # of a single number
            return self.cast(value, dtype or value.dtype)
        axes = sorted(axes)
        shape = [1 if axis in axes else length for axis, length in enumerate(value.shape)]
        if op == "mean_reduce":  # of f16 the sum may be infinite where the mean is not
            mean = self.call(op, self.wide(value), out=(shape, self.wide(value).dtype), axes=axes)
            result = self.cast(mean, dtype or value.dtype)
        else:
            result = self.call(op, value, out=(shape, dtype or value.dtype), axes=axes)
        return result if keepdim else self.squeeze(result, axes)

    def matmul(self, left: Value, right: Value, *, transpose_right: bool = False) -> Value:
        """`left @ right`, ranks >= 2, leading axes broadcast; a block weight on the right is used as it is stored."""
        rank = max(left.rank, right.rank)
        rows = left.shape[-2]
        columns = right.shape[-2] if transpose_right else right.shape[-1]
        swap = transpose_right
        if right.block is not None:
            swap = transpose_right != right.transposed
            # Blocks run along the axis that is summed over, in one matrix, or the format is of no use.
            if not swap or right.rank > 2:
                self._argument(right)
            elif right.block not in _MULTIPLIED:
                self.forced_dense.setdefault(
                    right.name.text, f"{self.site} multiplies by it; tract only gathers rows of {right.block}"
                )
        if not left.dtype.is_floating_point:
            raise EmitError(f"{self.site}: tract has no product of {left.dtype} matrices; cast to float before")
        batch = broadcast_shapes(left.shape[:-2], right.shape[:-2])
        out = ((*batch, rows, columns), left.dtype)
        option = {"transposeB": True} if swap else {}
        if right.rank == 2 and right.block is None and rank > 3:
            return self._matrix_product(left, right, swap, out)
        if right.block is not None and is_join(self.body, left.name.text):
            # tract cuts the weight where the join was, which fails with blocks. It sees no join behind a sum of one.
            left = self.reduce("sum_reduce", self.unsqueeze(left, [0]), [0], keepdim=False)
        stored = self._raised_weight(right, rank)
        return self.call("matmul", self.raised(left, rank), stored, out=out, **option)

    def _matrix_product(self, left: Value, right: Value, swap: bool, out: Out) -> Value:
        """`left @ right` of a matrix that has no axes for those in front of the rows.

        tract moves a reshape of them into a product, to both of its sides, and fails at axes of length 1.
        """
        rows = "abcdefgh"[: left.rank - 1]
        expression = f"{rows}k,{'nk' if swap else 'kn'}->{rows}n"
        return self.call("tract_core_einsum", [left, right], out=out, expr=expression, acc="f32", output="")

    def _raised_weight(self, weight: Value, rank: int) -> Any:  # noqa: ANN401 - a value or the name of a block weight
        if weight.block is None:
            return self.raised(weight, rank)
        if weight.rank == rank:
            return weight.name
        axes = list(range(rank - weight.rank))
        shape = (*[1] * len(axes), *weight.shape)
        return self.call("unsqueeze", weight.name, out=(shape, weight.dtype), axes=axes)

    def gather(self, value: Value, indices: Value, axis: int) -> Value:
        """Rows of `value` along `axis` by `indices` (>= 0), whose shape takes the place of the axis."""
        shape = (*value.shape[:axis], *indices.shape, *value.shape[axis + 1 :])
        out = (shape, value.dtype)
        if value.block is None or axis != 0 or (value.transposed and value.rank == 2):
            return self.call("tract_core_gather", value, indices, out=out, axis=axis)
        if value.transposed:
            out = ((*shape[:-2], shape[-1], shape[-2]), value.dtype)
        kind = tract_dtype(value.dtype)
        # tract gathers from block formats of rank 2 only: matrices are stored as one row each, with the same blocks.
        flat = (*indices.shape, math.prod(int(length) for length in value.shape[1:]))
        rows = self.call("tract_core_gather", value.name, indices, out=(flat, value.dtype), axis=0, datum_type=kind)
        rows = self.reshape(rows, out[0])
        rank = len(shape)
        return self.transpose(rows, [*range(rank - 2), rank - 1, rank - 2]) if value.transposed else rows


def _is_whole(length: Any) -> bool:  # noqa: ANN401 - a number or an expression
    return isinstance(length, int) or bool(length.is_Integer)
