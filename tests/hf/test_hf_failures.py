import pytest

from t2n_hf.errors import QuantizationError
from t2n_hf.hf.failures import raise_first


def failures(count):
    return [QuantizationError(f"weight {number} is bad") for number in range(count)]


def test_without_a_failure_nothing_is_raised():
    raise_first([])


def test_one_failure_is_raised_as_it_is():
    with pytest.raises(QuantizationError) as raised:
        raise_first(failures(1) * 2)
    assert (str(raised.value), raised.value.each) == ("weight 0 is bad", ())


def test_a_few_failures_are_all_told():
    with pytest.raises(QuantizationError, match=r"^weight 0 is bad. And 3 more: weight 1 is bad; .*; weight 3 is bad$"):
        raise_first(failures(4))


def test_of_many_failures_the_first_are_told_and_the_others_counted():
    with pytest.raises(QuantizationError) as raised:
        raise_first(failures(28))
    assert str(raised.value).endswith(
        "And 27 more: weight 1 is bad; weight 2 is bad; weight 3 is bad; and 24 more like these"
    )
    assert [str(each) for each in raised.value.each] == [str(each) for each in failures(28)]


def test_a_failure_that_sums_up_others_counts_as_these():
    with pytest.raises(QuantizationError) as inner:
        raise_first(failures(6))
    with pytest.raises(QuantizationError, match=r"^weight 0 is bad. And 6 more: .*; and 3 more like these$") as raised:
        raise_first([inner.value, *failures(3), QuantizationError("another is bad")])
    assert len(raised.value.each) == 7
