"""What emitters work with: values of the graph that is written, and numbers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import sympy
import torch

from t2n_hf.dtypes import dtype_of
from t2n_hf.nnef.ir import Name
from t2n_hf.ops.dims import Shape

__all__ = [
    "ComplexValue",
    "Number",
    "Operand",
    "Value",
    "is_looked_up",
    "is_number",
    "renamed",
    "tensors_in",
    "tract_dtype",
    "values_in",
]

Number: TypeAlias = bool | int | float | sympy.Expr


@dataclass(frozen=True)
class Value:
    """A tensor of the written graph.

    `block` names the block format of a stored weight ("q4_0"; None for anything else). Such a weight has the shape that
    torch sees; `transposed` tells that it is stored with its last two axes swapped. `known` tells that it comes from
    literals, constants and counting alone, `filled` that it does so without counting; `example` is what is in
    it at one choice of lengths, where that is known too (`counting`). `looked_up` tells that it is made of rows that
    were gathered from a block format, with nothing between that tract moves no slice across.
    """

    name: Name
    shape: Shape
    dtype: torch.dtype
    block: str | None = None
    transposed: bool = False
    known: bool = False
    filled: bool = False
    looked_up: bool = False
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

# What tract moves no slice across, along the axes that matter.
_STAY: Final = frozenset(
    {"matmul", "tract_core_einsum", "conv", "deconv", "tract_core_scan", "tract_transformers_sdpa"}
)


def is_looked_up(op: str, options: Mapping[str, Any], operands: Iterable[Any]) -> bool:
    """Whether results of a call are made of rows of a block format (`Value.looked_up`).

    tract moves slices up to where such rows are gathered, and panics there.
    """
    gathered = op == "tract_core_gather" and "datum_type" in options
    return gathered or (op not in _STAY and any(getattr(operand, "looked_up", False) for operand in operands))


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


def values_in(operand: Any) -> Iterator[Value | Name]:  # noqa: ANN401 - operands, and lists and dicts of them
    """All values in an operand; a block weight may be there by its name."""
    if isinstance(operand, list | tuple | dict):
        for item in operand.values() if isinstance(operand, dict) else operand:
            yield from values_in(item)
    elif isinstance(operand, Value | Name):
        yield operand
