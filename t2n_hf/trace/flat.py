"""An interface with its arguments laid flat: one list of example tensors, one entry of dynamic lengths for each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from t2n_hf.errors import CaptureError, ConfigError
from t2n_hf.trace.alike import groups_of, spread
from t2n_hf.trace.distances import distances_of_any_rows
from t2n_hf.trace.interface import Interface
from t2n_hf.trace.late_calls import outputs_left_out
from t2n_hf.trace.quick_proxies import quick_proxies
from t2n_hf.trace.recurrent import RecurrentLayersKept
from t2n_hf.trace.swap import buffers_watched
from t2n_hf.trace.tensor_lengths import TensorLengthsKept
from t2n_hf.trace.walk import modules_of

__all__ = ["FlatModule", "dim_name", "flatten_interface"]


def dim_name(entry: object) -> str | None:
    """Name of a named `torch.export.Dim`; None for anything else that a dynamic shape may hold."""
    return entry.__name__ if isinstance(entry, Dim) else None


@final
class FlatModule(nn.Module):
    """The module of an interface, called with a list of tensors and returning a tuple of tensors.

    Called with fewer tensors, it makes the others: they are like the first of their group. Lengths that share a named
    Dim are compared before the module runs: the tracer then knows one symbol for all of them, not one for each input.
    """

    def __init__(
        self,
        interface: Interface,
        spec: Any,  # noqa: ANN401 - of pytree
        constants: dict[int, Any],
        dims: list[Any],
        groups: list[list[int]],
    ) -> None:
        super().__init__()
        self.module = interface.module
        self._spec = spec
        self._constants = constants
        self._groups = groups
        self._shared = _shared_dims({group[0]: dims[group[0]] for group in groups})
        self._count = len(dims)
        self._expected = len(interface.output_names)

    def forward(self, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run the module."""
        with quick_proxies():
            return self._forward(tensors)

    def _forward(self, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        if len(tensors) != self._count:
            tensors = spread(tensors, self._groups)
        for places in self._shared:
            (first, axis), *others = places
            for other, other_axis in others:
                if tensors[first].shape[axis] != tensors[other].shape[other_axis]:
                    raise CaptureError(f"inputs {first} and {other} share a length but differ in it")
        rest = iter(tensors)
        total = len(tensors) + len(self._constants)
        leaves = [self._constants[at] if at in self._constants else next(rest) for at in range(total)]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        # Here, and not around the whole of torch.export, which asks each tensor for its attributes again and again.
        with buffers_watched(self.module), distances_of_any_rows(), RecurrentLayersKept(), TensorLengthsKept():
            results = pytree.tree_leaves(self.module(*args, **kwargs))
        results = [result for result in results if result is not None]
        wrong = sorted({type(result).__name__ for result in results if not isinstance(result, torch.Tensor)})
        if wrong:
            raise CaptureError(f"the module returns {', '.join(wrong)} beside tensors; return tensors only")
        if len(results) != self._expected:
            raise CaptureError(
                f"the module returns {len(results)} tensors, the interface names {self._expected} outputs"
            )
        return tuple(outputs_left_out(results))


def _shared_dims(dims: Mapping[int, Any]) -> list[list[tuple[int, int]]]:
    places: dict[str, list[tuple[int, int]]] = {}
    for tensor, entry in dims.items():
        for axis, dim in entry.items():
            name = dim_name(dim)
            if name is not None:
                places.setdefault(name, []).append((tensor, axis))
    return list(places.values())


@dataclass(frozen=True)
class FlatInterface:
    """`module(tensors)` with the dynamic lengths of each tensor as {axis: Dim}; `groups` of tensors that are alike.

    `parts` are those of the interface's module, its layers among them.
    """

    module: FlatModule
    tensors: list[torch.Tensor]
    dims: list[dict[int, Any]]
    groups: list[list[int]]
    parts: list[nn.Module]

    @property
    def is_free(self) -> bool:
        """Whether some length is to be free."""
        return any(dim is not None for dims in self.dims for dim in dims.values())

    @property
    def firsts(self) -> tuple[list[torch.Tensor], list[dict[int, Any]]]:
        """Tensors and dims of the first of each group: the module runs with these as well."""
        numbers = [group[0] for group in self.groups]
        return [self.tensors[number] for number in numbers], [self.dims[number] for number in numbers]


def flatten_interface(interface: Interface, dtype: torch.dtype) -> FlatInterface:
    """Lay an interface flat; floating examples become `dtype` (precise ones f32), and no example value is read.

    Raises:
        ConfigError: names and tensors do not match in number, or the dynamic shapes do not follow the arguments.
    """
    leaves, spec = pytree.tree_flatten((tuple(interface.args), dict(interface.kwargs)))
    entries = _flat_entries(interface)
    tensors, dims, constants = [], [], {}
    names = iter(interface.input_names)
    for at, (leaf, entry) in enumerate(zip(leaves, entries, strict=True)):
        if isinstance(leaf, torch.Tensor):
            floating = torch.promote_types(dtype, torch.float32) if next(names, "") in interface.precise else dtype
            tensors.append(torch.zeros(tuple(leaf.shape), dtype=floating if leaf.is_floating_point() else leaf.dtype))
            dims.append(_by_axis(entry))
        else:
            constants[at] = leaf
    if len(tensors) != len(interface.input_names):
        raise ConfigError(f"the example has {len(tensors)} tensors, input_names has {len(interface.input_names)} names")
    groups = groups_of(tensors, dims)
    module = FlatModule(interface, spec, constants, dims, groups)
    return FlatInterface(module, tensors, dims, groups, modules_of(interface.module))


def _flat_entries(interface: Interface) -> list[Any]:
    shapes = interface.dynamic_shapes
    count, names = len(interface.args), list(interface.kwargs)
    if isinstance(shapes, Mapping):
        parameters = [*_parameter_names(interface.module, count), *names]
        unknown = sorted(set(shapes) - set(parameters))
        if unknown:
            raise ConfigError(f"dynamic_shapes names {', '.join(unknown)}; the example has {', '.join(parameters)}")
        shapes = tuple(shapes.get(name) for name in parameters)
    elif shapes is None:
        shapes = (None,) * (count + len(names))
    if len(shapes) != count + len(names):
        raise ConfigError(f"dynamic_shapes has {len(shapes)} entries for {count + len(names)} arguments")
    values = [*interface.args, *interface.kwargs.values()]
    return [entry for value, shape in zip(values, shapes, strict=True) for entry in _spread(value, shape)]


def _parameter_names(module: nn.Module, count: int) -> list[str]:
    code = module.forward.__code__
    return list(code.co_varnames[1 : 1 + count])


def _spread(value: Any, shape: Any) -> list[Any]:  # noqa: ANN401 - pytrees
    """The dynamic shape of each leaf of `value`."""
    children, _ = pytree.tree_flatten(value, is_leaf=lambda node: node is not value)
    if isinstance(value, torch.Tensor) or (len(children) == 1 and children[0] is value):
        return [shape]
    if shape is None:
        return [None] * len(pytree.tree_leaves(value))
    by_name = isinstance(value, dict) and isinstance(shape, Mapping)
    parts = [shape.get(key) for key in value] if by_name else _sequence(shape)
    if len(parts) != len(children):
        raise ConfigError(f"dynamic_shapes has {len(parts)} entries where {type(value).__name__} has {len(children)}")
    return [entry for child, part in zip(children, parts, strict=True) for entry in _spread(child, part)]


def _sequence(shape: Any) -> list[Any]:  # noqa: ANN401 - a list, tuple or mapping
    return list(shape.values()) if isinstance(shape, Mapping) else list(shape)


def _by_axis(entry: Any) -> dict[int, Any]:  # noqa: ANN401 - one leaf of dynamic_shapes
    if entry is None:
        return {}
    pairs = entry.items() if isinstance(entry, Mapping) else enumerate(entry)
    return {axis: dim for axis, dim in pairs if dim is not None}
