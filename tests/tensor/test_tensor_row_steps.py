"""Rows of a matrix in a file, a slot at a time."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from t2n_hf.errors import StorageError
from t2n_hf.store.checkpoint import CheckpointIndex
from t2n_hf.tensor.product import RowwiseProduct
from t2n_hf.tensor.row_steps import row_steps


def stored(tmp_path, **tensors):
    save_file(tensors, tmp_path / "model.safetensors")
    return CheckpointIndex.open(tmp_path / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 128, 1000])
def test_all_rows_come_in_order(rows, dtype, tmp_path):
    weight = torch.randn(rows, 24).to(dtype)
    slot = torch.empty(64 * 24 * dtype.itemsize * 2 + 5, dtype=torch.uint8)
    steps = row_steps(stored(tmp_path, w=weight)["w"], weight.shape, len(slot))
    assert steps.rows == 128
    found = [steps.read(at, slot).clone() for at in range(steps.count)]
    assert torch.equal(torch.cat(found), weight)


@pytest.mark.parametrize("rows", [257, 321, 449, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products_by_steps_are_those_with_all_rows_bit_for_bit(rows, dtype, tmp_path):
    weight = torch.randn(rows, 256).to(dtype)
    stored_range = stored(tmp_path, w=weight)["w"]
    for most in (64, 192, 320, 512):
        slot = torch.empty(most * 256 * dtype.itemsize, dtype=torch.uint8)
        steps = row_steps(stored_range, weight.shape, len(slot))
        assert steps is not None or rows % 64 == 1
        for length in (1, 2, 7, 40) if steps is not None else ():
            x = torch.randn(length, 256).to(dtype)
            product = RowwiseProduct(x, rows, None)
            for at in range(steps.count):
                product.add(steps.read(at, slot))
            assert torch.equal(product.result, F.linear(x, weight))


def test_what_is_no_matrix_or_too_wide_has_no_steps(tmp_path):
    index = stored(tmp_path, cube=torch.zeros(4, 4, 4), vector=torch.zeros(4), wide=torch.zeros(2, 1000))
    assert row_steps(index["cube"], (4, 4, 4), 1 << 20) is None
    assert row_steps(index["vector"], (4,), 1 << 20) is None
    assert row_steps(index["wide"], (2, 1000), 64 * 4000 - 1) is None
    assert row_steps(index["wide"], (2, 1000), 64 * 4000) is not None
    assert row_steps(index["wide"], (1000, 2), 1 << 20) is None


def test_what_would_give_other_numbers_by_steps_has_none(tmp_path):
    index = stored(tmp_path, double=torch.zeros(128, 8, dtype=torch.float64), odd=torch.zeros(129, 8))
    assert row_steps(index["double"], (128, 8), 1 << 20) is None
    assert row_steps(index["odd"], (129, 8), 128 * 32) is None
    assert row_steps(index["odd"], (129, 8), 192 * 32).count == 1


def test_a_changed_file_is_refused(tmp_path):
    index = stored(tmp_path, w=torch.randn(128, 8))
    steps = row_steps(index["w"], (128, 8), 64 * 32)
    slot = torch.empty(64 * 32, dtype=torch.uint8)
    steps.read(0, slot)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(StorageError):
        steps.read(1, slot)
