"""What emitters work with: values of the graph that is written, and numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import sympy
import torch

from t2n_hf.dtypes import dtype_of
from t2n_hf.nnef.ir import Name
from t2n_hf.ops.dims import Shape

__all__ = ["ComplexValue", "Number", "Operand", "Value", "is_number", "renamed", "tensors_in", "tract_dtype"]

Number: TypeAlias = bool | int | float | sympy.Expr


@dataclass(frozen=True)
class Value:
    """A tensor of the written graph.

    `block` names the block format of a stored weight ("q4_0"; None for anything else). Such a weight has the shape that
    torch sees; `transposed` tells that it is stored with its last two axes swapped. `known` tells that it comes from
    literals, constants and counting alone, `filled` that it does so without counting; `example` is what is in
    it at one choice of lengths, where that is known too (`counting`).
    """

    name: Name
    shape: Shape
    dtype: torch.dtype
    block: str | None = None
    transposed: bool = False
    known: bool = False
    filled: bool = False
    example: Any = field(default=None, compare=False, repr=False)

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.shape)


@dataclass(frozen=True)
class ComplexValue:
    """A tensor of complex numbers, as two tensors of one shape: tract has no complex numbers."""

    real: Value
    imag: Value

    @property
    def shape(self) -> Shape:
        """Length of each axis."""
        return self.real.shape

    @property
    def rank(self) -> int:
        """Number of axes."""
        return self.real.rank

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of both tensors."""
        return self.real.dtype


Operand: TypeAlias = Value | Number


def is_number(operand: object) -> bool:
    """Whether an operand is a number: a literal, or an expression of symbols."""
    return isinstance(operand, bool | int | float | sympy.Expr)


def tract_dtype(dtype: torch.dtype) -> str:
    """Name of a dtype in tract. bfloat16 has none: the graph is captured with another float type."""
    return dtype_of(dtype).name


def tensors_in(operand: object) -> tuple[Value, ...]:
    """The tensors that an operand is written as: none for a number, two for complex numbers."""
    if isinstance(operand, ComplexValue):
        return (operand.real, operand.imag)
    return (operand,) if isinstance(operand, Value) else ()


def renamed(operand: Any, names: Sequence[str]) -> Any:  # noqa: ANN401 - an operand of any kind, and one of the same kind
    """The same operand whose tensors have other names, one for each of `tensors_in`."""
    if isinstance(operand, ComplexValue):
        real, imag = names
        return ComplexValue(replace(operand.real, name=Name(real)), replace(operand.imag, name=Name(imag)))
    return replace(operand, name=Name(names[0])) if isinstance(operand, Value) else operand
