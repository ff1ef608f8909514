"""Inputs that stay in a worker: given once, and rows of them taken in another order."""

import numpy as np
import pytest

from t2n_hf.errors import ConfigError, TractError
from t2n_hf.tract.encoder_decoder import EncoderDecoder
from t2n_hf.tract.runner import TractRunner

TEXT = """version 1.0;

extension tract_registry tract_core;
extension tract_symbol B;
extension tract_symbol S;
extension tract_symbol P;
extension tract_symbol E;

graph network(x, cross_key_0, in_cache_key_0) -> (outputs, out_cache_key_0)
{
    x = tract_core_external(shape=[B, S], datum_type='f32');
    cross_key_0 = tract_core_external(shape=[B, E], datum_type='f32');
    in_cache_key_0 = tract_core_external(shape=[B, P], datum_type='f32');
    out_cache_key_0 = concat([in_cache_key_0, x], axis=1);
    outputs = add(sum_reduce(out_cache_key_0, axes=[1]), sum_reduce(cross_key_0, axes=[1]));
}
"""
FEEDBACK = {"out_cache_key_0": "in_cache_key_0"}


@pytest.fixture
def runner(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "graph.nnef").write_text(TEXT)
    with TractRunner(folder, timeout_s=60) as opened:
        yield opened


def column(*values):
    return np.array(values, np.float32)[:, None]


def step(runner, *values):
    return runner.step({"x": column(*values)}, FEEDBACK)["outputs"][:, 0].tolist()


def test_held_inputs_are_part_of_every_step_and_survive_a_reset(runner):
    runner.hold({"cross_key_0": column(100, 200)})
    assert step(runner, 1, 2) == [101, 202]  # the empty cache has as many rows as what is held
    assert step(runner, 3, 4) == [104, 206]
    runner.reset()
    assert step(runner, 5, 6) == [105, 206]


def test_rows_of_what_is_kept_and_held_are_taken_in_any_order_and_several_times(runner):
    runner.hold({"cross_key_0": column(100, 200)})
    step(runner, 1, 2)
    runner.take(["in_cache_key_0"], [1, 0])
    assert step(runner, 0, 0) == [102, 201]
    runner.take(["in_cache_key_0", "cross_key_0"], [0, 0, 1])
    assert step(runner, 0, 0, 0) == [102, 102, 201]


def test_what_is_held_is_checked_and_replaced(runner):
    with pytest.raises(TractError, match="has no input y"):
        runner.hold({"y": column(1)})
    with pytest.raises(TractError, match="expected float32"):
        runner.hold({"cross_key_0": np.zeros((1, 1), np.int64)})
    runner.hold({"cross_key_0": column(100)})
    runner.hold({})
    with pytest.raises(TractError, match="needs input cross_key_0"):
        step(runner, 1)


def test_archives_that_do_not_meet_are_no_encoder_and_decoder(runner):
    with pytest.raises(ConfigError, match="takes cross_key_0 of what"):
        EncoderDecoder(runner, runner)
