"""PythonTensor: a tensor that knows which node of a graph gives it; operators on it are recorded as nodes."""
# ruff: noqa: ANN401 - arguments are handed through from torch, which types them as Any

import operator
from typing import Any, Final, Protocol

import torch
from torch import fx, nn
from torch._C import DisableTorchFunctionSubclass, _DisableTorchDispatch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from t2n_hf.errors import CaptureError
from t2n_hf.trace.trace_memory import TraceMemory, is_opaque

__all__ = ["PythonTensor", "Recorder", "record"]

_aten = torch.ops.aten


class Recorder(Protocol):
    """What a `PythonTensor` needs of the tracer that its proxy belongs to."""

    memory: TraceMemory
    fold_known: bool

    def operand(self, tensor: torch.Tensor) -> "PythonTensor":
        """Give the tensor itself, or the leaf that stands for one from outside the trace."""

    def note_read(self, func: Any, result: Any) -> None:
        """Hear that the traced code was told `result`, which depends on the values of its inputs."""

    def create_proxy(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Proxy:
        """Add a node (that of `torch.fx.Tracer`)."""


class PythonTensor(torch.Tensor):
    """A wrapper subclass that keeps the proxy of a tensor, from which a `DispatchTracer` builds its graph.

    Every ATen operator on it runs on what it wraps, and adds a node; its result is a PythonTensor with the proxy of
    that node. What it wraps stays untouched: a fake tensor stays fake, and an opaque one (a tensor whose class keeps
    its values in another form) is represented by its shape, dtype and device alone.

    Wrapping implicitly detaches gradients: when `elem` requires grad, the PythonTensor is a leaf that does. Hence
    something that is met several times must be wrapped once; `DispatchTracer.operand` sees to that.

    Under `torch.inference_mode` operators arrive whole that torch takes apart otherwise: `F.linear`, `F.layer_norm`,
    `F.conv2d`, `F.scaled_dot_product_attention`, ...

    Attributes:
        proxy: of the node that gives this tensor. In-place operators and `out=` variants replace it by that of their
            own node.
        is_immutable: whether the tensor is refused as an `out=` argument.
        elem: what is wrapped: a plain tensor (detached, sharing memory), a fake one, or an opaque one.
    """

    __slots__ = ["proxy", "is_immutable"]  # noqa: RUF023 - in the order of the parameters

    proxy: fx.Proxy
    is_immutable: bool
    elem: torch.Tensor

    @staticmethod
    def __new__(cls: type["PythonTensor"], elem: torch.Tensor, proxy: fx.Proxy, is_immutable: bool = False) -> Any:
        """Wrap `elem`, whose values are not read. Raises CaptureError for one that is not strided (sparse, nested)."""
        _refuse_layout(elem)
        wrapped = elem if is_opaque(elem) else _alias(elem)
        result = _shell(cls, wrapped, requires_grad=elem.requires_grad)
        if isinstance(elem, nn.Parameter):
            result._is_param = True  # what torch tells parameters by
        result.elem = wrapped
        result.is_immutable = is_immutable
        result.update_proxy(proxy)
        return result

    def update_proxy(self, proxy: fx.Proxy) -> None:
        """Let this tensor be the result of another node from now on."""
        self.proxy = proxy

    def __repr__(self, *, tensor_contents: None = None) -> str:  # type: ignore[override]
        """Show what is wrapped; nothing is recorded."""
        with _disable_current_modes():
            return f"PythonTensor({self.elem})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let torch take `func` apart into operators; answer those that hand all values to Python.

        Raises:
            CaptureError: `tolist` or `numpy` of a tensor that has only a shape.
        """
        kwargs = kwargs or {}
        if func in _READS and isinstance(args[0], PythonTensor):
            return args[0]._read(func, args[1:], kwargs)
        if func is torch.Tensor.__format__ and args[0].ndim == 0:  # torch does so for its own class alone
            return format(args[0].item(), *args[1:])
        if func in _SPLITS and len(args) > 1 and isinstance(args[1], PythonTensor):
            args = (args[0], args[1].tolist(), *args[2:])  # torch would look for them in memory
        if func == _SET_DATA and isinstance(args[0], PythonTensor):
            return args[0]._become(args[1])
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run one ATen operator on what is wrapped, and record it. `func` is the overload."""
        kwargs = kwargs or {}
        first = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, PythonTensor))
        return record(_recorder_of(first), func, args, kwargs)

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        tracer = _recorder_of(self)
        elem = tracer.memory.current(self.elem)
        if isinstance(elem, FakeTensor):
            raise CaptureError(
                f"{func.__name__}() needs the values of a tensor that has only a shape here: it comes from a fake "
                "tensor, or from an opaque weight; trace with real tensors, or compute it before"
            )
        with _disable_current_modes():
            result = func(elem.clone(), *args, **kwargs)
        if tracer.memory.depends_on_inputs([elem]):
            tracer.note_read(f"Tensor.{func.__name__}", result)
        return result

    def _become(self, other: torch.Tensor) -> None:
        """Do `self.data = other`."""
        source = _recorder_of(self).operand(other)
        self.elem = source.elem
        self.update_proxy(source.proxy)
        _follow(self)


_READS: Final = frozenset({torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__})
_SPLITS: Final = frozenset({torch.Tensor.tensor_split, torch.tensor_split})
_SET_DATA: Final = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def _recorder_of(tensor: PythonTensor) -> Recorder:
    tracer: Any = tensor.proxy.tracer
    if not hasattr(tracer, "memory"):
        raise CaptureError(
            f"the proxy of {tensor!r} belongs to a {type(tracer).__name__}; PythonTensors record with a DispatchTracer"
        )
    return tracer


def _refuse_layout(tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise CaptureError(f"a tensor of another layout ({kind}) cannot be traced; make it dense and strided first")


def _alias(elem: torch.Tensor) -> torch.Tensor:
    """The same memory without gradient; another object, so that its shape can change by itself."""
    with torch.no_grad(), DisableTorchFunctionSubclass(), _disable_current_modes():
        plain = _aten.alias.default(elem.detach() if elem.requires_grad else elem)
    return plain if isinstance(plain, FakeTensor) or type(plain) is torch.Tensor else plain.as_subclass(torch.Tensor)


def _shell(cls: type[PythonTensor], like: torch.Tensor, requires_grad: bool = False) -> Any:
    """A tensor of the class that has the shape and the bits of `like`, and none of the fields."""
    with DisableTorchFunctionSubclass():
        result = torch.Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            layout=like.layout,
            device=like.device,
            requires_grad=requires_grad,
        )
    if like.is_conj() or like.is_neg():
        torch._C._set_conj(result, like.is_conj())
        torch._C._set_neg(result, like.is_neg())
    return result


def _follow(tensor: PythonTensor) -> None:
    """Let the wrapper have the shape of what it wraps, which an operator has changed in place."""
    elem = tensor.elem
    if (tensor.shape, tensor.stride(), tensor.dtype) != (elem.shape, elem.stride(), elem.dtype):
        with DisableTorchFunctionSubclass(), _DisableTorchDispatch():
            tensor.data = _shell(type(tensor), elem)


# Torch takes the memory of a literal as a new tensor's; on a graph's constant the second run would see the writes of
# the first.
_COPIED: Final = {
    _aten.lift_fresh.default: _aten.lift_fresh_copy.default,
    _aten.lift.default: _aten.lift_fresh_copy.default,
}
# Statistics are written in training (the argument at this place), and the schema does not tell.
_STATISTICS: Final = {
    _aten.native_batch_norm.default: 5,
    _aten.batch_norm.default: 5,
    _aten._batch_norm_impl_index.default: 5,
    _aten.cudnn_batch_norm.default: 5,
    _aten.instance_norm.default: 5,
}


# The result's shape follows from values, though no tag says so: torch makes these of others.
_SHAPED_BY_VALUES: Final = frozenset(
    {
        _aten.argwhere.default,
        _aten.nonzero_numpy.default,
        _aten.one_hot.default,
        _aten.repeat_interleave.self_Tensor,
        _aten.tensor_split.tensor_indices_or_sections,
        _aten.where.default,
    }
)


def record(tracer: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Run the overload `func` for a trace, and add a node; the result is made of PythonTensors.

    Tensors in the arguments that are no PythonTensors become leaves of the trace. A call that gives no tensor (a number
    that was read, a question) adds no node.

    Raises:
        CaptureError: a higher-order operator; an immutable `out=` argument; values are needed that are not there.
    """
    if not isinstance(func, OpOverload):
        raise CaptureError(f"{func} calls functions of its own, which a dispatch trace cannot record; use torch.export")
    func = _COPIED.get(func, func)
    args, kwargs = pytree.tree_map_only(torch.Tensor, tracer.operand, (tuple(args), dict(kwargs)))
    written = _written(func, args, kwargs)
    _refuse_immutable(written)
    outers = [outer for _, outer in written]
    elems, kwelems = pytree.tree_map_only(PythonTensor, _elem, (args, kwargs))
    result = tracer.memory.run(func, elems, kwelems, [*map(_elem, outers), *_statistics(func, elems)])
    for tensor in _tensors(result):
        _refuse_layout(tensor)
    if not outers and (itself := _operand_that_is(result, (args, kwargs))) is not None:
        return itself
    reads = _reads(func, result, (args, kwargs))
    known = not tracer.memory.depends_on_inputs(_tensors((elems, kwelems)))
    if reads and not known:
        tracer.note_read(func, result)
    if func._schema.returns and not outers and not _tensors(result):
        return result
    if known and (reads or torch.Tag.nondeterministic_seeded in func.tags) and _foldable(tracer, outers, result):
        return pytree.tree_map_only(torch.Tensor, tracer.operand, result)
    proxies, kwproxies = pytree.tree_map_only(PythonTensor, _proxy, (args, kwargs))
    proxy = tracer.create_proxy("call_function", func, proxies, kwproxies)
    for outer in outers:
        outer.elem = tracer.memory.current(outer.elem)
        _follow(outer)
    return _results(tracer, func, result, proxy, written, {id(elem) for elem in _tensors((elems, kwelems))})


def _operand_that_is(result: Any, arguments: Any) -> PythonTensor | None:
    """The argument that a call gives back, as `to` does of what is so already; in inference mode torch asks for it."""
    if not isinstance(result, torch.Tensor):
        return None
    operands = (leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, PythonTensor))
    return next((operand for operand in operands if operand.elem is result), None)


def _results(
    tracer: Recorder,
    func: OpOverload,
    result: Any,
    proxy: fx.Proxy,
    written: list[tuple[Any, PythonTensor]],
    given: set[int],
) -> Any:
    """Give results of a call the proxies of its node; what it wrote to is itself the result."""
    shown = tracer.memory.described(result)
    proxy.node.meta["val"] = shown
    returns = func._schema.returns
    if len(returns) == 1:
        return _wrapped(tracer, result, shown, proxy, _target(returns[0], written), given)
    if not returns:
        return result
    return tuple(
        _wrapped(
            tracer, value, description, _item(proxy, place) if _tensors(value) else proxy, _target(r, written), given
        )
        for place, (r, value, description) in enumerate(zip(returns, result, shown, strict=True))
    )


def _refuse_immutable(written: list[tuple[Any, PythonTensor]]) -> None:
    for argument, outer in written:
        if argument.is_out and outer.is_immutable:
            raise CaptureError(
                f"an operator would write its result into {argument.name!r}, an immutable tensor of shape "
                f"{tuple(outer.shape)}: an input of the trace; give a tensor that the traced function makes"
            )


def _foldable(tracer: Recorder, outers: list[PythonTensor], result: Any) -> bool:
    return tracer.fold_known and not outers and not any(isinstance(tensor, FakeTensor) for tensor in _tensors(result))


def _elem(tensor: PythonTensor) -> torch.Tensor:
    return tensor.elem


def _proxy(tensor: PythonTensor) -> fx.Proxy:
    return tensor.proxy


def _item(proxy: fx.Proxy, place: int) -> fx.Proxy:
    return proxy.tracer.create_proxy("call_function", operator.getitem, (proxy, place), {})


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, PythonTensor]]:
    """The tensors that a call writes to, each with the argument of the schema that it is in."""
    if not func._schema.is_mutable:
        return []
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [(argument, tensor) for tensor in pytree.tree_leaves(value) if isinstance(tensor, PythonTensor)]
    return found


def _statistics(func: OpOverload, elems: tuple[Any, ...]) -> list[torch.Tensor]:
    training = _STATISTICS.get(func)
    if training is None or not elems[training]:
        return []
    return [elem for elem in elems[3:5] if elem is not None]


def _reads(func: OpOverload, result: Any, arguments: Any) -> bool:
    """Whether a number or a shape that the call gives depends on values."""
    if func is _aten.index.Tensor:
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in _tensors(arguments[0][1]))
    if func in _SHAPED_BY_VALUES or torch.Tag.dynamic_output_shape in func.tags:
        return True
    return bool(func._schema.returns) and bool(_tensors(arguments)) and not _tensors(result)


def _target(returned: Any, written: list[tuple[Any, PythonTensor]]) -> PythonTensor | None:
    """The argument that a result is, for in-place operators and `out=` variants."""
    if returned.alias_info is None or not returned.alias_info.is_write:
        return None
    return next(
        (outer for argument, outer in written if argument.alias_info.before_set == returned.alias_info.before_set), None
    )


def _wrapped(
    tracer: Recorder, value: Any, shown: Any, proxy: fx.Proxy, target: PythonTensor | None, given: set[int]
) -> Any:
    if target is not None:
        target.update_proxy(proxy)
        proxy.node.meta["val"] = shown
        return target
    if isinstance(value, list | tuple):
        return type(value)(
            _wrapped(tracer, item, described, _item(proxy, place), None, given) if _tensors(item) else item
            for place, (item, described) in enumerate(zip(value, shown, strict=True))
        )
    if not isinstance(value, torch.Tensor):
        return value
    proxy.node.meta["val"] = shown
    elem = _alias(value) if id(value) in given else value
    result = _shell(PythonTensor, elem)
    result.elem, result.is_immutable = elem, False
    result.update_proxy(proxy)
    tracer.memory.lend_views(result)
    return result
