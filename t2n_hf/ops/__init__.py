"""ATen overload -> NNEF: one emitter each, one family per file. Importing the room registers all of them.

An emitter is found in `table`, or brought by another distribution (`plugins`), and writes with an `Emit` (`emit`, over
`builder`), which works with `value`s and `dims`; `counting` calculates what comes of lengths alone. Emitters share
`scan` (loops, with their `bodies`), `windows` (lengths of what slides) and `repetition` (of axes of length 1).
"""

from t2n_hf.ops import (
    activation,
    arithmetic,
    attention,
    channel_normalization,
    comparison,
    complex,
    convolution,
    creation,
    cumulative,
    einsum,
    fourier,
    grid,
    indexing,
    matmul,
    normalization,
    order,
    padding,
    patches,
    pooling,
    random,
    recurrent,
    reduction,
    resize,
    scatter,
    shape,
    slicing,
    special,
    state_space,
    strided,
    unary,
)
from t2n_hf.ops.emit import Emit
from t2n_hf.ops.table import EMITTERS
from t2n_hf.ops.value import Value

__all__ = [
    "EMITTERS",
    "Emit",
    "Value",
    "activation",
    "arithmetic",
    "attention",
    "channel_normalization",
    "comparison",
    "complex",
    "convolution",
    "creation",
    "cumulative",
    "einsum",
    "fourier",
    "grid",
    "indexing",
    "matmul",
    "normalization",
    "order",
    "padding",
    "patches",
    "pooling",
    "random",
    "recurrent",
    "reduction",
    "resize",
    "scatter",
    "shape",
    "slicing",
    "special",
    "state_space",
    "strided",
    "unary",
]
