"""A model runs with the least tract that its manifest says, and every later one (from wheels)."""

from pathlib import Path

import pytest
from model_versions import MODELS, built_models, model_outcome

from t2n_hf.nnef.versions import LEAST_TARGET, version_key

# torch's and transformers' own, on slow forms of their functions.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.tract]
WHEELS = Path(__file__).resolve().parents[2] / ".cache/tract-wheels"
FETCHED = sorted((path.parent.name for path in WHEELS.glob("*/tract")), key=version_key)
VERSIONS = [version for version in FETCHED if version_key(version) >= version_key(LEAST_TARGET)]


@pytest.mark.skipif(LEAST_TARGET not in FETCHED, reason="scripts/test fetches the wheels")
@pytest.mark.parametrize("name", ["bert", "mamba", "resnet"])
def test_a_model_is_right_with_the_oldest_tract(name, tmp_path):
    built = built_models(tmp_path, [name])[name]
    assert (built.least, model_outcome(built, WHEELS / LEAST_TARGET)) == (LEAST_TARGET, "right")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return built_models(tmp_path_factory.mktemp("models"))


@pytest.mark.slow
@pytest.mark.skipif(not VERSIONS, reason="scripts/tract_matrix.py fetches the wheels")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_right_with_every_version_from_the_least_that_is_said(built, name):
    least = version_key(built[name].least)
    outcomes = {v: model_outcome(built[name], WHEELS / v) for v in VERSIONS if version_key(v) >= least}
    assert {version: outcome for version, outcome in outcomes.items() if outcome != "right"} == {}


@pytest.mark.slow
@pytest.mark.skipif(LEAST_TARGET not in FETCHED, reason="scripts/test fetches the wheels")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_is_exported_for_the_oldest_target_runs_there(name, tmp_path):
    built = built_models(tmp_path, [name], target=f"tract=={LEAST_TARGET}")[name]
    assert (built.least, model_outcome(built, WHEELS / LEAST_TARGET)) == (LEAST_TARGET, "right")
