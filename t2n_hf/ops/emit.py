"""The context that an emitter writes in: the builder, and what is known of the node of the captured graph."""

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import sympy
import torch
from torch import fx

from t2n_hf.errors import EmitError, T2NError
from t2n_hf.nnef.ir import Assign, Name
from t2n_hf.nnef.names import Namer
from t2n_hf.nnef.versions import version_key
from t2n_hf.ops.bodies import Bodies
from t2n_hf.ops.builder import Builder
from t2n_hf.ops.calculated import calculated
from t2n_hf.ops.dims import Length, Shape, length_of, same
from t2n_hf.ops.table import COMPLEX_EMITTERS, Emitter, EmitterTable, place_of
from t2n_hf.ops.value import ComplexValue, Value, is_number
from t2n_hf.places import module_of, python_name

__all__ = ["Emit", "EmitOptions"]


@dataclass(frozen=True, kw_only=True)
class EmitOptions:
    """What may be chosen.

    Attributes:
        float_dtype: the dtype of the export; stands for bfloat16 where a model asks for that.
        attention: "decomposed" (products and a softmax; faster in tract on a CPU) or "sdpa" (tract's own operator).
        target: the version of tract that has to run the archive; None for the newest that is known.
    """

    float_dtype: torch.dtype = torch.float32
    attention: Literal["decomposed", "sdpa"] = "decomposed"
    target: str | None = None

    def reaches(self, version: str) -> bool:
        """Whether what came with this version of tract may be written."""
        return self.target is None or version_key(self.target) >= version_key(version)


class Emit(Builder):
    """Writes the nodes of one graph.

    Args:
        table: the emitters.
        namer: gives names; input and output names are reserved in it.
        symbols: symbol of the captured graph -> named symbol.
        options: what may be chosen.
        fragments: bodies of loops that were written, shared by all that write one document.
    """

    def __init__(
        self,
        table: EmitterTable,
        namer: Namer,
        symbols: Mapping[sympy.Symbol, sympy.Expr],
        options: EmitOptions,
        fragments: Bodies | None = None,
    ) -> None:
        super().__init__(namer, fragments)
        self.options = options
        self.env: dict[fx.Node, Any] = {}
        self.final_names: dict[fx.Node, str] = {}
        self._table = table
        self._symbols = dict(symbols)
        self._lengths: dict[Any, Length] = {}
        self._shapes: dict[int, tuple[Shape, torch.Tensor]] = {}
        self._node: fx.Node | None = None

    # What emitters ask

    @property
    def node(self) -> fx.Node:
        """The node that is being written."""
        if self._node is None:
            raise EmitError("no node is being written")
        return self._node

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the node's result (of its first result)."""
        return self.float_type(_first(self.node.meta["val"]).dtype)

    @property
    def shape(self) -> Shape:
        """Shape of the node's result (of its first result)."""
        return self.shape_of(_first(self.node.meta["val"]))

    def shape_of(self, value: torch.Tensor) -> Shape:
        """Shape of a fake tensor in named symbols."""
        known = self._shapes.get(id(value))
        if known is None:
            shape = tuple(length if type(length) is int else self._length(length) for length in value.shape)
            known = self._shapes[id(value)] = shape, value  # the tensor too: its id is its own as long as it lives
        return known[0]

    def _length(self, length: Any) -> Length:  # noqa: ANN401 - a length as torch has it
        expression = length.node.expr if isinstance(length, torch.SymInt) else length
        if expression not in self._lengths:  # a model has few, and asks for them again and again
            self._lengths[expression] = length_of(length, self._symbols)
        return self._lengths[expression]

    def float_type(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that stands for `dtype` in the archive; of complex numbers that of their parts."""
        if dtype.is_complex:
            return torch.float64 if dtype is torch.complex128 else torch.float32
        return self.options.float_dtype if dtype is torch.bfloat16 else dtype

    def refuse(self, why: str) -> EmitError:
        """An error that names the operator, where it comes from and why it cannot be written."""
        return EmitError(f"{self.site}: {why}")

    # Writing a graph

    def run(self, nodes: Iterable[fx.Node]) -> None:
        """Write calls, in order. Those that compute lengths write nothing."""
        for node in nodes:
            if node.op == "call_function" and node not in self.env:
                self._write(node)

    def _write(self, node: fx.Node) -> None:
        result = node.meta.get("val")
        if isinstance(result, torch.SymInt | torch.SymBool | torch.SymFloat | int | float | bool):
            return
        emitter = self._table.get(node.target)
        if emitter is None:
            raise EmitError(f"{node.target} in {module_of(node) or 'the model'} has no emitter")
        if node.target is operator.getitem:
            value = self.env[node.args[0]][node.args[1]] if node.args[0] in self.env else None  # type: ignore[index]
            if isinstance(value, Value) and node not in self.final_names:  # it was checked with its call
                self.env[node] = value
                return
        outer = self._node, self.base, self.site
        self._node, self.base = node, python_name(node)
        self.site = f"{node.target} in {module_of(node) or 'the model'}"
        start = len(self.body)
        self._tensor_of_number(node)
        args, kwargs = self.operand(node.args), self.operand(node.kwargs)
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten":
            # A layer, and what takes one of several results, hand on whatever they are given.
            emitter = self._complex_emitter(node) if _is_complex(args, kwargs, result) else emitter
        self.env[node] = self._checked(self._emitted(emitter, args, kwargs), result)
        if node in self.final_names:
            self._refuse_complex(self.env[node], self.final_names[node])
            self.env[node] = self._renamed(self.env[node], self.final_names[node], start)
        self._node, self.base, self.site = outer

    def _emitted(self, emitter: Emitter, args: Any, kwargs: Any) -> Any:  # noqa: ANN401 - what an emitter takes and gives
        try:
            return emitter(self, *args, **kwargs)
        except T2NError:
            raise
        except Exception as error:
            raise self.refuse(f"its emitter, {place_of(emitter)}, failed: {type(error).__name__}: {error}") from error

    def _complex_emitter(self, node: fx.Node) -> Emitter:
        emitter = COMPLEX_EMITTERS.get(node.target)
        if emitter is None:
            raise self.refuse("it has no form for complex numbers; compute with their real and imaginary parts")
        return emitter

    def _tensor_of_number(self, node: fx.Node) -> None:
        """Constants of rank 0 are numbers to operators of several tensors; a function of one gets a tensor."""
        tensors = [source for source in node.all_input_nodes if isinstance(source.meta.get("val"), torch.Tensor)]
        if len(tensors) == 1 and len(node.args) > 0 and is_number(self.env.get(tensors[0])):
            self.env[tensors[0]] = self.full((), self.env[tensors[0]], self.float_type(tensors[0].meta["val"].dtype))

    def write_outputs(self, outputs: Iterable[tuple[fx.Node, str]]) -> None:
        """Give every output its name: those that are inputs, or have several names, are copied."""
        for node, name in outputs:
            if is_number(self.env[node]):  # a constant of rank 0
                self.env[node] = self.full((), self.env[node], self.float_type(node.meta["val"].dtype))
            self._refuse_complex(self.env[node], name)
            if self.env[node].name.text != name:
                self.copy(self.env[node], name)

    def _refuse_complex(self, value: Any, name: str) -> None:  # noqa: ANN401 - a result
        if isinstance(value, ComplexValue):
            raise EmitError(f"{name} is complex, and an archive has no complex numbers; give view_as_real() of it")

    def operand(self, arg: Any) -> Any:  # noqa: ANN401 - an argument of a node
        """An argument of a node as emitters see it."""
        if isinstance(arg, fx.Node):
            if arg in self.env:
                return self.env[arg]
            return self._number(arg.meta["val"])
        if isinstance(arg, torch.SymInt):
            return self._number(arg)
        if isinstance(arg, list | tuple):
            return [self.operand(item) for item in arg]
        if isinstance(arg, dict):
            return {key: self.operand(value) for key, value in arg.items()}
        if arg is torch.bfloat16:
            return self.options.float_dtype
        return arg

    def _number(self, value: Any) -> Any:  # noqa: ANN401 - a plain or symbolic number
        if isinstance(value, torch.SymInt):
            return length_of(value, self._symbols)
        if isinstance(value, bool | int | float):
            return value
        expression = value.node.expr if isinstance(value, torch.SymFloat) else None
        if expression is None or not expression.free_symbols <= self._symbols.keys():
            raise self.refuse(f"an argument is {value!r}, which depends on the values of a tensor")
        number = calculated(self, expression.xreplace(self._symbols))
        return number if self.dtype is torch.float64 else self.cast(number, torch.float32)

    def _checked(self, written: Any, expected: Any) -> Any:  # noqa: ANN401 - a value, or values
        """Compare what an emitter gave with what torch said, and take torch's lengths."""
        if isinstance(expected, list | tuple):
            if not isinstance(written, list | tuple) or len(written) != len(expected):
                raise self.refuse("its emitter gave another number of results than torch")
            # Of several results, those that nobody asks for need not be made.
            pairs = zip(written, expected, strict=True)
            return [None if value is None else self._checked(value, fake) for value, fake in pairs]
        if isinstance(written, ComplexValue) and expected.dtype.is_complex:
            return ComplexValue(self._checked(written.real, expected), self._checked(written.imag, expected))
        if not isinstance(written, Value):
            if written is None and isinstance(expected, torch.Tensor):
                raise self.refuse(f"its emitter gave None where torch has {expected.dtype} {self.shape_of(expected)}")
            return written
        shape, dtype = self.shape_of(expected), self.float_type(expected.dtype)
        if dtype is written.dtype and shape == written.shape and [*map(type, shape)] == [*map(type, written.shape)]:
            return written  # with lengths that are numbers as torch's are
        fits = len(shape) == written.rank and all(
            same(a, b) or not (isinstance(a, int) and isinstance(b, int))
            for a, b in zip(shape, written.shape, strict=True)
        )
        if not fits or written.dtype is not dtype:
            raise self.refuse(f"its emitter gave {written.dtype} {written.shape} where torch has {dtype} {shape}")
        return replace(written, shape=shape)

    def _renamed(self, value: Value, name: str, start: int) -> Value:
        """Give the result of a node a name that was reserved for it."""
        if value.name.text == name:
            return value
        mine = any(value.name.text in assign.results for assign in self.body[start:])
        if not mine or value.name.text in self.final_names.values():
            return self.copy(value, name)
        old = value.name.text
        self.body[start:] = [_substituted(assign, old, name) for assign in self.body[start:]]
        # Calls are looked up by their text: what mentions the old name must not be found again.
        self._known = {key: values for key, values in self._known.items() if not _mentions(key, values, old)}
        return replace(value, name=Name(name))

    def copy(self, value: Value, name: str) -> Value:
        """Write the same tensor under a reserved name."""
        self.body.append(Assign((name,), "copy", (self._argument(value),), {}))
        return replace(value, name=Name(name), block=None)


def _is_complex(*items: Any) -> bool:  # noqa: ANN401 - arguments of a call, and what torch says of its result
    """Whether complex numbers are among them."""
    for item in items:
        if isinstance(item, complex | ComplexValue) or (isinstance(item, torch.Tensor) and item.dtype.is_complex):
            return True
        if isinstance(item, list | tuple) and _is_complex(*item):
            return True
        if isinstance(item, dict) and _is_complex(*item.values()):
            return True
    return False


def _first(value: Any) -> torch.Tensor:  # noqa: ANN401 - a tensor, or a list of them
    return value[0] if isinstance(value, list | tuple) else value


def _mentions(key: str, values: list[Value], name: str) -> bool:
    return repr(Name(name)) in key or any(value.name.text == name for value in values)


def _substituted(assign: Assign, old: str, new: str) -> Assign:
    def swap(arg: Any) -> Any:  # noqa: ANN401 - an argument of the graph model
        if isinstance(arg, Name):
            return Name(new) if arg.text == old else arg
        if isinstance(arg, list | tuple):
            return type(arg)(swap(item) for item in arg)
        return arg

    results = tuple(new if result == old else result for result in assign.results)
    kwargs = {key: swap(value) for key, value in assign.kwargs.items()}
    return replace(assign, results=results, args=tuple(swap(arg) for arg in assign.args), kwargs=kwargs)
