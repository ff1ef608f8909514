"""A call whose results are known, and tensors like these, without a way through the dispatcher.

A tracer runs each operator under several modes, makes a fake of every result, records where in the code it was called,
and notes a proxy for each of its lengths: milliseconds for a call of a layer, of which a model has many that are alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_impls import fast_detach, no_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.fx.experimental.proxy_tensor import get_proxy_mode

__all__ = ["SeenCall", "fake_like", "seen_call", "traced_by"]


@dataclass(frozen=True)
class SeenCall:
    """A call that went through the dispatcher: its tracer, which knows the lengths of its results, and these."""

    tracer: Any
    results: tuple[torch.Tensor, ...]
    _plain: tuple[torch.Tensor, ...]  # the same on the meta device, where they are fake

    @property
    def is_fake(self) -> bool:
        """Whether all results are fake tensors."""
        return len(self._plain) == len(self.results)

    def repeated(self, count: int) -> "SeenCall":
        """A call with `count` times the results."""
        return SeenCall(self.tracer, self.results * count, self._plain * count)

    def fresh(self) -> list[torch.Tensor]:
        """Fake tensors like the results, each of its own, which no tracer knows."""
        return [fake_like(result, plain) for result, plain in zip(self.results, self._plain, strict=True)]


def seen_call(results: Sequence[torch.Tensor]) -> SeenCall:
    """Remember a call by its results, as they are now; what a model does with those that it has is not seen."""
    kept = [fast_detach(result.fake_mode, result) if isinstance(result, FakeTensor) else result for result in results]
    plain = [_on_meta(result) for result in kept if isinstance(result, FakeTensor)]
    return SeenCall(traced_by(), tuple(kept), tuple(plain))


def _on_meta(fake: FakeTensor) -> torch.Tensor:
    with no_python_dispatcher(), in_kernel_invocation_manager(fake.fake_mode):
        plain: torch.Tensor = torch.ops.aten.detach.default(fake)
    return plain


def fake_like(like: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    """A fake tensor of the mode and device of `like` and the shape and dtype of `plain`, a tensor on the meta device.

    In a tenth of the time of the constructor, which works out what `like` has already.
    """
    fresh: torch.Tensor = torch.Tensor._make_subclass(
        FakeTensor, plain, False, dispatch_device=True, device_for_backend_keys=like.device
    )
    torch._C._set_throw_on_mutable_data_ptr(fresh)
    vars(fresh).update(vars(like))
    return fresh


def traced_by() -> Any:  # noqa: ANN401 - torch's tracers have no public type
    """The tracer of the trace that is going on; None when there is none."""
    mode = get_proxy_mode()
    return None if mode is None else mode.tracer
