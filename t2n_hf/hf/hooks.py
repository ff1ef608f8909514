"""Leases around forward: while a module runs, its weights that live on disk are in memory, and no longer."""

import copy
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from threading import Thread, current_thread
from typing import Any, Final, NoReturn, TypeAlias, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from t2n_hf.errors import BudgetError, ConfigError, ResidencyError, UnsupportedOpError
from t2n_hf.residency import Claim, ResidencyStrategy, Source, TensorResidencyPool
from t2n_hf.tensor.eager import eagerly
from t2n_hf.tensor.offload import OffloadedTensor

__all__ = [
    "ModuleLeases",
    "attach_pools",
    "leases_of",
    "offloaded_parameters",
    "resident_nbytes",
    "window_of",
]

_ATTRIBUTE: Final = "_t2n_leases"
_NESTED: Final = "_t2n_nested_nbytes"
_CALL: Final = nn.Module._call_impl.__code__
_SUSPENDS: Final = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
# A window costs as much room as it has, and reads it again in each pass; one weight or two are enough to overlap.
_WINDOWS_PER_BUDGET: Final = 12
_WINDOWS_PER_MODEL: Final = 40

_Opened: TypeAlias = tuple[TensorResidencyPool, Claim]


@final
class _Call:
    """One module that runs, and what is leased for it."""

    __slots__ = ("module", "opened")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.opened: list[_Opened] = []

    def release(self) -> None:
        """End all claims, also when one cannot be ended as it should; raise what the last of those raised.

        Two threads may do so at once, see `_release_lost`: when this returns, either has ended them.
        """
        failure: Exception | None = None
        for pool, claim in reversed(self.opened):
            try:
                pool.release(claim)
            except Exception as error:  # noqa: BLE001 - raised below
                failure = error
        self.opened.clear()
        if failure is not None:
            raise failure


def offloaded_parameters(model: nn.Module) -> dict[str, OffloadedTensor]:
    """Find the parameters of `model` that live on disk, each tensor once."""
    parameters: Iterator[tuple[str, torch.Tensor]] = model.named_parameters()
    return {name: tensor for name, tensor in parameters if isinstance(tensor, OffloadedTensor)}


def leases_of(model: nn.Module) -> "ModuleLeases | None":
    """Give the leases (and so the pools) of a model with weights on disk, None for any other."""
    found: ModuleLeases | None = getattr(model, _ATTRIBUTE, None)
    return found


@final
class ModuleLeases:
    """Opens leases when a module begins its forward, and releases them when that ends, also by an exception.

    All weights of a module are leased together. Each thread has its own leases. Embeddings are not leased whole: their
    rows are read one by one; neither are fused experts, of which only those that tokens are routed to are read. A
    weight that is read without calling its module is served by the pool that it is bound to.

    `pools` has one pool for each device that computes.
    """

    def __init__(self, pools: Mapping[torch.device, TensorResidencyPool]) -> None:
        self.pools = dict(pools)
        self._calls: dict[Thread, list[_Call]] = {}
        self._handles: list[RemovableHandle] = []
        for pool in self.pools.values():
            pool.call_before_wait(self._release_lost)

    @property
    def pool(self) -> TensorResidencyPool:
        """The pool of a model that computes on one device, the first one of others."""
        return next(iter(self.pools.values()))

    def attach(self, model: nn.Module) -> None:
        """Hook every module of `model` that has weights to lease, and the model itself."""
        self._handles.append(model.register_forward_pre_hook(self._drop_stale))
        for module in model.modules():
            if _leased(module):
                self._handles.append(module.register_forward_pre_hook(self._open))
                self._handles.append(module.register_forward_hook(self._release, always_call=True))
        object.__setattr__(model, _ATTRIBUTE, self)

    def detach(self, model: nn.Module) -> None:
        """Remove every hook, close the pools."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._release_own()
        self._release_lost()
        for pool in self.pools.values():
            pool.close()
        for module in model.modules():
            module.__dict__.pop(_NESTED, None)
            if module.__dict__.get(_ATTRIBUTE) is self:  # of a wrapper, the model inside has it
                del module.__dict__[_ATTRIBUTE]

    # ---- forward --------------------------------------------------------------------------------------------------

    @eagerly
    def _open(self, module: nn.Module, args: Any) -> None:  # noqa: ANN401 - torch's hook signature
        thread = current_thread()
        calls = self._calls.get(thread)
        if calls is None:
            calls = self._calls[thread] = []
        call = _Call(module)
        calls.append(call)
        wanted: dict[TensorResidencyPool, list[tuple[Source, torch.device]]] = {}
        for tensor in _leased(module):
            pool = tensor.pool
            if pool is not None and not pool.closed:
                wanted.setdefault(pool, []).append((tensor.source, tensor.target_device))
        for pool, sources in wanted.items():
            claim = Claim(False, module.__dict__.get(_NESTED, 0))
            call.opened.append((pool, claim))
            try:
                pool.open(claim, sources)
            except ResidencyError:
                if not pool.closed:
                    raise
                # Another thread has closed it since it was looked at: its weights are read without it.

    @eagerly
    def _release(self, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ANN401
        calls = self._calls.get(current_thread())
        if calls and calls[-1].module is module:
            _release_all(calls, calls[-1:])
            return
        # Above it may be what an interrupt left; and if another hook raised before `_open`, it is not there at all.
        known = list(calls or ())  # other threads take out what is left over
        for place in range(len(known) - 1, -1, -1):
            if known[place].module is module:
                _release_all(calls or [], known[place:])
                return

    # ---- what interrupts leave ------------------------------------------------------------------------------------

    @eagerly
    def _drop_stale(self, model: nn.Module, args: Any) -> None:  # noqa: ANN401
        if self._calls:
            self._release_own()
            self._release_lost()

    def _release_own(self) -> None:
        """Release what interrupted forwards of this thread left: torch calls no hook for what is not an Exception."""
        thread = current_thread()
        calls = self._calls.get(thread, [])
        _release_all(calls, list(calls))
        self._calls.pop(thread, None)

    def _release_lost(self) -> None:
        """Release what other threads left that have ended, or were interrupted and run something else now."""
        this = current_thread()
        for thread in list(self._calls):
            if thread is this:
                continue
            calls = self._calls.get(thread, [])
            known = list(calls)
            running = _modules_running_in(thread) if known else set()
            if running is not None:
                _release_all(calls, [call for call in known if id(call.module) not in running])
            if not thread.is_alive():
                self._calls.pop(thread, None)

    # ---- copies ---------------------------------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> NoReturn:  # noqa: ANN401
        """Refuse: a model with weights on disk is not pickled."""
        raise UnsupportedOpError("a model with weights on disk is not pickled; save it with save_pretrained()")

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModuleLeases":
        """Make the leases of a copied model, over pools of its own. The hooks are copied with the model."""
        copied = ModuleLeases({device: copy.deepcopy(pool, memo) for device, pool in self.pools.items()})
        memo[id(self)] = copied
        copied._handles = copy.deepcopy(self._handles, memo)
        return copied


def _release_all(calls: list[_Call], ended: Sequence[_Call]) -> None:
    """Release `ended`, the innermost first, and take them out of `calls`, which other threads may do as well.

    In this order: what an interrupt keeps from being released stays there, and is found by who comes next.
    """
    failure: Exception | None = None
    for call in reversed(ended):
        try:
            call.release()
        except Exception as error:  # noqa: BLE001 - raised below
            failure = error
        with suppress(ValueError):
            calls.remove(call)
    if failure is not None:
        raise failure


def _leased(module: nn.Module) -> list[OffloadedTensor]:
    if isinstance(module, nn.Embedding):
        return []
    # A type is looked at, and no attribute of the tensor, which is slow for those of torch.
    parameters: Iterable[Any] = module._parameters.values()
    return [p for p in parameters if type(p) is OffloadedTensor and len(p.source.shape) < 3]


def _modules_running_in(thread: Thread) -> set[int] | None:
    """Give the ids of the modules that are being called in another thread; None when that cannot be seen just now.

    The thread goes on while its frames are walked. One that returns keeps its caller, but a generator that yields has
    none: what called it is out of sight then.
    """
    frame = sys._current_frames().get(thread.ident or 0) if thread.is_alive() else None
    running = set()
    while frame is not None:
        if frame.f_code is _CALL:
            running.add(id(frame.f_locals.get("self")))
        caller = frame.f_back  # once: it may be gone the next time
        if caller is None and frame.f_code.co_flags & _SUSPENDS:
            return None
        frame = caller
    return running


# ---- budgets ------------------------------------------------------------------------------------------------------


def _needs_of(module: nn.Module, device: torch.device, needs: dict[nn.Module, int]) -> int:
    """Bytes that a module needs at once on `device` with all that it calls; noted in `needs`, by module."""
    if module not in needs:
        own = sum(tensor.nbytes_loaded for tensor in _leased(module) if tensor.target_device == device)
        nested = max((_needs_of(child, device, needs) for child in module.children()), default=0)
        if own and nested:
            module.__dict__[_NESTED] = max(nested, module.__dict__.get(_NESTED, 0))
        needs[module] = own + nested
    return needs[module]


def _refuse_small(model: nn.Module, device: torch.device, budget: int | None) -> None:
    needs: dict[nn.Module, int] = {}
    least = _needs_of(model, device, needs)
    if budget and budget < least:
        # The innermost one that needs it all: its callers need no more.
        name = next(n for n, m in reversed(list(model.named_modules())) if needs[m] == least) or type(model).__name__
        raise BudgetError(
            f"{budget} bytes for weights on disk are fewer than {name} needs at once ({least}) on {device}; the least "
            f"budget is {least}: raise max_resident_bytes or max_memory, or quantize that module"
        )


def window_of(budget: int | None, total: int) -> int:
    """Bytes to read ahead of a model whose weights on disk take `total` bytes, within `budget` (None: no limit)."""
    if budget is None or budget >= total:
        return 0
    return min(budget // _WINDOWS_PER_BUDGET, total // _WINDOWS_PER_MODEL)


def attach_pools(
    model: nn.Module,
    budgets: Mapping[torch.device, int | None],
    *,
    readahead_nbytes: int | None = None,
    strict: bool = True,
) -> ModuleLeases:
    """Make a pool for each device that computes with weights of `model` that live elsewhere, bind and hook them.

    `budgets` says how many bytes of them may be in memory on each device (None: no limit). It may be 0: then nothing is
    kept beyond the module that runs. `readahead_nbytes`: see
    TensorResidencyPool; None chooses a window, 0 reads nothing ahead. With `strict` the budgets also hold while several
    threads run the model: they then wait for each other.

    Raises BudgetError when a budget is not 0 and a module needs more than that at once, ConfigError when a device with
    weights has none.
    """
    tensors: dict[torch.device, list[tuple[str, OffloadedTensor]]] = {}
    for name, tensor in offloaded_parameters(model).items():
        tensors.setdefault(tensor.target_device, []).append((name, tensor))
    pools = {}
    for device, named in tensors.items():
        if device not in budgets:
            raise ConfigError(f"{named[0][0]} is to be loaded on {device}, which has no budget; give one for it")
        budget = budgets[device]
        _refuse_small(model, device, budget)
        sources = {tensor.source.key: tensor.nbytes_loaded for _, tensor in named}
        window = window_of(budget, sum(sources.values())) if readahead_nbytes is None else readahead_nbytes
        pools[device] = TensorResidencyPool(
            budget,
            strategy=ResidencyStrategy.LEARNED,
            strict=strict and bool(budget),
            readahead_nbytes=window if budget else 0,
        )
    for device, named in tensors.items():
        for _, tensor in named:
            tensor.bind_pool(pools[device])
    leases = ModuleLeases(pools)
    leases.attach(model)
    return leases


def resident_nbytes(model: nn.Module) -> int:
    """Bytes of weights on disk that are in memory now."""
    leases = leases_of(model)
    return 0 if leases is None else sum(pool.resident_bytes for pool in leases.pools.values())
