"""Sums of squares of what goes into the weights of a model, by input channel, while it runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, final

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from t2n_hf.errors import ConfigError
from t2n_hf.hf.config import T2NConfig
from t2n_hf.hf.plan import make_plan
from t2n_hf.hf.weights import tied_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["InputStatistics"]

# So many tokens like those of all experts together are added to those of each: few tokens say little.
_SHARED_TOKENS: Final = 16
_PRODUCTS: Final = frozenset({F.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm})
_STACKED_PRODUCTS: Final = frozenset({torch.bmm, torch.Tensor.bmm, torch.matmul, torch.Tensor.__matmul__})


class InputStatistics:
    """What the weights of `model` were multiplied by: matrices of linear layers and Conv1D, and fused experts.

    Weights that are read without calling their module are not seen, and have no statistics.
    """

    def __init__(self, model: "PreTrainedModel") -> None:
        self._model = model
        self._sums: dict[str, torch.Tensor] = {}
        self._counts: dict[str, torch.Tensor] = {}
        self._names: dict[str, list[str]] = {}
        for name, kept in tied_names(model).items():
            self._names.setdefault(kept, []).append(name)
        self._canonical = {name: kept for kept, names in self._names.items() for name in names}

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Watch the model while the context is open; nothing of it is left behind."""
        head = self._model.get_output_embeddings() if hasattr(self._model, "get_output_embeddings") else None
        handles = []
        try:
            for path, module in self._model.named_modules():
                if isinstance(module, (nn.Linear, Conv1D)):
                    name = f"{path}.weight" if path else "weight"
                    hook = self._hook(self._canonical.get(name, name), only_sees=module is head)
                    handles.append(module.register_forward_pre_hook(hook))
            with _ExpertProducts(self._experts(), self._add_expert):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str, *, only_sees: bool) -> Any:  # noqa: ANN401 - a hook
        def see(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            x = args[0]
            rows = x.detach().reshape(-1, x.shape[-1])
            self._add(name, 0, 1, rows)
            # No one reads the logits of a head, and they are the largest tensor of all: one of each row is enough.
            return (x[:, :1], *args[1:]) if only_sees and x.dim() == 3 else None

        return see

    def _add_expert(self, name: str, expert: int, experts: int, rows: torch.Tensor) -> None:
        self._add(name, expert, experts, rows.detach().reshape(-1, rows.shape[-1]))

    def _add(self, name: str, item: int, items: int, rows: torch.Tensor) -> None:
        if name not in self._sums:
            self._sums[name] = torch.zeros(items, rows.shape[-1])
            self._counts[name] = torch.zeros(items, 1)
        self._sums[name][item] += rows.float().square().sum(dim=0).cpu()
        self._counts[name][item] += len(rows)

    def _experts(self) -> dict[int, tuple[str, int]]:
        """Find fused experts: the id of each parameter, to its name and how many they are."""
        plan = make_plan(self._model, T2NConfig("q4_0", modules_to_not_convert=[]))
        stacked = {name: p for name, p in self._model.named_parameters() if p.dim() == 3}
        found = {name: p for name, p in stacked.items() if name in plan and plan[name].format is not None}
        return {
            id(parameter): (self._canonical.get(name, name), parameter.shape[0]) for name, parameter in found.items()
        }

    def mean_squares(self) -> dict[str, torch.Tensor]:
        """Give f32 (K,), or (E, K) for experts, by every name of every weight that was seen.

        Raises ConfigError, naming the weight, for inputs that were not finite.
        """
        result = {}
        for kept, sums in self._sums.items():  # in the order that they ran: the first to overflow is named
            counts = self._counts[kept]
            if not bool(torch.isfinite(sums).all()):
                found = self._model.dtype
                raise ConfigError(f"what goes into {kept} is not finite in {found}; load the model in torch.float32")
            shared = sums.sum(dim=0) / counts.sum()
            stack = len(sums) > 1
            mean = (sums + _SHARED_TOKENS * shared) / (counts + _SHARED_TOKENS) if stack else shared
            result.update(dict.fromkeys(self._names.get(kept, [kept]), mean))
        return result


@final
class _ExpertProducts(TorchFunctionMode):
    """Sees what experts that are items of one stacked parameter are multiplied by: a module hook would not."""

    def __init__(self, experts: dict[int, tuple[str, int]], add: Any) -> None:  # noqa: ANN401
        super().__init__()
        self._experts = experts
        self._add = add
        # Kept as long as nothing else was picked of its parameter, so that no other tensor has its id.
        self._picked: dict[str, tuple[torch.Tensor, int]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        result = func(*args, **(kwargs or {}))
        if len(args) < 2 or not self._experts:
            return result
        if func is torch.Tensor.__getitem__:
            self._pick(args[0], args[1], result)
        elif func in _PRODUCTS or func in _STACKED_PRODUCTS:
            self._product(args[0], args[1])
        return result

    def _pick(self, weight: Any, index: Any, item: Any) -> None:  # noqa: ANN401
        found = self._experts.get(id(weight))
        is_number = isinstance(index, int) or (isinstance(index, torch.Tensor) and index.dim() == 0)
        if found is not None and is_number:
            self._picked[found[0]] = (item, int(index))

    def _product(self, x: Any, weight: Any) -> None:  # noqa: ANN401
        stacked = self._experts.get(id(weight))
        if stacked is not None:
            name, count = stacked
            if x.dim() == 3 and len(x) == count:
                for expert in range(count):
                    self._add(name, expert, count, x[expert])
            return
        for name, (item, expert) in self._picked.items():
            if item is weight:
                count = next(count for other, count in self._experts.values() if other == name)
                self._add(name, expert, count, x)
