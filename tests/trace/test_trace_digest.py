"""What tensors are known by."""

import hashlib

import numpy as np
import pytest
import torch

from t2n_hf.trace.digest import digest_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool, torch.complex64], ids=str)
def test_a_digest_is_that_of_the_bytes_row_by_row(dtype):
    values = (torch.arange(6) % 2).reshape(2, 3).to(dtype)
    wanted = hashlib.sha256(np.ascontiguousarray(values.T.numpy()).tobytes()).hexdigest()
    assert digest_of(values.T) == wanted
    assert digest_of(values) != wanted


def test_what_has_no_elements_or_no_axes_has_a_digest():
    assert digest_of(torch.zeros(0, 3)) == hashlib.sha256().hexdigest()
    assert digest_of(torch.tensor(1.5)) == hashlib.sha256(np.float32(1.5).tobytes()).hexdigest()
