"""One table of number types, held to torch and numpy."""

import numpy as np
import pytest
import torch

from t2n_hf.dtypes import DTYPES, dtype_named, dtype_of
from t2n_hf.errors import ConfigError


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda dtype: dtype.name)
def test_a_row_agrees_with_torch_and_numpy(dtype):
    as_torch = getattr(torch, dtype.torch)
    assert dtype_of(as_torch) is dtype
    assert dtype.nbytes == as_torch.itemsize
    assert dtype.is_float == as_torch.is_floating_point
    if dtype.numpy is not None:
        assert dtype_of(np.dtype(dtype.numpy)) is dtype
        assert np.dtype(dtype.numpy).itemsize == dtype.nbytes


@pytest.mark.parametrize("name", ["f16", "float16", "torch.float16"])
def test_every_name_of_a_type_finds_it(name):
    assert dtype_named(name) is DTYPES["f16"]


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"'f12'.*f16, bf16, f32"):
        dtype_named("f12")
