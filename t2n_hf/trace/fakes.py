"""Stand-ins for weights while a model is captured: the same shape, the dtype of the export, no values."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from t2n_hf.errors import CaptureError
from t2n_hf.trace.direct_call import fake_like
from t2n_hf.trace.swap import evaluating
from t2n_hf.trace.walk import named_tensors_of, names_of

__all__ = ["canonical_names", "fake_weights"]


def canonical_names(module: nn.Module) -> dict[str, str]:
    """Map each name of a parameter or buffer to the first name of the same object (itself when not tied)."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for name, tensor in named_tensors_of(module):
        names[name] = first.setdefault(id(tensor), name)
    return names


def _pattern() -> FakeTensor:
    meta = torch.empty(0, device="meta")
    return FakeTensor(FakeTensorMode(allow_non_fake_inputs=True), meta, torch.device("cpu"))


@dataclass
class _Swap:
    """One pass over a module's tensors: what was where, and the stand-in of each object. All are like `pattern`."""

    dtype: torch.dtype
    pattern: FakeTensor = field(default_factory=_pattern)
    undo: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    stand_ins: dict[int, torch.Tensor] = field(default_factory=dict)

    def swap(self, module: nn.Module, where: str) -> None:
        """Put stand-ins into one module (not its children)."""
        for tensors in (module._parameters, module._buffers):
            self.undo.append((tensors, dict(tensors) if tensors else {}))
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = self._stand_in(parameter, is_parameter=True)  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if name not in module._non_persistent_buffers_set and buffer.is_floating_point():
                module._buffers[name] = self._stand_in(buffer, is_parameter=False)
            else:
                module._buffers[name] = self._real(buffer, f"{where}.{name}" if where else name)
        if isinstance(module, nn.RNNBase):
            # Its forward reads a list of the same parameters, which torch keeps beside them.
            self.undo.append((vars(module), dict(vars(module))))
            module._flat_weights = [module._parameters.get(name) for name in module._flat_weights_names]

    def _stand_in(self, tensor: torch.Tensor, *, is_parameter: bool) -> torch.Tensor:
        if id(tensor) not in self.stand_ins:
            dtype = self.dtype if tensor.is_floating_point() else tensor.dtype
            # The same as torch.empty under the mode, without its ways through the dispatcher: models have many weights.
            meta = torch.empty(tuple(tensor.shape), dtype=dtype, device="meta")
            fake = fake_like(self.pattern, meta)
            if is_parameter:
                fake._is_param = True  # what nn.Parameter makes of it, without a copy
            self.stand_ins[id(tensor)] = fake
        return self.stand_ins[id(tensor)]

    def _real(self, buffer: torch.Tensor, where: str) -> torch.Tensor:
        """A buffer whose values the graph will hold: on the CPU, and of a type that tract knows."""
        if buffer.is_meta or isinstance(buffer, FakeTensor):
            raise CaptureError(
                f"buffer {where!r} has no values (it is on the {buffer.device} device) and no checkpoint stores it; "
                "compute it before the export, e.g. by loading the model instead of building it from its config"
            )
        if id(buffer) not in self.stand_ins:
            real = buffer.detach().cpu()
            self.stand_ins[id(buffer)] = real.to(self.dtype) if real.dtype is torch.bfloat16 else real
        return self.stand_ins[id(buffer)]

    def restore(self) -> None:
        """Put everything back, whatever the capture did to the dictionaries meanwhile."""
        for tensors, before in reversed(self.undo):
            if tensors or before:
                tensors.clear()
                tensors.update(before)


@contextmanager
def fake_weights(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Replace weights by stand-ins of `dtype` on the CPU, and switch to inference, until the block is left in any way.

    Weights are all parameters, whatever their class, and the persistent floating buffers; one object gets one stand-in,
    so ties stay. Other buffers keep their values; the originals are untouched by whatever the capture does to them.

    Raises:
        CaptureError: a buffer that no checkpoint stores has no values.
    """
    swap = _Swap(dtype)
    try:
        for child, name in names_of(module).items():
            swap.swap(child, name)
        with evaluating(module):
            yield
    finally:
        swap.restore()
