"""Casts of weights: numpy's numbers, and refusals of what the archive cannot hold."""

import numpy as np
import pytest
import torch

from t2n_hf.errors import QuantizationError
from t2n_hf.export.casts import Cast

TYPES = [(torch.bfloat16, torch.float16), (torch.float32, torch.float16), (torch.bfloat16, torch.float32)]
NUMPY = {torch.float16: np.float16, torch.float32: np.float32}


def every_value(dtype):
    """Each bf16; of f32 those, and what lies close to numbers of f16 and between two of them."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    if dtype is torch.bfloat16:
        return values
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    between = halves * (1 + 2**-12)
    near = [torch.nextafter(base, torch.tensor(float(to))) for base in (halves, between) for to in ("inf", "-inf")]
    return torch.cat([values.float(), halves, between, *near])


@pytest.mark.parametrize(("held", "wanted"), TYPES, ids=str)
def test_each_value_is_rounded_to_the_nearest(held, wanted):
    values = every_value(held)
    limit = 65520.0 if wanted is torch.float16 else float("inf")
    values = values[values.float().abs() < limit]
    found = bytes(Cast(held, wanted, "a.weight")(values))
    assert found == values.float().numpy().astype(NUMPY[wanted]).tobytes()


@pytest.mark.parametrize("place", [0, 500, 1000])
@pytest.mark.parametrize(("held", "wanted"), TYPES, ids=str)
def test_what_the_archive_cannot_hold_is_refused_by_name(held, wanted, place):
    values = torch.zeros(1001, dtype=held)
    cast = Cast(held, wanted, "a.weight")
    for bad in (float("nan"), -float("nan")):
        values[place] = bad
        with pytest.raises(QuantizationError, match=r"weight 'a\.weight' holds NaN"):
            cast(values)
    for large in (65536.0, -1e30, float("inf"), -float("inf")):
        values[place] = large
        if wanted is torch.float32:  # which holds all of them
            assert bytes(cast(values)) == values.float().numpy().tobytes()
            continue
        with pytest.raises(QuantizationError, match=r"weight 'a\.weight' holds a value beyond 65504"):
            cast(values)


def test_constants_are_cast_as_they_are():
    values = torch.tensor([1.0, float("inf"), -float("inf"), float("nan"), 1e6], dtype=torch.bfloat16)
    found = torch.frombuffer(bytearray(Cast(torch.bfloat16, torch.float16, None)(values)), dtype=torch.float16)
    assert torch.equal(found.view(torch.int16), values.to(torch.float16).view(torch.int16))


def test_values_that_come_one_group_after_another_use_the_same_memory():
    cast = Cast(torch.bfloat16, torch.float16, "a.weight")
    values = torch.randn(3 * cast.count + 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = b"".join(bytes(cast(part)) for part in values.split(cast.count))
    assert found == values.float().numpy().astype(np.float16).tobytes()


def test_a_view_that_negates_is_cast_to_its_values():
    values = torch.view_as_complex(torch.randn(8, 2, generator=torch.Generator().manual_seed(0))).conj().imag
    assert values.is_neg()
    assert (
        bytes(Cast(torch.float32, torch.float16, "a.weight")(values))
        == values.numpy(force=True).astype(np.float16).tobytes()
    )
