"""What an archive cannot have is refused with the operator, the module and the reason."""

import pytest
import torch
from op_harness import Case, floats, interface_for

from t2n_hf.errors import MissingEmittersError
from t2n_hf.export.lower import lower
from t2n_hf.trace.capture import capture

SQUARE = floats(3, 3)
BY_VALUES = {
    "nonzero": lambda x: x.nonzero(),
    "nonzero_as_tuple": lambda x: x.nonzero(as_tuple=True)[0],
    "argwhere": lambda x: torch.argwhere(x > 0),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "unique_along": lambda x: x.unique(dim=0),
    "unique_consecutive": lambda x: x.unique_consecutive(),
    "bincount": lambda x: torch.bincount(x.flatten().abs().long()),
}
FACTORS = {
    "inverse": torch.inverse,
    "inv": torch.linalg.inv,
    "pinv": torch.linalg.pinv,
    "det": torch.det,
    "slogdet": lambda x: torch.linalg.slogdet(x)[1],
    "solve": lambda x: torch.linalg.solve(x, x[:, :1]),
    "cholesky": lambda x: torch.linalg.cholesky(x @ x.T + 9 * torch.eye(3)),
    "qr": lambda x: torch.linalg.qr(x)[0],
    "svd": lambda x: torch.linalg.svd(x)[1],
    "eigh": lambda x: torch.linalg.eigh(x)[0],
    "lu": lambda x: torch.linalg.lu(x)[0],
    "matrix_exp": torch.linalg.matrix_exp,
}


def refused(function):
    with pytest.raises(MissingEmittersError) as error:
        lower(capture(interface_for(Case("refused", function, (SQUARE,))), torch.float32), {}, dtype="f32")
    return str(error.value)


@pytest.mark.parametrize("name", BY_VALUES)
def test_results_whose_number_depends_on_values_are_refused(name):
    text = refused(BY_VALUES[name])
    assert "op_harness.py" in text  # the line that calls it
    assert "how many results it has depends on values; keep all elements, and choose by a mask" in text


@pytest.mark.parametrize("name", FACTORS)
def test_factors_of_matrices_are_refused(name):
    text = refused(FACTORS[name])
    assert "op_harness.py" in text  # the line that calls it
    assert "tract has no operator that factors matrices; compute it outside" in text


def test_a_power_of_a_matrix_needs_no_factors():
    function = Case("power", lambda x: torch.linalg.matrix_power(x, 3), (SQUARE,))
    assert lower(capture(interface_for(function), torch.float32), {}, dtype="f32").document
