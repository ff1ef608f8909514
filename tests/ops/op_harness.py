"""Small functions captured, lowered, run in tract (many in one process) and compared with PyTorch."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from t2n_hf.contract import dense_chunks
from t2n_hf.dtypes import dtype_of
from t2n_hf.export.lower import Lowered, lower
from t2n_hf.nnef.dat import dense_payload, write_dat
from t2n_hf.nnef.text import to_text
from t2n_hf.trace.capture import capture
from t2n_hf.trace.interface import Interface

WORKER = Path(__file__).with_name("tract_batch_worker.py")


@dataclass
class Case:
    """A function of tensors. `lengths` gives (input, axis) -> symbol; `others` are inputs of other lengths.

    `least` is the least value of all symbols but B, the batch, which may be 1.
    """

    name: str
    function: Any
    inputs: Sequence[torch.Tensor]
    lengths: dict[tuple[int, int], str] = field(default_factory=dict)
    others: Sequence[Sequence[torch.Tensor]] = ()
    tolerance: float = 2e-6
    dtype: torch.dtype = torch.float32
    least: int = 1


def floats(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers, the same ones for a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def seeded(module: nn.Module) -> nn.Module:
    """The module with weights of normal numbers, and running statistics that are neither 0 nor 1."""
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point():
            buffer.copy_(floats(*buffer.shape).abs() + 0.5) if "var" in name else buffer.copy_(floats(*buffer.shape))
    return module.eval()


class FunctionModule(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)


def interface_for(case: Case) -> Interface:
    module = case.function if isinstance(case.function, nn.Module) else FunctionModule(case.function)
    module.eval()
    with torch.no_grad():
        count = len(pytree.tree_leaves(module(*case.inputs)))
    least = {name: 1 if name == "B" else case.least for name in sorted(set(case.lengths.values()))}
    symbols = {name: Dim(name, min=count, max=1 << 20) for name, count in least.items()}
    dims = tuple(
        {axis: symbols[name] for (place, axis), name in case.lengths.items() if place == number} or None
        for number in range(len(case.inputs))
    )
    return Interface(
        module=module,
        args=tuple(case.inputs),
        dynamic_shapes=dims,
        input_names=tuple(f"x{i}" for i in range(len(case.inputs))),
        output_names=tuple(f"y{i}" for i in range(count)),
        asserts=tuple(f"{name} >= {count}" for name, count in least.items()),
        weight_owner=module,
    )


def write_archive(lowered: Lowered, weights: dict[str, torch.Tensor], folder: Path, dtype: torch.dtype) -> None:
    folder.mkdir(parents=True)
    (folder / "graph.nnef").write_text(to_text(lowered.document))
    for binding in lowered.bindings:
        value = binding.value if binding.value is not None else weights[binding.fqn].detach().to(dtype)
        name = dtype_of(value.dtype).name
        write_dat(folder / f"{binding.label}.dat", dense_payload(tuple(value.shape), name, dense_chunks(value, name)))


def build(case: Case, folder: Path) -> None:
    interface = interface_for(case)
    captured = capture(interface, case.dtype, "whole")
    lowered = lower(captured, {}, dtype="f16" if case.dtype is torch.float16 else "f32")
    weights = dict(interface.module.state_dict(keep_vars=True))
    write_archive(lowered, weights, folder / "model", case.dtype)
    for number, inputs in enumerate([case.inputs, *case.others]):
        np.savez(folder / f"in_{number}.npz", *[x.numpy() for x in inputs])


def run_batch(root: Path) -> None:
    """Run all archives below `root`; a case that aborts tract gets an error and the others go on."""
    while True:
        subprocess.run([sys.executable, str(WORKER), str(root)], capture_output=True, check=False, timeout=600)
        folders = list(root.iterdir())
        for folder in folders:
            if (folder / "started").exists() and not (folder / "done").exists():
                (folder / "error").write_text("tract aborted the process")
                (folder / "done").touch()
        if all((folder / "done").exists() for folder in folders):
            return


def expected(case: Case, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        return pytree.tree_leaves(case.function(*inputs))


def compare(case: Case, folder: Path) -> None:
    if (folder / "build_error").exists():
        pytest.fail((folder / "build_error").read_text())
    text = (folder / "model/graph.nnef").read_text()
    if (folder / "error").exists():
        pytest.fail(f"{(folder / 'error').read_text()}\n{text}")
    for number, inputs in enumerate([case.inputs, *case.others]):
        outputs = np.load(folder / f"out_{number}.npz")
        for place, want in enumerate(expected(case, inputs)):
            got = outputs[f"arr_{place}"]
            want = want.detach().numpy()
            assert got.dtype == want.dtype, f"{got.dtype} for {want.dtype}\n{text}"
            assert got.shape == want.shape, f"{got.shape} for {want.shape}\n{text}"
            scale = max(1.0, float(np.abs(want[np.isfinite(want)]).max(initial=0))) if want.dtype.kind == "f" else 1
            np.testing.assert_allclose(
                got, want, rtol=case.tolerance, atol=case.tolerance * scale, err_msg=f"inputs {number}\n{text}"
            )


def build_and_run(cases: Sequence[Case], root: Path) -> Path:
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        folder = root / case.name
        folder.mkdir()
        try:
            build(case, folder)
        except Exception as error:  # noqa: BLE001
            (folder / "build_error").write_text(f"{type(error).__name__}: {error}")
            (folder / "started").touch()
            (folder / "done").touch()
    run_batch(root)
    return root
