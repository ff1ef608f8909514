"""ATen overload -> NNEF: one emitter each, one family per file. Importing the room registers all of them.

An emitter writes with an `Emit` (`emit`, over `builder`), which works with `value`s and `dims`, and is found in `table`.
"""

from t2n_hf.ops import (
    activation,
    arithmetic,
    attention,
    comparison,
    convolution,
    creation,
    indexing,
    matmul,
    normalization,
    pooling,
    reduction,
    shape,
    slicing,
    unary,
)

__all__ = [
    "activation",
    "arithmetic",
    "attention",
    "comparison",
    "convolution",
    "creation",
    "indexing",
    "matmul",
    "normalization",
    "pooling",
    "reduction",
    "shape",
    "slicing",
    "unary",
]
