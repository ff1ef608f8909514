"""Operators put into a graph that torch traces, without the parts of its way there that nothing here needs.

For each operator torch's tracer asks every result whether it is contiguous in three ways, flattens arguments twice, and
enters several blocks. What is done here for the plain operators is the rest of it; all others go torch's own way.
"""
# ruff: noqa: ANN401 - arguments are handed through from torch, which types them as Any

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final, final

import torch
from torch import fx
from torch._subclasses.fake_impls import fast_detach
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import (
    fetch_sym_proxy,
    get_proxy_mode,
    get_proxy_slot,
    track_tensor,
    track_tensor_tree,
)

from t2n_hf.trace.automatic_types import refuse_automatic_types
from t2n_hf.trace.lines import lines_noted
from t2n_hf.trace.quick_results import quick_result
from t2n_hf.trace.replay import Recording

__all__ = ["quick_proxies"]

_LENGTHS: Final = (torch.SymInt, torch.SymFloat, torch.SymBool)
_PLAIN: Final = (
    int,
    float,
    bool,
    str,
    complex,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_aten: Final = torch.ops.aten
_OTHERS: Final = frozenset((_aten.lift_fresh.default, _aten.is_nonzero.default, _aten.sym_numel.default))


class _Unknown(Exception):
    """An argument that torch has to see to."""


@contextmanager
def quick_proxies(recording: Recording | None = None) -> Iterator[None]:
    """Put the operators of the trace that is going on into its graph in this way until the block is left.

    The method that torch calls for each operator is replaced on the mode of this one trace, so that it is still of the
    class that torch looks for. Nothing is changed where no trace of this kind is going on.

    Args:
        recording: takes note of each operator, where all of the trace can be.
    """
    mode = get_proxy_mode()
    with ExitStack() as stack:
        if mode is not None:
            # The frame of the block; that of its `with` statement lies between.
            stack.enter_context(lines_noted(mode.tracer, sys._getframe(2)))
        if mode is None or not mode.pre_dispatch or "__torch_dispatch__" in vars(mode):
            yield
            return
        vars(mode)["__torch_dispatch__"] = _Quick(mode, recording)
        try:
            yield
        finally:
            del vars(mode)["__torch_dispatch__"]
        if recording is not None:
            recording.close(mode.tracer)


@final
class _Quick:
    """`__torch_dispatch__` of a mode that traces."""

    def __init__(self, mode: Any, recording: Recording | None) -> None:
        self._tracer = mode.tracer
        self._table: Mapping[Any, Any] = mode.decomposition_table
        self._torch: Callable[..., Any] = mode.__torch_dispatch__
        self._recording = recording
        self._is_plain: dict[Any, bool] = {}
        self._exact = not getattr(mode, "emulate_precision_casts", False)
        self._length = fetch_sym_proxy(mode.tracer)

    def __call__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse_automatic_types(func, args, kwargs or {}, self._tracer)
        plain = self._is_plain.get(func)
        if plain is None:
            plain = self._is_plain[func] = self._exact and func not in self._table and _is_plain(func)
        if plain:
            try:
                nodes = fx.node.map_aggregate((args, kwargs or {}), self._node_of)
            except _Unknown:
                plain = False
        if not plain:
            return self._by_torch(func, types, args, kwargs or {})
        out = self._record(func, args, kwargs or {}, nodes)
        if self._recording is not None:
            self._recording.add(func, (args, kwargs or {}), nodes, out, self._tracer)
        return out

    def _by_torch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        nodes = None
        if self._recording is not None and _is_in_place(func):
            with suppress(_Unknown):
                nodes = fx.node.map_aggregate((args, kwargs), self._node_of)
        out = self._torch(func, types, args, kwargs)
        if self._recording is not None and nodes is not None and out is args[0]:
            self._recording.add(func, (args, kwargs), nodes, out, self._tracer)
        elif self._recording is not None:
            self._recording.miss(func)
        return out

    def _record(self, func: Any, args: Any, kwargs: Any, nodes: Any) -> Any:
        tracer = self._tracer
        name = tracer.graph._target_to_str(func.overloadpacket.__name__)
        node = tracer.create_node("call_function", func, *nodes, name=name)
        proxy = fx.Proxy(node, tracer)
        # Lengths that nothing uses are no nodes.
        before, tracer.enable_thunkify = tracer.enable_thunkify, True
        # What torch itself asks to make a result is nothing that a mode for functions has to see.
        with torch._C.DisableTorchFunction():
            try:
                out = quick_result(func, args, kwargs)
                if out is None:
                    out = func(*args, **kwargs)
                if type(out) is FakeTensor and not _has_new_symbols(out):
                    track_tensor(out, proxy, constant=None, tracer=tracer)
                    node.meta["val"] = fast_detach(out.fake_mode, out)
                    return out
            finally:
                tracer.enable_thunkify = before
            return track_tensor_tree(out, proxy, constant=None, tracer=tracer)

    def _node_of(self, leaf: Any) -> Any:
        if isinstance(leaf, FakeTensor):
            slot: Any = get_proxy_slot(leaf, self._tracer, None)
            if slot is None or slot.constant is not None:
                raise _Unknown
            return slot.proxy.node
        if isinstance(leaf, _LENGTHS):
            found = self._length(leaf)
            return found.node if isinstance(found, fx.Proxy) else found
        if isinstance(leaf, _PLAIN):
            return leaf
        raise _Unknown


def _has_new_symbols(out: FakeTensor) -> bool:
    """Whether lengths that nothing is known of have come up, which torch notes on the node that they come from."""
    environment = out.fake_mode.shape_env
    return environment is not None and bool(environment.pending_fresh_unbacked_symbols)


def _is_in_place(func: Any) -> bool:
    """Whether an operator writes into its first argument, gives that, and does nothing else."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return False
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments]
    return written[:1] == [True] and not any(written[1:]) and len(func._schema.returns) == 1


def _is_plain(func: Any) -> bool:
    """Whether an operator makes tensors of tensors and numbers, and does nothing else."""
    if not isinstance(func, torch._ops.OpOverload) or func in _OTHERS or func.namespace == "prim":
        return False
    schema = func._schema
    returned = all(str(result.type) in ("Tensor", "List[Tensor]") for result in schema.returns)
    asks = torch.Tag.data_dependent_output in func.tags
    return bool(schema.returns) and returned and not schema.is_mutable and not asks
