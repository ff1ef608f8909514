import threading

import pytest
import torch

from t2n_hf.errors import ResidencyError
from t2n_hf.residency import TensorResidencyPool, active_pool, active_scope


def test_scopes_nest_and_end():
    outer, inner = TensorResidencyPool(), TensorResidencyPool()
    assert active_pool() is None
    with outer.scope() as entered:
        assert entered is outer
        with inner.scope("meta"):
            assert active_pool() is inner
            assert active_scope().device == torch.device("meta")
        assert active_pool() is outer
        assert active_scope().device is None
    assert active_pool() is None


def test_a_scope_ends_when_its_block_raises():
    pool = TensorResidencyPool()
    with pytest.raises(ZeroDivisionError), pool.scope():
        _ = 1 / 0
    assert active_pool() is None


def test_another_thread_does_not_inherit_the_scope():
    seen = []
    with TensorResidencyPool() as pool, pool.scope():
        thread = threading.Thread(target=lambda: seen.append(active_pool()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_a_closed_pool_cannot_be_made_the_scope():
    pool = TensorResidencyPool()
    pool.close()
    with pytest.raises(ResidencyError, match="is closed; make another one"), pool.scope():
        pass
    assert active_pool() is None
