"""Each case runs with the least tract that its graph is said to need, and every later one (slow, from wheels)."""

from pathlib import Path

import pytest
from case_matrix import built_cases, outcomes

from t2n_hf.nnef.versions import LEAST_TARGET, version_key

# torch's own, on slow forms of its operators.
pytestmark = pytest.mark.filterwarnings("ignore")
WHEELS = Path(__file__).resolve().parents[2] / ".cache/tract-wheels"
VERSIONS = sorted((path.parent.name for path in WHEELS.glob("*/tract")), key=version_key)
# The package takes inputs without axes since this version; that is no matter of the archive.
INPUTS_WITHOUT_AXES = "0.23.8"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return built_cases(tmp_path_factory.mktemp("cases"))


def least_for(mine):
    without_axes = any(tensor.dim() == 0 for inputs in (mine.case.inputs, *mine.case.others) for tensor in inputs)
    return max(mine.least, INPUTS_WITHOUT_AXES, key=version_key) if without_axes else mine.least


@pytest.mark.slow
@pytest.mark.tract
@pytest.mark.skipif(not VERSIONS, reason="scripts/tract_matrix.py fetches the wheels")
@pytest.mark.parametrize(
    "version", [version for version in VERSIONS if version_key(version) >= version_key(LEAST_TARGET)]
)
def test_a_case_is_right_with_every_version_from_the_least_that_is_said(built, version):
    results = outcomes(built, WHEELS / version)
    wrong = {
        name: results[name]
        for name, mine in built.items()
        if results[name] != "right" and version_key(least_for(mine)) <= version_key(version)
    }
    assert not wrong
