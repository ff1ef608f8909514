import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tiny_archive import TEXT, logits_of, write_archive

from t2n_hf.errors import TractError
from t2n_hf.tract import runner as runner_module
from t2n_hf.tract.runner import TensorSpec, TractRunner
from t2n_hf.tract.version import available, require_tract, tract_version

pytestmark = pytest.mark.tract

FEEDBACK = {"out_cache_key_0": "in_cache_key_0", "out_cache_value_0": "in_cache_value_0"}


def ids(*tokens):
    return np.array([tokens], dtype=np.int64)


def caches(length, dtype=np.float32):
    return {name: np.zeros((1, 1, length, 4), dtype) for name in FEEDBACK.values()}


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    return write_archive(tmp_path_factory.mktemp("archive") / "model")


@pytest.fixture(scope="module")
def runner(archive):
    with TractRunner(archive, timeout_s=60) as runner:
        yield runner


def test_inputs_and_outputs_are_described(runner):
    assert list(runner.inputs) == ["input_ids", "in_cache_key_0", "in_cache_value_0"]
    assert runner.inputs["in_cache_key_0"] == TensorSpec("in_cache_key_0", "float32", (1, 1, "P", 4))
    assert runner.outputs["outputs"] == TensorSpec("outputs", "float32", (1, 1, 16))
    assert runner.version == tract_version()


@pytest.mark.parametrize("length", [1, 2, 7])
def test_any_length_runs(runner, length):
    tokens = list(range(3, 3 + length))
    result = runner.run({"input_ids": ids(*tokens), **caches(0)})
    assert result["out_cache_key_0"].shape == (1, 1, length, 4)
    np.testing.assert_allclose(result["outputs"][0, 0], logits_of(tokens), rtol=1e-5, atol=1e-5)


def test_only_the_outputs_that_are_asked_for_come_back(runner):
    result = runner.run({"input_ids": ids(1, 2), **caches(0)}, outputs=["outputs"])
    assert list(result) == ["outputs"]


def test_caches_given_by_hand_equal_those_kept_in_the_worker(runner):
    first = runner.run({"input_ids": ids(1, 2, 3), **caches(0)})
    again = {into: first[name] for name, into in FEEDBACK.items()}
    by_hand = runner.run({"input_ids": ids(4), **again})
    runner.reset()
    runner.step({"input_ids": ids(1, 2, 3)}, FEEDBACK)
    kept = runner.step({"input_ids": ids(4)}, FEEDBACK)
    assert list(kept) == ["outputs"]
    np.testing.assert_array_equal(kept["outputs"], by_hand["outputs"])


def test_reset_forgets_and_crop_cuts_the_past(runner):
    runner.reset()
    runner.step({"input_ids": ids(1, 2, 3, 9, 9)}, FEEDBACK)
    runner.crop(FEEDBACK.values(), axis=2, length=3)
    cropped = runner.step({"input_ids": ids(4)}, FEEDBACK)["outputs"]
    np.testing.assert_allclose(cropped[0, 0], logits_of([1, 2, 3, 4]), rtol=1e-5, atol=1e-5)
    runner.reset()
    fresh = runner.step({"input_ids": ids(4)}, FEEDBACK)["outputs"]
    np.testing.assert_allclose(fresh[0, 0], logits_of([4]), rtol=1e-5, atol=1e-5)
    runner.reset()
    with pytest.raises(TractError, match="in_cache_key_0"):
        runner.crop(["in_cache_key_0"], axis=2, length=1)


def test_half_precision_goes_in_and_out(tmp_path):
    with TractRunner(write_archive(tmp_path / "model", "float16"), timeout_s=60) as runner:
        runner.step({"input_ids": ids(1, 2)}, FEEDBACK)
        result = runner.step({"input_ids": ids(3)}, FEEDBACK)["outputs"]
        assert result.dtype == np.float16
        np.testing.assert_allclose(result[0, 0], logits_of([1, 2, 3]), rtol=0.03, atol=0.03)


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"input_ids": ids(1)}, "needs input in_cache_key_0, in_cache_value_0"),
        ({"input_ids": ids(1), **caches(0), "extra": ids(1)}, "no input extra; it has input_ids"),
        (
            {"input_ids": ids(1).astype(np.int32), **caches(0)},
            r"input_ids is int32 .* expected int64 of shape \[1, S\]",
        ),
        ({"input_ids": ids(1)[0], **caches(0)}, r"shape \[1\], expected"),
        ({"input_ids": ids(1), **caches(0, np.float16)}, "in_cache_key_0 is float16"),
    ],
    ids=["missing", "unknown", "dtype", "rank", "cache-dtype"],
)
def test_wrong_inputs_are_refused_before_they_are_sent(runner, inputs, text):
    with pytest.raises(TractError, match=text):
        runner.run(inputs)


def test_unknown_names_are_refused(runner):
    with pytest.raises(TractError, match="no output logits; it has outputs"):
        runner.run({"input_ids": ids(1), **caches(0)}, outputs=["logits"])
    with pytest.raises(TractError, match="no output nothing"):
        runner.step({"input_ids": ids(1)}, {"nothing": "in_cache_key_0"})
    with pytest.raises(TractError, match="no input nothing"):
        runner.step({"input_ids": ids(1)}, {"out_cache_key_0": "nothing"})


def test_what_tract_refuses_is_an_error_and_the_worker_goes_on(runner):
    wrong = {**caches(0), "in_cache_key_0": np.zeros((1, 1, 3, 5), np.float32)}
    with pytest.raises(TractError, match="tract failed while running"):
        runner.run({"input_ids": ids(1), **wrong})
    assert runner.run({"input_ids": ids(1), **caches(0)})["outputs"].shape == (1, 1, 16)


def test_an_archive_that_tract_cannot_read_is_refused(tmp_path):
    broken = write_archive(tmp_path / "model", text=TEXT.replace("softmax", "no_such_operator"))
    with pytest.raises(TractError, match=r"(?s)tract failed while loading.*no_such_operator"):
        TractRunner(broken, timeout_s=60)
    with pytest.raises(TractError, match="no such archive"):
        TractRunner(tmp_path / "nothing")


def test_an_abort_of_tract_is_an_error_with_its_last_words(tmp_path):
    # An integer matrix product aborts the process in tract 0.23.
    text = TEXT.replace("matmul(mixed, head)", "tract_core_cast(matmul(a, b), to='{dtype}')").replace(
        "    x = ", "    a = unsqueeze(input_ids, axes=[1]);\n    b = unsqueeze(input_ids, axes=[2]);\n    x = "
    )
    archive = write_archive(tmp_path / "model", text=text)

    def run():
        with TractRunner(archive, timeout_s=60) as runner:
            runner.run({"input_ids": ids(1), **caches(0)})

    with pytest.raises(TractError, match=r"SIGABRT while loading; its last words:\n.*panicked at (.*\n)*.*aborting"):
        run()


def test_a_worker_that_is_killed_is_an_error_and_later_calls_say_closed(archive):
    with TractRunner(archive, timeout_s=60) as runner:
        os.kill(runner._process.pid, signal.SIGKILL)
        with pytest.raises(TractError, match="SIGKILL while running; it said nothing"):
            runner.run({"input_ids": ids(1), **caches(0)})
        with pytest.raises(TractError, match="closed"):
            runner.reset()


def test_a_call_that_takes_too_long_is_ended(archive):
    with TractRunner(archive, timeout_s=60) as runner:
        os.kill(runner._process.pid, signal.SIGSTOP)
        runner._timeout_s = 0.2
        with pytest.raises(TractError, match=r"no answer within 0\.2 s while running"):
            runner.run({"input_ids": ids(1), **caches(0)})
        assert runner._process.returncode is not None


ENDING = """
import os, time
os.write(1, b"T2NF")
os.close(1)
time.sleep(0.3)
os._exit(3)
"""


def test_a_worker_that_ends_in_the_middle_of_its_answer_is_waited_for(archive, monkeypatch):
    monkeypatch.setattr(runner_module, "_BOOTSTRAP", ENDING)
    with pytest.raises(TractError, match="ended with exit code 3 while loading"):
        TractRunner(archive, timeout_s=60)


def run_until_it_fails(runner, raised):
    try:
        while True:
            runner.run({"input_ids": ids(1), **caches(0)})
    except Exception as error:  # noqa: BLE001 - who asked looks at it
        raised.append(error)


@pytest.mark.parametrize("stopped", [True, False], ids=["in the middle of a run", "at any moment"])
def test_a_runner_that_is_closed_while_another_thread_runs_it_says_so(archive, monkeypatch, stopped):
    monkeypatch.setattr(runner_module, "_GRACE_S", 0.3)
    for _ in range(1 if stopped else 10):
        runner, raised = TractRunner(archive, timeout_s=60), []
        if stopped:
            os.kill(runner._process.pid, signal.SIGSTOP)
        thread = threading.Thread(target=run_until_it_fails, args=(runner, raised))
        thread.start()
        time.sleep(0.02)
        runner.close()
        thread.join(60)
        assert [type(error) for error in raised] == [TractError]
        assert "closed" in str(raised[0])


def test_closing_reaps_the_worker_and_may_be_repeated(archive, monkeypatch):
    monkeypatch.setattr(runner_module, "_GRACE_S", 60)
    runner = TractRunner(archive, timeout_s=60)
    runner.close()
    runner.close()
    assert runner._process.returncode == 0
    with pytest.raises(TractError, match="closed"):
        runner.reset()


def test_a_forgotten_runner_ends_its_worker(archive):
    runner = TractRunner(archive, timeout_s=60)
    process = runner._process
    del runner
    assert process.returncode is not None


def test_a_worker_ends_with_its_parent(archive):
    code = f"""
import os, sys
from t2n_hf.tract.runner import TractRunner
runner = TractRunner({str(archive)!r})
print(runner._process.pid, flush=True)
os.fork() or os.close(1) or sys.stdin.read()
os._exit(0)
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as parent:
        worker = Path("/proc") / parent.stdout.read().strip()
        assert parent.wait(60) == 0
        deadline = time.monotonic() + 60
        while worker.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not worker.exists()  # though the parent's child, which has its end of the pipes, lives on


def test_the_worker_imports_neither_torch_nor_transformers(runner):
    maps = Path(f"/proc/{runner._process.pid}/maps").read_text()
    assert "tract" in maps
    assert "libtorch" not in maps


def test_a_missing_tract_says_what_to_install(archive, monkeypatch):
    assert available()
    require_tract()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TractError, match=r"pip install t2n-hf\[tract\]"):
        TractRunner(archive)
