"""What emitters work with: values of the graph that is written, and numbers."""

from dataclasses import dataclass
from typing import TypeAlias

import sympy
import torch

from t2n_hf.dtypes import dtype_of
from t2n_hf.nnef.ir import Name
from t2n_hf.ops.dims import Shape

__all__ = ["Number", "Operand", "Value", "is_number", "tract_dtype"]

Number: TypeAlias = bool | int | float | sympy.Expr


@dataclass(frozen=True)
class Value:
    """A tensor of the written graph.

    `block` names the block format of a stored weight ("q4_0"; None for anything else). Such a weight has the shape that
    torch sees; `transposed` tells that it is stored with its last two axes swapped.
    """

    name: Name
    shape: Shape
    dtype: torch.dtype
    block: str | None = None
    transposed: bool = False

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.shape)


Operand: TypeAlias = Value | Number


def is_number(operand: object) -> bool:
    """Whether an operand is a number: a literal, or an expression of symbols."""
    return isinstance(operand, bool | int | float | sympy.Expr)


def tract_dtype(dtype: torch.dtype) -> str:
    """Name of a dtype in tract. bfloat16 has none: the graph is captured with another float type."""
    return dtype_of(dtype).name
