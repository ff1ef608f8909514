import gc

import pytest

from t2n_hf.garbage import collection_paused


@pytest.fixture(autouse=True)
def collecting():
    was_on = gc.isenabled()
    gc.enable()
    yield
    if not was_on:
        gc.disable()


def test_nothing_is_collected_inside_and_it_goes_on_afterwards():
    with collection_paused():
        assert not gc.isenabled()
        with collection_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_goes_on_after_an_error():
    with pytest.raises(ValueError, match="inside"), collection_paused():
        raise ValueError("inside")
    assert gc.isenabled()


def test_who_does_not_collect_is_left_alone():
    gc.disable()
    with collection_paused():
        pass
    assert not gc.isenabled()
