"""Leases around forward: while a module runs, its weights that live on disk are in memory, and no longer."""

import copy
import threading
from collections.abc import Iterator
from typing import Any, Final, NoReturn, TypeAlias, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from t2n_hf.errors import BudgetError, UnsupportedOpError
from t2n_hf.residency import ResidencyStrategy, TensorResidencyLease, TensorResidencyPool
from t2n_hf.tensor.offload import OffloadedTensor

__all__ = ["ModuleLeases", "attach_pool", "leases_of", "offloaded_parameters", "resident_nbytes"]

_ATTRIBUTE: Final = "_t2n_leases"
_Stack: TypeAlias = list[tuple[nn.Module, list[TensorResidencyLease]]]


def offloaded_parameters(model: nn.Module) -> dict[str, OffloadedTensor]:
    """Find the parameters of `model` that live on disk, each tensor once."""
    parameters: Iterator[tuple[str, torch.Tensor]] = model.named_parameters()
    return {name: tensor for name, tensor in parameters if isinstance(tensor, OffloadedTensor)}


def leases_of(model: nn.Module) -> "ModuleLeases | None":
    """Give the leases (and so the pool) of a model with weights on disk, None for any other."""
    found: ModuleLeases | None = getattr(model, _ATTRIBUTE, None)
    return found


@final
class ModuleLeases:
    """Opens leases when a module begins its forward, and releases them when that ends, also by an exception.

    Each thread has its own leases. Embeddings are not leased whole: their rows are read one by one; neither are fused
    experts, of which only those that tokens are routed to are read. A weight that is read without calling its module
    is served by the pool that it is bound to.
    """

    def __init__(self, pool: TensorResidencyPool) -> None:
        self.pool = pool
        self._stacks: dict[threading.Thread, _Stack] = {}
        self._handles: list[RemovableHandle] = []

    def attach(self, model: nn.Module) -> None:
        """Hook every module of `model` that has weights to lease, and the model itself."""
        self._handles.append(model.register_forward_pre_hook(self._drop_stale))
        for module in model.modules():
            if any(True for _ in _leased(module)):
                self._handles.append(module.register_forward_pre_hook(self._open))
                self._handles.append(module.register_forward_hook(self._release, always_call=True))
        object.__setattr__(model, _ATTRIBUTE, self)

    def detach(self, model: nn.Module) -> None:
        """Remove every hook, close the pool."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._release_stale()
        self.pool.close()
        if getattr(model, _ATTRIBUTE, None) is self:
            object.__delattr__(model, _ATTRIBUTE)

    @property
    def _stack(self) -> "_Stack":
        return self._stacks.setdefault(threading.current_thread(), [])

    def _open(self, module: nn.Module, args: Any) -> None:  # noqa: ANN401 - torch's hook signature
        leases: list[TensorResidencyLease] = []
        self._stack.append((module, leases))
        for tensor in _leased(module):
            lease = self.pool.acquire(tensor)
            lease.open()
            leases.append(lease)

    def _release(self, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ANN401
        stack = self._stack
        # Another hook may have raised before this module's leases were opened: then they are not on top.
        if stack and stack[-1][0] is module:
            for lease in stack.pop()[1]:
                lease.release()

    def _drop_stale(self, model: nn.Module, args: Any) -> None:  # noqa: ANN401
        self._release_stale()

    def _release_stale(self) -> None:
        """Release what interrupted forwards left, in this thread and in those that have ended.

        torch calls no hook when an interrupt (not an Exception) ends a forward.
        """
        this = threading.current_thread()
        for thread in list(self._stacks):
            if thread is this or not thread.is_alive():
                for _, leases in reversed(self._stacks.pop(thread, [])):
                    for lease in leases:
                        lease.release()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:  # noqa: ANN401
        """Refuse: a model with weights on disk is not pickled."""
        raise UnsupportedOpError("a model with weights on disk is not pickled; save it with save_pretrained()")

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModuleLeases":
        """Make the leases of a copied model, over a pool of its own. The hooks are copied with the model."""
        copied = ModuleLeases(copy.deepcopy(self.pool, memo))
        memo[id(self)] = copied
        copied._handles = copy.deepcopy(self._handles, memo)
        return copied


def _leased(module: nn.Module) -> Iterator[OffloadedTensor]:
    if isinstance(module, nn.Embedding):
        return
    for parameter in module._parameters.values():
        if isinstance(parameter, OffloadedTensor) and parameter.dim() < 3:
            yield parameter


def attach_pool(model: nn.Module, max_cached_bytes: int) -> ModuleLeases:
    """Make a pool for the weights of `model` that live on disk, bind them to it and hook their modules.

    `max_cached_bytes` may be 0: then nothing is kept beyond the module that runs. Raises BudgetError when it is not 0
    and a module needs more than that at once.
    """
    needs = {
        name: sum(tensor.nbytes_loaded for tensor in _leased(module))
        for name, module in model.named_modules()
        if any(True for _ in _leased(module))
    }
    largest = max(needs, key=lambda name: needs[name], default="")
    if needs and 0 < max_cached_bytes < needs[largest]:
        raise BudgetError(
            f"{max_cached_bytes} bytes for weights on disk are fewer than {largest} needs at once ({needs[largest]}); "
            "raise max_resident_bytes or max_memory, or quantize that module"
        )
    pool = TensorResidencyPool(max_cached_bytes, strategy=ResidencyStrategy.LEARNED)
    for tensor in offloaded_parameters(model).values():
        tensor.bind_pool(pool)
    leases = ModuleLeases(pool)
    leases.attach(model)
    return leases


def resident_nbytes(model: nn.Module) -> int:
    """Bytes of weights on disk that are in memory now."""
    leases = leases_of(model)
    return 0 if leases is None else leases.pool.resident_bytes
