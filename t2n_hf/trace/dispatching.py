"""dispatch_trace: a function as a graph of the ATen operators that it calls, from one run."""
# ruff: noqa: ANN401 - arguments and results are pytrees

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

import sympy
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from t2n_hf.errors import ConfigError
from t2n_hf.trace.dispatch_tracer import DispatchTracer

__all__ = ["dispatch_trace"]


def dispatch_trace(
    fn_or_module: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> fx.GraphModule:
    """Run a function or a module once, and give a module that does the same with ATen operators.

    The result is called as `fn_or_module` was, with arguments of the same structure, shapes and dtypes, other tensors
    at will, and gives the same structure. Its nodes are overloads of ATen (and `operator.getitem`, and functions of
    lengths); each has its result in `meta["val"]` (fake tensors), the lines it comes from in `meta["stack_trace"]`,
    and in `meta["nn_module_stack"]` the modules. What a graph does with a tensor in place, it does in place.

    Tensors may be real, fake (of one mode; lengths may be symbols, which stay free) and opaque. With real tensors the
    function runs on values, so it may ask for them (`.item()`, `x[mask]`); `meta["reads"]` of the graph module lists
    where it did so with what comes from its inputs, and the graph holds for inputs that give the same there. Numbers
    and other plain arguments are fixed. Whatever was given is as before afterwards.

    The gradient mode is the caller's: under `torch.inference_mode` operators such as linear, layer_norm and
    scaled_dot_product_attention are kept whole; otherwise torch takes them apart. `torch.compiler.is_compiling()` is
    true for the function, as under torch.export.

    Args:
        fn_or_module: what is traced. Parameters and buffers of a module keep their names as attributes of the result.
        args: positional arguments, pytrees of tensors and plain values.
        kwargs: keyword arguments.

    Raises:
        ConfigError: `args` is no tuple or list.
        CaptureError: values are needed where there are only shapes; an input is an `out=` argument; a buffer is
            replaced; an operator calls functions (`torch.cond`); the result is no pytree.
    """
    if not isinstance(args, tuple | list):
        raise ConfigError(f"args is a {type(args).__name__}; expected a tuple of the positional arguments")
    tracer = DispatchTracer()
    graph = tracer.trace(fn_or_module, tuple(args), kwargs)
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs or {})))
    guards = _guards(tracer)
    names = [node.name for node in graph.nodes if node.op == "placeholder"]
    expected = tuple(_Expected.of(name, leaf) for name, leaf in zip(names, leaves, strict=True))
    graph.set_codegen(_Calling(_Signature(tracer.in_spec, expected, guards), tracer.out_spec))
    used = {node.target for node in graph.nodes if node.op == "get_attr"}
    attributes = {name: value for name, value in tracer.attributes.items() if name in used}
    name = type(fn_or_module).__name__ if isinstance(fn_or_module, nn.Module) else "Traced"
    module = fx.GraphModule(attributes, graph, name)
    module.meta["reads"] = tuple(tracer.reads)
    return module


def _guards(tracer: DispatchTracer) -> tuple[Any, ...]:
    """What the trace assumed of symbolic lengths."""
    environment = tracer.memory.mode.shape_env
    return () if environment is None else tuple(guard.expr for guard in environment.guards)


def _text(shape: Iterable[Any]) -> str:
    return f"({', '.join(map(str, shape))})"


@final
@dataclass(frozen=True)
class _Expected:
    """What a leaf of the arguments was in the trace: a tensor of a shape (numbers and expressions), or a value."""

    name: str
    shape: tuple[Any, ...] | None
    value: Any

    @classmethod
    def of(cls, name: str, leaf: Any) -> "_Expected":
        if not isinstance(leaf, torch.Tensor):
            return cls(name, None, leaf)
        lengths = [length.node.expr if isinstance(length, torch.SymInt) else length for length in leaf.shape]
        return cls(name, tuple(lengths), leaf.dtype)

    def check(self, leaf: Any, symbols: dict[sympy.Symbol, int]) -> None:
        """Raise ConfigError when `leaf` is something else; keep what its lengths say of symbols."""
        if self.shape is None:
            same = type(leaf) is type(self.value) and (leaf == self.value or leaf is self.value)
            if not same:
                raise ConfigError(f"argument {self.name!r} was {self.value!r} in the trace, got {leaf!r}; trace again")
            return
        if not isinstance(leaf, torch.Tensor):
            raise ConfigError(f"argument {self.name!r} was a tensor in the trace, got {type(leaf).__name__}")
        if leaf.dtype is not self.value or leaf.ndim != len(self.shape):
            self._refuse(leaf)
        for length, actual in zip(self.shape, leaf.shape, strict=True):
            if isinstance(length, sympy.Symbol):
                symbols.setdefault(length, actual)

    def check_lengths(self, leaf: Any, symbols: Mapping[sympy.Symbol, int]) -> None:
        """Raise ConfigError when a length is another one than in the trace, given what the symbols are now."""
        for length, actual in zip(self.shape or (), getattr(leaf, "shape", ()), strict=True):
            wanted = length.subs(symbols) if isinstance(length, sympy.Expr) else length
            if wanted != actual:
                self._refuse(leaf)

    def _refuse(self, leaf: torch.Tensor) -> None:
        raise ConfigError(
            f"argument {self.name!r} was {self.value} {_text(self.shape or ())} in the trace, got {leaf.dtype} "
            f"{_text(leaf.shape)}; trace again, or with fake tensors of symbolic lengths"
        )


@final
@dataclass(frozen=True)
class _Signature:
    """The arguments of a trace: their structure and what each leaf was."""

    spec: pytree.TreeSpec
    leaves: tuple[_Expected, ...]
    guards: tuple[Any, ...]

    def flat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The leaves of a call. Raises ConfigError for one that the trace does not hold for."""
        values, spec = pytree.tree_flatten((args, {name: kwargs[name] for name in self._order(kwargs)}))
        if spec != self.spec:
            raise ConfigError(f"called with arguments of the structure {spec}; the trace was made with {self.spec}")
        symbols: dict[sympy.Symbol, int] = {}
        for expected, value in zip(self.leaves, values, strict=True):
            expected.check(value, symbols)
        for expected, value in zip(self.leaves, values, strict=True):
            if expected.shape is not None:
                expected.check_lengths(value, symbols)
        for guard in self.guards:
            if guard.subs(symbols) == sympy.false:
                raise ConfigError(f"the trace holds for {guard}, which {symbols} do not fulfil; trace again")
        return values

    def _order(self, kwargs: dict[str, Any]) -> list[str]:
        traced = self.spec.child(1).context
        return traced if set(traced) == set(kwargs) else list(kwargs)


@final
class _Calling(fx.CodeGen):
    """Lets the graph be called with the arguments of what was traced, and give its result."""

    def __init__(self, signature: _Signature, out_spec: pytree.TreeSpec) -> None:
        super().__init__()
        self._signature = signature
        self._out_spec = out_spec

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Calling":
        """Nothing in it changes: a copy of the graph shares it."""
        return _Calling(self._signature, self._out_spec)

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, *, expanded_def: bool = False) -> str:
        """The head of `forward`, and its inputs laid flat."""
        names = [variable.split(":")[0].split("=")[0].strip() for variable in free_vars]
        head = super().gen_fn_def(["self", "*args", "**kwargs"], maybe_return_annotation, expanded_def=expanded_def)
        return f"{head}\n    [{', '.join(names)}] = t2n_hf_arguments(args, kwargs)"

    def generate_output(self, output_args: Any, *, descs: Any = None, repr_fn: Any = None) -> str:
        """The last line of `forward`."""
        return f"return t2n_hf_result({(repr_fn or repr)(output_args)})"

    def additional_globals(self) -> list[tuple[str, Any]]:
        """What these lines call."""
        return [("t2n_hf_arguments", self._signature.flat), ("t2n_hf_result", self.process_outputs)]

    def process_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """Lay arguments flat, for `torch.fx.Interpreter`."""
        return self._signature.flat(args, kwargs)

    def process_outputs(self, outputs: Any) -> Any:
        """Give the flat results their structure."""
        return pytree.tree_unflatten(list(outputs), self._out_spec)
