"""ATen overload -> NNEF: one emitter each, one family per file. Importing the room registers all of them.

An emitter is found in `table` and writes with an `Emit` (`emit`, over `builder`), which works with `value`s and `dims`.
"""

from t2n_hf.ops import (
    activation,
    arithmetic,
    attention,
    comparison,
    convolution,
    creation,
    cumulative,
    indexing,
    matmul,
    normalization,
    order,
    padding,
    pooling,
    recurrent,
    reduction,
    resize,
    shape,
    slicing,
    state_space,
    unary,
)

__all__ = [
    "activation",
    "arithmetic",
    "attention",
    "comparison",
    "convolution",
    "creation",
    "cumulative",
    "indexing",
    "matmul",
    "normalization",
    "order",
    "padding",
    "pooling",
    "recurrent",
    "reduction",
    "resize",
    "shape",
    "slicing",
    "state_space",
    "unary",
]
