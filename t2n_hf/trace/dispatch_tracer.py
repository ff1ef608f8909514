"""DispatchTracer: runs a function once on PythonTensors and builds the graph of the ATen operators it calls."""
# ruff: noqa: ANN401 - arguments are handed through from torch, which types them as Any

import builtins
import keyword
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import sympy
import torch
from torch import fx, nn
from torch._export.utils import _compiling_state_context
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from t2n_hf.errors import CaptureError
from t2n_hf.trace.automatic_types import automatic_types_error, device_of_automatic_types
from t2n_hf.trace.number_nodes import number_nodes
from t2n_hf.trace.python_tensor import PythonTensor, record
from t2n_hf.trace.swap import buffers_watched, plain_tensors_kept, tensors_of, tensors_replaced
from t2n_hf.trace.trace_memory import TraceMemory, is_opaque

__all__ = ["DispatchTracer", "ValueRead"]

_TORCH: Final = str(Path(torch.__file__).parent)
_OWN: Final = str(Path(__file__).parent)
_LAYERS: Final = (f"{_TORCH}/nn/", f"{_TORCH}/functional.py")
_CALLS: Final = f"{_TORCH}/nn/modules/module.py"

_SHOWN: Final = 80
# Names that the code of a graph uses itself.
_TAKEN: Final = frozenset({*dir(builtins), "NoneType", "device", "fx_pytree", "inf", "nan", "pytree", "self", "torch"})


@dataclass(frozen=True)
class ValueRead:
    """A place where the traced code was told something that depends on the values of its inputs.

    Attributes:
        op: the operator or method that told it.
        result: what it told, as text; a long one is cut.
        file: of the line that asked; `line` is its number and `code` its text.
    """

    op: str
    result: str
    file: str
    line: int
    code: str

    def __str__(self) -> str:
        """One line; the file is named without its folder, which may tell whose computer it was."""
        return f"{self.op} gave {self.result} at {Path(self.file).name}:{self.line}: {self.code}"


class _Recording(TorchDispatchMode):
    """Records every operator, also those without a PythonTensor among their arguments (`torch.zeros`)."""

    supports_higher_order_operators = True

    def __init__(self, tracer: "DispatchTracer") -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = self._tracer.automatic if self._tracer.fold_known else None
        if device is not None and any(arg is torch.bfloat16 for arg in args):  # an archive has none of that type
            raise automatic_types_error(func, device, self._tracer)
        return record(self._tracer, func, args, kwargs or {})


class _Lifting(TorchFunctionMode):
    """Puts leaves in the place of tensors for which the dispatcher is too late.

    An opaque tensor's class would see the call and might make values; and in inference mode torch fails to make a view
    that is recorded (an inference tensor) of a tensor that is none.
    """

    def __init__(self, tracer: "DispatchTracer") -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(_outside(leaf) for leaf in pytree.tree_leaves((args, kwargs))):
            lift: Callable[[Any], Any] = lambda leaf: self._tracer.operand(leaf) if _outside(leaf) else leaf  # noqa: E731
            args, kwargs = pytree.tree_map(lift, (tuple(args), dict(kwargs)))
        outer, self._tracer.automatic = self._tracer.automatic, device_of_automatic_types(args, kwargs)
        try:
            return func(*args, **kwargs)
        finally:
            self._tracer.automatic = outer


def _outside(leaf: Any) -> bool:
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, PythonTensor):
        return False
    return is_opaque(leaf) or (torch.is_inference_mode_enabled() and not leaf.is_inference())


class DispatchTracer(fx.Tracer):
    """Builds a graph from what PythonTensors record. One tracer makes one graph.

    A tensor that is not made by the traced function is one leaf of the graph, however often and under however many
    names it is met: a placeholder if it is an argument, else an attribute. Nothing that was given to the tracer is
    changed, neither values nor modules.

    Args:
        fold_known: make constants of what is drawn at random, and of what has a shape that depends on values, where
            that depends on no argument and on nothing without values; refuse casts to bf16 that autocast makes.

    Attributes:
        graph: the graph.
        memory: what the tensors of the trace hold.
        attributes: what the graph's `get_attr` nodes name: parameters, buffers and constants.
        automatic: device of the automatic types that hold for the function of torch's that is running; else None.
        reads: where the traced code looked at values that come from its inputs: the graph holds for inputs that give
            the same there.
        in_spec: structure of the arguments, `(args, kwargs)`, once `trace` has run; `out_spec` that of the result.
    """

    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec

    def __init__(self, *, fold_known: bool = False) -> None:
        super().__init__()
        self.fold_known = fold_known
        self.root = nn.Module()
        self.graph = fx.Graph(tracer_cls=type(self))
        self.memory = TraceMemory()
        self.attributes: dict[str, Any] = {}
        self.automatic: str | None = None
        self.reads: list[ValueRead] = []
        self._leaves: dict[int, tuple[torch.Tensor, PythonTensor]] = {}
        self._symbols: dict[sympy.Symbol, tuple[fx.Proxy, int]] = {}
        self._lengths: dict[sympy.Expr, fx.Node] = {}
        self._closed = False

    # What PythonTensors ask for

    def operand(self, tensor: torch.Tensor) -> PythonTensor:
        """Give the PythonTensor that stands for `tensor` in this trace: itself, or the leaf of one from outside.

        Raises:
            CaptureError: it belongs to another trace, or this trace has ended.
        """
        if self._closed:
            raise CaptureError("a tensor is used whose trace has ended: the traced function kept it; return it instead")
        if isinstance(tensor, PythonTensor):
            if tensor.proxy.tracer is not self:
                raise CaptureError(f"{tensor!r} belongs to another trace; pass it as an argument")
            return tensor
        if id(tensor) not in self._leaves:
            stem = "_param_constant" if isinstance(tensor, nn.Parameter) else "_tensor_constant"
            number = sum(name.startswith(stem) for name in self.attributes)
            self.attribute(f"{stem}{number}", tensor)
        return self._leaves[id(tensor)][1]

    def attribute(self, name: str, tensor: torch.Tensor) -> PythonTensor:
        """Make an attribute of the graph of a tensor from outside; a tensor that is one already keeps its first name.

        Raises CaptureError when the name is taken.
        """
        if id(tensor) not in self._leaves:
            if name in self.attributes:
                raise CaptureError(f"the traced module has an attribute {name!r} already; rename it")
            self.attributes[name] = tensor
            self._leaves[id(tensor)] = tensor, self._wrap(tensor, self.create_proxy("get_attr", name, (), {}))
        return self._leaves[id(tensor)][1]

    def placeholder(self, name: str, value: Any) -> Any:
        """Add an input: a tensor becomes an immutable PythonTensor, any other value is fixed and given back."""
        proxy = self.create_proxy("placeholder", name, (), {})
        proxy.node.target = proxy.node.name  # which no other has
        if not isinstance(value, torch.Tensor):
            proxy.node.meta["val"] = value
            return value
        wrapped = self._wrap(value, proxy, is_immutable=True)
        self.memory.mark_input(wrapped.elem)
        for axis, length in enumerate(wrapped.shape):
            if isinstance(length, torch.SymInt) and length.node.expr.is_Symbol:
                self._symbols.setdefault(length.node.expr, (proxy, axis))
        return wrapped

    def note_read(self, func: Any, result: Any) -> None:
        """Keep in `reads` that the traced code was told `result`, which depends on values of the inputs."""
        shapes = pytree.tree_map_only(torch.Tensor, lambda tensor: f"shape {tuple(tensor.shape)}", result)
        text = str(shapes)
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        self.reads.append(ValueRead(str(func), shown, *_asking_line()))

    def _wrap(self, tensor: torch.Tensor, proxy: fx.Proxy, *, is_immutable: bool = False) -> PythonTensor:
        with _disable_current_modes():
            self.memory.adopt([tensor])
            wrapped: PythonTensor = PythonTensor(tensor, proxy, is_immutable)
            self.memory.lend(wrapped)
            proxy.node.meta["val"] = self.memory.described(wrapped.elem)
        return wrapped

    # What fx asks for

    def create_arg(self, a: Any) -> Any:
        """Turn an argument of an operator into one of a node. Raises CaptureError for what a graph cannot hold."""
        if isinstance(a, PythonTensor):
            return a.proxy.node
        if isinstance(a, torch.Tensor):
            return self.operand(a).proxy.node
        if isinstance(a, torch.SymInt | torch.SymFloat | torch.SymBool):
            return self._length(a)
        if isinstance(a, torch.Generator):
            raise CaptureError(
                "an operator draws from a torch.Generator, which a graph cannot hold; seed torch's own with "
                "torch.manual_seed, or draw before and pass the result"
            )
        if isinstance(a, torch.Size):
            return tuple(self.create_arg(length) for length in a)
        try:
            return super().create_arg(a)
        except NotImplementedError as error:
            raise CaptureError(f"an operator is called with a {type(a).__name__}, which a graph cannot hold") from error

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, name: Any = None, type_expr: Any = None
    ) -> Any:
        """Add a node, with the lines of the traced code that lead to it."""
        node = super().create_node(kind, target, args, kwargs, name, type_expr)
        if kind == "call_function":
            node.meta["stack_trace"] = "".join(reversed(list(_traced_lines())))
        return node

    def _length(self, value: Any) -> Any:
        """A number that depends on the lengths of inputs, as a node that computes it."""
        expression = value.node.expr
        if expression.is_number:
            return value.node.pytype(expression)
        if expression not in self._lengths:
            unknown = sorted(str(s) for s in expression.free_symbols if s not in self._symbols)
            if unknown:
                raise CaptureError(f"{expression} is used, but no input has a length that is just {', '.join(unknown)}")
            known = {symbol: self._symbol(symbol) for symbol in expression.free_symbols}
            self._lengths[expression] = number_nodes(expression, known)
        return self._lengths[expression]

    def _symbol(self, symbol: sympy.Symbol) -> fx.Proxy:
        source, axis = self._symbols[symbol]
        if symbol not in self._lengths:
            proxy = self.create_proxy("call_function", torch.ops.aten.sym_size.int, (source, axis), {})
            proxy.node.meta["val"] = source.node.meta["val"].shape[axis]
            self._lengths[symbol] = proxy.node
        return self.proxy(self._lengths[symbol])

    # A trace

    def trace(  # type: ignore[override]
        self,
        root: Callable[..., Any],
        concrete_args: tuple[Any, ...] = (),
        concrete_kwargs: Mapping[str, Any] | None = None,
    ) -> fx.Graph:
        """Run `root`, a function or a module, on these arguments (pytrees), and give the graph of what it did.

        Each leaf of the arguments is a placeholder; the output is the list of the leaves of the result. Parameters and
        buffers of a module keep their names.

        Raises:
            CaptureError: the function does something that a graph cannot say; see `record`.
        """
        with _out_of_other_traces():
            return self._trace(root, tuple(concrete_args), dict(concrete_kwargs or {}))

    def _trace(self, root: Callable[..., Any], given: tuple[Any, ...], keywords: dict[str, Any]) -> fx.Graph:
        leaves, self.in_spec = pytree.tree_flatten((given, keywords))
        tensors = tensors_of(root) if isinstance(root, nn.Module) else {}
        self.memory.adopt([*tensors.values(), *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))])
        names = _leaf_names(root, given, keywords)
        wrapped = [self.placeholder(name, leaf) for name, leaf in zip(names, leaves, strict=True)]
        stand_ins = {name: self.attribute(name, tensor) for name, tensor in tensors.items()}
        args, kwargs = pytree.tree_unflatten(wrapped, self.in_spec)
        with ExitStack() as stack:
            if isinstance(root, nn.Module):
                stack.enter_context(plain_tensors_kept(root))
                stack.enter_context(tensors_replaced(root, stand_ins))
                stack.enter_context(buffers_watched(root))
                stack.enter_context(self._modules_followed(root))
            # Models keep results in caches of their own, but not while they are told that they are captured.
            stack.enter_context(_compiling_state_context())
            stack.enter_context(_Lifting(self))
            stack.enter_context(_Recording(self))
            result = root(*args, **kwargs)
        results, self.out_spec = pytree.tree_flatten(result)
        self.graph.output([self._result(leaf) for leaf in results])
        self._closed = True
        self.graph.eliminate_dead_code()
        return self.graph

    def _result(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
            return self.create_arg(leaf)
        if leaf is None or isinstance(leaf, bool | int | float | complex | str):
            return leaf
        raise CaptureError(
            f"the traced function returns a {type(leaf).__name__}, which is no tensor, number or registered pytree; "
            "return its tensors"
        )

    @contextmanager
    def _modules_followed(self, root: nn.Module) -> Iterator[None]:
        """Keep in `module_stack`, which nodes get a copy of, what modules are being called."""
        with ExitStack() as stack:
            for path, module in root.named_modules():
                entry = (path, type(module))

                def enter(_module: nn.Module, _args: Any, entry: Any = entry) -> None:
                    self.module_stack[f"{entry[0]}@{len(self.module_stack)}"] = entry

                def leave(_module: nn.Module, _args: Any, _result: Any) -> None:
                    if self.module_stack:
                        self.module_stack.popitem()

                stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
            yield


@contextmanager
def _out_of_other_traces() -> Iterator[None]:
    """Let nothing be recorded by a trace that this code is run by: a trace inside of it has a graph of its own."""
    with ExitStack() as stack:
        if any(isinstance(mode, _Recording) for mode in _get_current_dispatch_mode_stack()):
            stack.enter_context(_disable_current_modes())
        yield


def _leaf_names(root: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Names for the placeholders: those of the parameters, with a number when an argument holds several leaves."""
    code = getattr(root.forward if isinstance(root, nn.Module) else root, "__code__", None)
    parameters = list(code.co_varnames[: code.co_argcount]) if code is not None else []
    if isinstance(root, nn.Module) or hasattr(root, "__self__"):
        parameters = parameters[1:]
    positional = [parameters[at] if at < len(parameters) else f"arg_{at}" for at in range(len(args))]
    names: list[str] = []
    for name, value in (*zip(positional, args, strict=True), *kwargs.items()):
        count = len(pytree.tree_leaves(value))
        names += [name] if count == 1 else [f"{name}_{at}" for at in range(count)]
    return [f"{name}_" if keyword.iskeyword(name) or name in _TAKEN else name for name in names]


def _traced_lines() -> Iterator[str]:
    """The lines of the traced code that are being run, innermost first, as a traceback writes them."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not DispatchTracer.trace.__code__:
        name = frame.f_code.co_filename
        ours = name.startswith((_TORCH, _OWN)) and not name.startswith(_LAYERS)
        if not ours and name != _CALLS and not name.startswith("<"):
            line = linecache.getline(name, frame.f_lineno).strip()
            yield f'  File "{name}", line {frame.f_lineno}, in {frame.f_code.co_name}\n    {line}\n'
        frame = frame.f_back  # type: ignore[assignment]


def _asking_line() -> tuple[str, int, str]:
    """File, number and text of the innermost line of the traced code that is no torch."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not DispatchTracer.trace.__code__:
        name = frame.f_code.co_filename
        if not name.startswith((_TORCH, _OWN, "<")):
            return name, frame.f_lineno, linecache.getline(name, frame.f_lineno).strip()
        frame = frame.f_back  # type: ignore[assignment]
    return "", 0, "a line that is not known"
