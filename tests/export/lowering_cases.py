"""Captured and lowered models written as open archives, with weights dense or in Q4_0."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from t2n_hf.contract import InferenceTarget, dense_chunks
from t2n_hf.dtypes import dtype_of
from t2n_hf.export.lower import Lowered, WeightBinding, WeightFormatInfo, lower
from t2n_hf.nnef.dat import Payload, dense_payload, write_dat
from t2n_hf.nnef.text import to_text
from t2n_hf.tensor import QTensorTractScaleOnly
from t2n_hf.trace.capture import capture
from t2n_hf.trace.interface import Interface
from t2n_hf.tract.runner import TractRunner


def values_of(model: Any) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def _payload(binding: WeightBinding, values: Mapping[str, torch.Tensor]) -> Payload:
    value = binding.value if binding.value is not None else values[binding.fqn].detach()
    if binding.format == "dense":
        name = dtype_of(value.dtype).name
        return dense_payload(tuple(value.shape), name, dense_chunks(value, name))
    stored = value.mT.contiguous() if binding.transposed else value
    state = QTensorTractScaleOnly.quantize(stored).to_offload_state()
    return QTensorTractScaleOnly.dat_payload(state, InferenceTarget())


def write(lowered: Lowered, model: Any, folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "graph.nnef").write_text(to_text(lowered.document))
    for binding in lowered.bindings:
        write_dat(folder / f"{binding.label}.dat", _payload(binding, values_of(model)))
    return folder


def archive(interface: Interface, folder: Path, formats: Mapping[str, WeightFormatInfo] | None = None, **options: Any):
    mode = options.pop("mode", "auto")
    captured = capture(interface, torch.float32, mode)
    lowered = lower(captured, formats or {}, dtype="f32", **options)
    return write(lowered, interface.weight_owner, folder), lowered


def dequantize(model: Any, formats: Mapping[str, WeightFormatInfo]) -> None:
    """Round the weights of a model to what their blocks hold."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            info = formats.get(name)
            if info is not None and info.format == "q4_0":
                stored = parameter.mT.contiguous() if info.transposed else parameter
                dense = QTensorTractScaleOnly.quantize(stored).to_base_tensor()
                parameter.copy_(dense.mT if info.transposed else dense)


def run_steps(folder: Path, interface: Interface, lengths: tuple[int, ...] = (5, 1, 7)) -> list[np.ndarray]:
    """Results of a causal model in tract, step after step, each with the caches of the one before."""
    results = []
    with TractRunner(folder) as runner:
        past = {
            name: np.zeros([int(d) if str(d).isdigit() else 0 for d in spec.shape], np.float32)
            for name, spec in runner.inputs.items()
            if name != "input_ids"
        }
        for step, length in enumerate(lengths):
            outputs = runner.run({"input_ids": ids(step, length).numpy(), **past})
            past = {name: outputs[f"out{name[2:]}"] for name in past}
            results += [outputs[name] for name in interface.output_names]
    return results


def torch_steps(interface: Interface, lengths: tuple[int, ...] = (5, 1, 7)) -> list[np.ndarray]:
    """The same in PyTorch."""
    results = []
    with torch.no_grad(), interface.context():
        past = [torch.zeros(*x.shape[:2], 0, x.shape[3]) for x in interface.args[1]]
        for step, length in enumerate(lengths):
            logits, *past = interface.module(ids(step, length), past)
            results += [logits.numpy(), *(x.numpy() for x in past)]
    return results


def ids(step: int, length: int) -> torch.Tensor:
    return torch.randint(3, 250, (1, length), generator=torch.Generator().manual_seed(step))


def largest_difference(got: list[np.ndarray], want: list[np.ndarray]) -> float:
    assert [x.shape for x in got] == [x.shape for x in want]
    return max(float(np.abs(a - b).max() / max(1.0, np.abs(b).max())) for a, b in zip(got, want, strict=True))
