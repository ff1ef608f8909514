"""Plain tensors as bytes."""

import pytest
import torch

from t2n_hf.errors import FormatError
from t2n_hf.store import memory
from t2n_hf.store.memory import aligned_buffer, bytes_of, tensor_chunks


class Wrapped(torch.Tensor):
    pass


@pytest.mark.parametrize("nbytes", [0, 1, 63, 1000, 1 << 20])
def test_buffers_start_at_a_multiple_of_64(nbytes: int):
    buffer = aligned_buffer(nbytes)
    assert buffer.nbytes == nbytes
    assert buffer.data_ptr() % 64 == 0


def test_buffers_are_aligned_even_when_the_allocator_is_not(monkeypatch: pytest.MonkeyPatch):
    real = torch.empty
    monkeypatch.setattr(memory.torch, "empty", lambda nbytes, dtype: real(nbytes + 8, dtype=dtype)[8:])
    assert aligned_buffer(100).data_ptr() % 64 == 0
    assert aligned_buffer(100).nbytes == 100


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.int64, torch.float8_e4m3fn], ids=str)
def test_bytes_of_a_tensor_are_its_memory(dtype: torch.dtype):
    tensor = torch.ones(2, 3).to(dtype)
    view = bytes_of(tensor)
    assert len(view) == tensor.nbytes
    view[:] = bytes(len(view))
    assert not tensor.view(torch.uint8).any()


def test_chunks_are_the_values_in_row_major_order(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "_CHUNK_NBYTES", 16)
    tensor = torch.arange(12, dtype=torch.float32).view(3, 4).T
    chunks = [bytes(chunk) for chunk in tensor_chunks(tensor, "w")]
    assert [len(chunk) for chunk in chunks] == [16, 16, 16]
    assert b"".join(chunks) == tensor.contiguous().numpy().tobytes()


def test_a_contiguous_tensor_is_not_copied():
    tensor = torch.zeros(4, dtype=torch.uint8)
    (chunk,) = tensor_chunks(torch.nn.Parameter(tensor, requires_grad=False), "w")
    chunk[0] = 7
    assert tensor[0] == 7


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2).as_subclass(Wrapped), torch.ones(2, device="meta"), torch.eye(2).to_sparse()],
    ids=["subclass", "meta", "sparse"],
)
def test_tensors_whose_bytes_are_not_their_values_are_refused_by_name(tensor: torch.Tensor):
    with pytest.raises(FormatError, match=r"'w' is a .* expected a plain, dense tensor"):
        list(tensor_chunks(tensor, "w"))
