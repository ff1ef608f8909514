"""Views of an opaque parameter while a tracer runs the model: shape and dtype at once, values where they are needed."""
# ruff: noqa: ANN401 - arguments are handed through from torch, which types them as Any

from collections.abc import Callable
from typing import Any, Final, NoReturn

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from t2n_hf.errors import InPlaceError, UnsupportedOpError
from t2n_hf.tensor.fallback import written_by
from t2n_hf.tensor.trace_op import untraced
from t2n_hf.views import VIEW_NAMES

__all__ = ["QUESTIONS", "TracedView", "name_of", "postponed", "trace_tensor_device_for_func"]

# What is asked of a tensor that its shape and dtype answer.
QUESTIONS: Final = frozenset(
    (
        *("__len__", "device", "dim", "dtype", "element_size", "get_device", "grad", "grad_fn", "is_complex"),
        *("is_contiguous", "is_cpu", "is_cuda", "is_floating_point", "is_leaf", "is_meta", "is_nested", "is_quantized"),
        *("is_sparse", "itemsize", "layout", "names", "nbytes", "ndim", "ndimension", "nelement", "numel"),
        *("requires_grad", "shape", "size", "storage_offset", "stride"),
    )
)
# What needs values to decide which ones to give, or to make an index of them.
_GATHERS: Final = frozenset(("embedding", "gather", "index_select", "take", "take_along_dim"))
# What hands values to Python, or has a shape that depends on them.
_READS: Final = frozenset(
    (
        *("__array__", "__bool__", "__complex__", "__contains__", "__float__", "__format__", "__index__", "__int__"),
        *("allclose", "argwhere", "equal", "is_nonzero", "item", "masked_select", "nonzero", "numpy", "tolist"),
        *("unique", "unique_consecutive"),
    )
)
# What a weight's view is for: with these it is an operand, and the operator is traced with the view's values.
_OPERANDS: Final = frozenset(
    (
        *("__matmul__", "__rmatmul__", "addbmm", "addmm", "addmv", "baddbmm", "bilinear", "bmm", "conv1d", "conv2d"),
        *("conv3d", "conv_transpose1d", "conv_transpose2d", "einsum", "embedding_bag", "linear", "matmul", "mm", "mv"),
        *("scaled_dot_product_attention", "tensordot", "cpu", "cuda", "to", "type_as"),
    )
)


def name_of(func: Any) -> str:
    """Name a function, method, property or operator of torch, without its overload."""
    if isinstance(func, torch._ops.OpOverload):
        return func.overloadpacket.__name__
    name = getattr(func, "__name__", str(func))
    # A property is seen as the getter of its descriptor: torch.Tensor.T.__get__.
    return getattr(func.__self__, "__name__", name) if name == "__get__" else name


def trace_tensor_device_for_func(func: Any) -> str | None:
    """Say which device an opaque parameter can be traced on for this op.

    "meta" keeps shape and dtype without materializing the backing data: of all that `t2n_hf.views` lists, which is what
    the exporter knows as views, of indexing, and of questions of shape. "cpu" forces real decompressed values; None
    falls back to `to_base_tensor()` (also real values, on the tensor's own device).

    A "meta" op gives no values and no real device. It may flow into more of them, and into a product (linear, matmul,
    ...), which is traced with its values. Two shapes of forward are unsupported, and raise UnsupportedOpError while the
    model is traced: reading values of it (branching on `weight.view(...).argmax()`), and combining it with a real
    tensor through another op (`weight.view(...) * buffer`).
    """
    name = name_of(func)
    if name in VIEW_NAMES or name in QUESTIONS or name == "__getitem__":
        return "meta"
    return "cpu" if name in _GATHERS or name in _READS else None


def _plain(value: Any) -> Any:
    return value.as_subclass(torch.Tensor) if isinstance(value, TracedView) else value


class TracedView(torch.Tensor):
    """What an operator that needs no values gives of an OpaqueTensorRef. A meta tensor; `values` makes the real one."""

    values: Callable[[], torch.Tensor]
    origin: str

    @classmethod
    def of(cls, meta: torch.Tensor, values: Callable[[], torch.Tensor], origin: str) -> "TracedView":
        """Present `meta` as a view of the weight that `origin` describes; `values` computes it, and is traced then."""
        view = meta.as_subclass(cls)
        view.values, view.origin = values, origin
        return view

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"TracedView(shape={tuple(self.shape)}, dtype={self.dtype}, of {self.origin})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Go on without values where that can be; make them for a product; refuse what would be wrong in a trace."""
        kwargs, name = kwargs or {}, name_of(func)
        if name in QUESTIONS:
            with untraced(), torch._C.DisableTorchFunctionSubclass():
                return func(*tree_map(_plain, args), **tree_map(_plain, kwargs))
        leaves = tree_leaves((args, kwargs))
        views = [leaf for leaf in leaves if isinstance(leaf, cls)]
        if any(isinstance(leaf, cls) for leaf in written_by(func, args, kwargs)):
            _refuse_writing(name, views[0])
        if name in _READS:
            _refuse_reading(name, views[0])
        others = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not isinstance(leaf, cls)]
        if name in _OPERANDS or name in _GATHERS or (name == "__getitem__" and others):
            return func(*tree_map(_made, args), **tree_map(_made, kwargs))
        if name in VIEW_NAMES and not isinstance(args[0], cls):
            return func(*tree_map(_plain, args), **tree_map(_plain, kwargs))
        real = next((other for other in others if other.ndim and not other.is_meta), None)
        if real is not None and name not in VIEW_NAMES:
            _refuse_mixing(name, views[0], real)
        return postponed(func, args, kwargs, views[0].origin)


def _made(value: Any) -> Any:
    return value.values() if isinstance(value, TracedView) else value


def postponed(
    func: Any,
    args: Any,
    kwargs: Any,
    origin: str,
    meta: Callable[[Any], Any] = _plain,
    made: Callable[[Any], Any] = _made,
) -> Any:
    """Run `func` on shapes alone; what comes of it computes its values by running `func` again, on values.

    `meta` gives the stand-in of an argument, `made` its values.
    """
    with untraced(), torch._C.DisableTorchFunctionSubclass():
        result = func(*tree_map(meta, args), **tree_map(meta, kwargs))
    leaves, spec = tree_flatten(result)

    def value_at(place: int) -> torch.Tensor:
        value: torch.Tensor = tree_leaves(func(*tree_map(made, args), **tree_map(made, kwargs)))[place]
        return value

    def later(place: int) -> Callable[[], torch.Tensor]:
        return lambda: value_at(place)

    shown = [
        TracedView.of(leaf, later(place), origin) if isinstance(leaf, torch.Tensor) else leaf
        for place, leaf in enumerate(leaves)
    ]
    return tree_unflatten(shown, spec)


def _refuse_reading(name: str, view: TracedView) -> NoReturn:
    raise UnsupportedOpError(
        f"{name} reads values of a view of {view.origin}, which has none while the model is traced, and the trace "
        "would keep what they decide: compute it before, as a plain attribute of the module, and use that in forward"
    )


def _refuse_writing(name: str, view: TracedView) -> NoReturn:
    raise InPlaceError(
        f"{name} would write to a view of {view.origin}, which has no values while the model is traced: the write "
        "would be lost; work on a copy (`.clone()`)"
    )


def _refuse_mixing(name: str, view: TracedView, other: torch.Tensor) -> NoReturn:
    with untraced():
        shape = tuple(other.shape)
    raise UnsupportedOpError(
        f"{name} combines a view of {view.origin}, which is on the meta device while the model is traced, with a "
        f"tensor of shape {shape} on {other.device}: use the weight itself in {name}, whose values are "
        "made for it, and view the result"
    )
