"""Each case runs with the least tract that its graph is said to need, and every later one (slow, from wheels)."""

from pathlib import Path

import pytest
from case_matrix import built_cases, outcomes

from t2n_hf.nnef.versions import LEAST_TARGET, version_key

# torch's own, on slow forms of its operators.
pytestmark = pytest.mark.filterwarnings("ignore")
WHEELS = Path(__file__).resolve().parents[2] / ".cache/tract-wheels"
VERSIONS = sorted((path.parent.name for path in WHEELS.glob("*/tract")), key=version_key)
# The package takes inputs without axes since 0.23.8; that is no matter of the archive.
INPUTS_WITHOUT_AXES = frozenset({"elementwise/mul_of_rank_zero"})


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return built_cases(tmp_path_factory.mktemp("cases"))


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
        if results[name] != "right"
        and version_key(mine.least) <= version_key(version)
        and name not in INPUTS_WITHOUT_AXES
    }
    assert not wrong
