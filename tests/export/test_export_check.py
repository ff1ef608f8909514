import numpy as np
import pytest
import sympy

from t2n_hf.errors import CheckError, TractError
from t2n_hf.export.check import TOLERANCES, available_bytes, check_archive, why_skipped
from t2n_hf.export.reference import InputSpec, Step

S = sympy.Symbol("S")
SPECS = (
    InputSpec(name="x", dtype="f32", shape=(S, 3)),
    InputSpec(name="in_cache_key_0", dtype="f32", shape=(S, 3)),
)
GRAPH = """version 1.0;
extension tract_registry tract_core;
extension tract_symbol S;

graph network(x, in_cache_key_0) -> (y, out_cache_key_0)
{
  x = tract_core_external(shape=[S, 3], datum_type="f32");
  in_cache_key_0 = tract_core_external(shape=[S, 3], datum_type="f32");
  y = x * 2.0 + in_cache_key_0;
  out_cache_key_0 = x + in_cache_key_0;
}
"""
X = np.arange(6, dtype=np.float32).reshape(2, 3)
ZERO = np.zeros((2, 3), dtype=np.float32)


@pytest.fixture
def archive(tmp_path):
    (tmp_path / "graph.nnef").write_text(GRAPH)
    return tmp_path


def steps(wrong=0.0):
    last = X * 3
    last[1, 2] += wrong
    return [
        Step(lengths={"S": 2}, inputs={"x": X, "in_cache_key_0": ZERO}, fed_back={}, outputs={"y": X * 2}),
        Step(lengths={"S": 2}, inputs={"x": X}, fed_back={"in_cache_key_0": "out_cache_key_0"}, outputs={"y": last}),
    ]


@pytest.mark.tract
def test_an_archive_that_agrees_passes_and_says_how_well(archive):
    result = check_archive(archive, SPECS, steps(wrong=1e-4), dtype="f32")
    assert result.steps == 2
    assert result.max_abs_error == pytest.approx(1e-4, rel=0.05)
    assert result.max_rel_error == pytest.approx(1e-4 / 15, rel=0.05)
    assert result.tolerance == TOLERANCES["f32"]


@pytest.mark.tract
def test_a_mismatch_says_output_step_place_values_and_tolerance(archive):
    with pytest.raises(CheckError) as error:
        check_archive(archive, SPECS, steps(wrong=1.0), dtype="f32")
    text = str(error.value)
    for part in ("output 'y' of step 1 (S=2)", "at [1, 2]", "tract gives 15", "PyTorch 16", "tolerance 0.0001"):
        assert part in text
    assert "check=False" in text


@pytest.mark.tract
def test_a_tolerance_that_is_given_is_the_one_that_counts(archive):
    assert check_archive(archive, SPECS, steps(wrong=1.0), dtype="f32", tolerance=0.1).tolerance == 0.1


@pytest.mark.tract
def test_another_shape_is_a_mismatch(archive):
    step = Step(lengths={}, inputs={"x": X, "in_cache_key_0": ZERO}, fed_back={}, outputs={"y": X[:1]})
    with pytest.raises(CheckError, match=r"shape \[2, 3\] in tract, \[1, 3\] in PyTorch"):
        check_archive(archive, SPECS, [step], dtype="f32")


@pytest.mark.tract
def test_an_output_that_is_missing_is_named(archive):
    step = Step(lengths={}, inputs={"x": X, "in_cache_key_0": ZERO}, fed_back={}, outputs={"logits": X})
    with pytest.raises(CheckError, match="no output 'logits'; it gives y"):
        check_archive(archive, SPECS, [step], dtype="f32")


@pytest.mark.tract
@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=str)
def test_nan_or_infinity_on_one_side_is_a_mismatch(bad, archive):
    outputs = X * 2
    outputs[0, 1] = bad
    step = Step(lengths={}, inputs={"x": X, "in_cache_key_0": ZERO}, fed_back={}, outputs={"y": outputs})
    with pytest.raises(CheckError, match=r"differs at \[0, 1\]"):
        check_archive(archive, SPECS, [step], dtype="f32")


@pytest.mark.tract
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
def test_the_same_nan_or_infinity_on_both_sides_agrees(bad, archive):
    x = X.copy()
    x[0, 1] = bad
    step = Step(lengths={}, inputs={"x": x, "in_cache_key_0": ZERO}, fed_back={}, outputs={"y": x * 2})
    assert check_archive(archive, SPECS, [step], dtype="f32").max_abs_error == 0.0


@pytest.mark.tract
def test_an_archive_that_tract_refuses_is_an_error_of_tract(tmp_path):
    (tmp_path / "graph.nnef").write_text("version 1.0;\ngraph network(x) -> (y) { y = nonsense(x); }")
    with pytest.raises(TractError):
        check_archive(tmp_path, SPECS, steps(), dtype="f32")


def test_the_check_is_skipped_when_memory_is_short_and_says_how_short():
    why = why_skipped(1_000_000_000, 100_000_000, 500_000_000)
    assert why is not None
    assert why.startswith("short of memory")
    assert "500.0 MB are available" in why


@pytest.mark.parametrize("available", [None, 10**12], ids=["unknown", "plenty"])
def test_the_check_runs_when_memory_suffices_or_is_unknown(available):
    assert why_skipped(1_000_000_000, 100_000_000, available) is None


def test_a_single_weight_can_be_too_large_for_the_reference():
    assert why_skipped(1_000, 10**9, 2 * 10**9) is not None


def test_available_memory_is_within_the_machine():
    found = available_bytes()
    assert found is None or 0 <= found < 1 << 50
