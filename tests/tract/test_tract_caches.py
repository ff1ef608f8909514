"""Caches of a worker are taken back to a beginning of the text, or begin anew where a state cannot be."""

from types import SimpleNamespace

import numpy as np
import pytest

from t2n_hf.tract.caches import WorkerCaches, common_length


class Decoder:
    """Records what it is told; its caches have the given shapes."""

    def __init__(self, **shapes):
        self.inputs = {f"in_cache_{name}": SimpleNamespace(shape=shape) for name, shape in shapes.items()}
        self.outputs = dict.fromkeys(["outputs", *(f"out_cache_{name}" for name in shapes)])
        self.told = []

    def reset(self):
        self.told.append("reset")

    def crop(self, names, axis, length):
        self.told.append((sorted(names), axis, length))


GROWING = {"key_0": (1, 4, "P", 16), "value_0": (1, 4, "P", 16)}
STATE = {"conv_1": (1, 64, 4)}


def test_caches_that_grow_are_cropped():
    decoder = Decoder(**GROWING)
    assert WorkerCaches(decoder).cut(kept=3, seen=7) == 3
    assert decoder.told == [(["in_cache_key_0", "in_cache_value_0"], 2, 3)]


@pytest.mark.parametrize("shapes", [STATE, GROWING | STATE], ids=["states", "both"])
def test_states_begin_anew_instead(shapes):
    decoder = Decoder(**shapes)
    assert WorkerCaches(decoder).cut(kept=3, seen=7) == 0
    assert decoder.told == ["reset"]
    assert WorkerCaches(decoder).cut(kept=7, seen=7) == 7
    assert decoder.told == ["reset"]


def test_without_caches_all_is_computed_again():
    decoder = Decoder()
    assert WorkerCaches(decoder).cut(kept=3, seen=3) == 0


def test_rows_share_what_all_of_them_begin_with_but_never_the_last_position():
    seen = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    assert common_length(seen, seen) == 3
    assert common_length(seen, np.array([[1, 2, 3, 4, 9], [5, 6, 0, 8, 9]])) == 2
    assert common_length(seen[:, :0], seen) == 0
