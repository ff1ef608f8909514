"""Values on their way to a device. The device here is the CPU under another transfer; a real one is tried by
scripts/device_check.sh."""

import threading
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from t2n_hf.errors import StorageError
from t2n_hf.store.checkpoint import CheckpointIndex
from t2n_hf.store.memory import buffers_from
from t2n_hf.tensor.contents import MemoryContent
from t2n_hf.tensor.device_copy import Staging, host_copy, transfer_to, use_transfer
from t2n_hf.tensor.offload import OffloadedTensor
from t2n_hf.tensor.quant.q4_0 import QTensorTractScaleOnly
from t2n_hf.tensor.stored import StoredSource
from t2n_hf.tensor.transposed import TransposedTensor

CPU = torch.device("cpu")


class Recording:
    """A transfer that stages as the one of CUDA does, and writes down what happens."""

    def __init__(self, device):
        self.device = device
        self.staging = Staging(lambda nbytes: torch.full((nbytes,), 77, dtype=torch.uint8))
        self.log = []

    @contextmanager
    def reading(self):
        self.log.append("begin")
        try:
            with buffers_from(self.staging.take):
                yield
        finally:
            for chunk in self.staging._chunks:  # what is not copied by now is lost
                chunk.fill_(99)
            self.staging.reset()
            self.log.append("end")

    def arrived(self, value):
        self.log.append(tuple(value.shape))


@pytest.fixture
def transfer():
    made = []
    with use_transfer("cpu", lambda device: made.append(Recording(device)) or made[-1]):
        yield made
    assert transfer_to(CPU) is None


def test_the_cpu_needs_no_transfer_and_cuda_has_one():
    assert transfer_to(CPU) is None
    assert transfer_to(torch.device("meta")) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plain_value_is_read_into_staging_and_copied_out_of_it(dtype, transfer, tmp_path):
    from safetensors.torch import save_file

    values = torch.randn(300, 400)
    save_file({"w": values}, str(tmp_path / "w.safetensors"))
    index = CheckpointIndex.open(tmp_path / "w.safetensors")
    tensor = OffloadedTensor.from_byte_range(index["w"], "w", dtype)
    first, second = tensor.reload(), tensor.reload()
    assert torch.equal(first, values.to(dtype))
    assert torch.equal(second, values.to(dtype))
    assert transfer[0].log == ["begin", "end", (300, 400)] * 2
    assert len(transfer[0].staging._chunks) == 1


@pytest.mark.parametrize("turned", [False, True], ids=["as it is", "transposed"])
def test_a_packed_value_arrives_packed(turned, transfer):
    packed = QTensorTractScaleOnly.quantize(torch.randn(64, 96))
    value = TransposedTensor.over(packed) if turned else packed
    tensor = OffloadedTensor.from_original_tensor(value, "w")
    loaded = tensor.reload()
    assert type(loaded) is type(value)
    assert torch.equal(loaded.to_base_tensor(), value.to_base_tensor())
    assert transfer[0].log[-1] == tuple(value.shape)


@pytest.mark.parametrize("kind", ["plain", "packed", "transposed"])
def test_a_value_that_waits_in_memory_is_copied_whole_and_stays_as_it_is(kind, transfer):
    plain = torch.randn(64, 96)
    value = plain if kind == "plain" else QTensorTractScaleOnly.quantize(plain)
    value = TransposedTensor.over(value) if kind == "transposed" else value
    pinned = []
    waiting = host_copy(value, lambda part: pinned.append(part) or part.clone())
    assert len(pinned) == 1
    assert type(waiting) is type(value)
    source = StoredSource(MemoryContent(waiting), value.shape, value.dtype, "w")
    tensor = OffloadedTensor.from_source(source)
    linear = nn.Linear(value.shape[1], value.shape[0], bias=False)
    linear.weight = nn.Parameter(tensor, requires_grad=False)
    x = torch.randn(3, value.shape[1])
    expected = value.to_base_tensor() if kind != "plain" else value
    torch.testing.assert_close(linear(x), x @ expected.T)
    loaded = tensor.reload()
    if kind == "plain":
        loaded.zero_()
        assert torch.equal(tensor.reload(), plain)


def test_each_thread_has_staging_of_its_own_that_grows_to_one_piece():
    sizes = []
    staging = Staging(lambda nbytes: sizes.append(nbytes) or torch.empty(nbytes, dtype=torch.uint8))
    for _ in range(3):
        parts = [staging.take(nbytes) for nbytes in (100, 1000, 10)]
        for i, part in enumerate(parts):
            part.fill_(i)
        assert [part.tolist() for part in parts] == [[0] * 100, [1] * 1000, [2] * 10]
        staging.reset()
    assert len(sizes) <= 5
    assert sizes[-1] >= 1110
    seen = []
    thread = threading.Thread(target=lambda: seen.append(staging.take(8)))
    thread.start()
    thread.join()
    ours = staging.take(8)
    ours.fill_(1)
    seen[0].fill_(2)
    assert ours.tolist() == [1] * 8


def test_a_read_that_fails_is_named_and_leaves_the_transfer_usable(transfer, tmp_path):
    from safetensors.torch import save_file

    save_file({"w": torch.ones(64, 64)}, str(tmp_path / "w.safetensors"))
    tensor = OffloadedTensor.from_byte_range(CheckpointIndex.open(tmp_path / "w.safetensors")["w"], "layer.w")
    (tmp_path / "w.safetensors").write_bytes(b"")
    with pytest.raises(StorageError, match=r"layer\.w"):
        tensor.reload()
    assert transfer[0].log == ["begin", "end"]
    assert torch.equal(OffloadedTensor.from_original_tensor(torch.ones(3), "v").reload(), torch.ones(3))
