"""Which operators of torch only look at a tensor in another way: the one list, for what is traced and what is exported.

An operator is named as an overload of `torch.ops.aten` ("view.default"). All values of its result are values of its
first argument; which ones, and where, follows from shapes and plain arguments alone.
"""

from collections.abc import Iterable
from typing import Any, Final

import torch

__all__ = ["EXPANSIONS", "PARTS", "RESHAPES", "SAME", "TURNS", "VIEW_NAMES", "overloads_of"]

# The same values in the same order, in another shape.
RESHAPES: Final = (
    *("_unsafe_view.default", "flatten.using_ints", "ravel.default", "reshape.default", "reshape_as.default"),
    *("squeeze.default", "squeeze.dim", "squeeze.dims", "unflatten.int", "unsqueeze.default", "view.default"),
    *("view_as.default", "view_copy.default"),
)
# Axes in another order.
TURNS: Final = (
    *("mT.default", "moveaxis.int", "moveaxis.intlist", "movedim.int", "movedim.intlist", "numpy_T.default"),
    *("permute.default", "swapaxes.default", "swapdims.default", "t.default", "transpose.int"),
)
# Axes of length 1 repeated.
EXPANSIONS: Final = ("broadcast_to.default", "expand.default", "expand_as.default")
# Parts along one axis.
PARTS: Final = (
    *("chunk.default", "narrow.default", "select.int", "select_copy.int", "slice.Tensor", "slice_copy.Tensor"),
    *("split.Tensor", "split.sizes", "split_with_sizes.default", "tensor_split.sections", "unbind.int"),
    *("unsafe_chunk.default", "unsafe_split.Tensor"),
)
# The tensor itself, or a copy of it.
SAME: Final = (
    *("alias.default", "clone.default", "contiguous.default", "detach.default", "lift_fresh.default"),
    *("lift_fresh_copy.default", "positive.default"),
)
# Names under which Python code calls them and more of their kind. `T`, `mT` and the like are properties.
VIEW_NAMES: Final = frozenset(
    {overload.partition(".")[0] for overload in (*RESHAPES, *TURNS, *EXPANSIONS, *PARTS, *SAME)}
    | {"T", "H", "mH", "adjoint", "as_strided", "diagonal", "unfold"}
)


def overloads_of(names: Iterable[str]) -> tuple[Any, ...]:
    """Find the operators that `names` say, e.g. RESHAPES."""
    found = []
    for name in names:
        packet, _, overload = name.partition(".")
        found.append(getattr(getattr(torch.ops.aten, packet), overload))
    return tuple(found)
