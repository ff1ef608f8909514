"""Telling the system which bytes are read soon: the right ones of the right file, nothing where it cannot be told."""

import os

import pytest
import torch
from offload_cases import checkpoint

from t2n_hf.tensor.offload import OffloadedTensor

needs_fadvise = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system takes no such advice")


@pytest.fixture
def advice(monkeypatch):
    """(offset, nbytes) of each range that the system is told of."""
    told = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, offset, nbytes, how: told.append((offset, nbytes, how)))
    return told


@needs_fadvise
def test_advice_names_the_bytes_of_the_checkpoint_range(tmp_path, advice):
    ranges = checkpoint(tmp_path)[2]
    OffloadedTensor.from_byte_range(ranges["linear"], "linear").source.advise()
    assert advice == [(ranges["linear"].offset, 24 * 64 * 4, os.POSIX_FADV_WILLNEED)]


@needs_fadvise
def test_advice_for_fused_weights_names_each_range(tmp_path, advice):
    ranges = checkpoint(tmp_path)[2]
    parts = [ranges["expert.0"], ranges["expert.1"]]
    OffloadedTensor.from_byte_range(parts, "experts", shape=(2, 8, 32)).source.advise()
    assert [(offset, nbytes) for offset, nbytes, _ in advice] == [(part.offset, part.nbytes) for part in parts]


@needs_fadvise
def test_advice_names_the_bytes_of_a_spill_and_none_of_an_empty_tensor(tmp_path, advice):
    first = OffloadedTensor.from_original_tensor(torch.randn(16, 32), "first", tmp_path)
    second = OffloadedTensor.from_original_tensor(torch.randn(8, 32), "second", tmp_path)
    OffloadedTensor.from_original_tensor(torch.empty(0, 32), "empty", tmp_path).source.advise()
    second.source.advise()
    assert advice == [(16 * 32 * 4, 8 * 32 * 4, os.POSIX_FADV_WILLNEED)]
    assert first.shape == (16, 32)


def test_advice_is_left_out_where_the_system_has_none(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    ranges = checkpoint(tmp_path)[2]
    for weight in (
        OffloadedTensor.from_byte_range(ranges["linear"], "linear"),
        OffloadedTensor.from_original_tensor(torch.ones(3), "spilled", tmp_path),
        OffloadedTensor.over(torch.ones(3), torch.float16, "in memory"),
    ):
        weight.source.advise()


def test_advice_is_refused_in_silence(tmp_path):
    ranges = checkpoint(tmp_path)[2]
    weight = OffloadedTensor.from_byte_range(ranges["linear"], "linear")
    ranges["linear"].file.close()
    weight.source.advise()
