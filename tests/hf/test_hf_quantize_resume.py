"""Interrupted anywhere, a second run goes on, and what comes out is what an undisturbed run gives."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import models
import pytest
from quantize_cases import content

from t2n_hf import quantize_checkpoint
from t2n_hf.atomic import partial_path
from t2n_hf.errors import CheckpointNotFoundError, StorageError
from t2n_hf.hf.loading import check_checkpoint
from t2n_hf.hf.quantize import work
from t2n_hf.store.checkpoint import CheckpointIndex
from t2n_hf.store.shard import ShardFile

SHARDS = {"max_shard_size": "40KB"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return models.saved(models.m4(), tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def undisturbed(checkpoint, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    counts = []
    quantize_checkpoint(checkpoint, out, **SHARDS, on_progress=lambda *count: counts.append(count))
    return content(out), len(counts)


class Counted:
    """Counts the units that are made, and may stop the run after some of them."""

    def __init__(self, stop_after=None, error=KeyboardInterrupt):
        self.made, self.stop_after, self.error = 0, stop_after, error

    def __call__(self, done, total):
        self.made += 1
        if self.made == self.stop_after:
            raise self.error


def interrupted(checkpoint, out, units=8, **options):
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(checkpoint, out, **{**SHARDS, **options}, on_progress=Counted(units))
    return partial_path(out)


@pytest.mark.parametrize("units", [1, 8, 20])
def test_a_second_run_makes_only_what_is_left(units, checkpoint, undisturbed, tmp_path):
    expected, total = undisturbed
    partial = interrupted(checkpoint, tmp_path / "out", units)
    assert os.listdir(tmp_path) == [partial.name]
    counted = Counted()
    report = quantize_checkpoint(checkpoint, tmp_path / "out", **SHARDS, on_progress=counted)
    assert counted.made == total - units
    assert 0 < report.bytes_resumed < report.bytes_after
    assert len(report.errors) == 12
    assert content(tmp_path / "out") == expected
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("chunks", [7, 30])
def test_a_killed_run_is_gone_on_with(chunks, checkpoint, undisturbed, tmp_path):
    program = f"""
import os, signal, sys
from t2n_hf import quantize_checkpoint
from t2n_hf.store.shard import ShardFile
append, count = ShardFile.append, 0
def append_and_die(self, name, chunk):
    global count
    count += 1
    if count == {chunks}:  # half of it is written
        append(self, name, chunk[:len(chunk) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    append(self, name, chunk)
ShardFile.append = append_and_die
quantize_checkpoint(sys.argv[1], sys.argv[2], max_shard_size="40KB")
"""
    command = [sys.executable, "-c", program, str(checkpoint), str(tmp_path / "out")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert os.listdir(tmp_path) == [partial_path("out").name]
    quantize_checkpoint(checkpoint, tmp_path / "out", **SHARDS)
    assert content(tmp_path / "out") == undisturbed[0]
    assert os.listdir(tmp_path) == ["out"]


def test_a_run_that_is_stopped_again_and_again_comes_to_its_end(checkpoint, undisturbed, tmp_path):
    for _ in range(4):
        interrupted(checkpoint, tmp_path / "out", 4)
    quantize_checkpoint(checkpoint, tmp_path / "out", **SHARDS)
    assert content(tmp_path / "out") == undisturbed[0]


def test_unfinished_work_looks_like_no_model(checkpoint, tmp_path):
    partial = interrupted(checkpoint, tmp_path / "out")
    assert not (partial / "config.json").exists()
    with pytest.raises(CheckpointNotFoundError):
        CheckpointIndex.open(partial)
    with pytest.raises(CheckpointNotFoundError):
        check_checkpoint(partial)


def growing_files(partial: Path):
    return sorted(partial.glob("*.unfinished"))


def flip_a_byte(partial: Path):
    for file in growing_files(partial):
        data = bytearray(file.read_bytes())
        data[-3] ^= 255
        file.write_bytes(data)


def cut_files_short(partial: Path):
    for file in growing_files(partial):
        os.truncate(file, file.stat().st_size // 2)


def remove_a_file(partial: Path):
    growing_files(partial)[0].unlink()


def zero_all_bytes(partial: Path):
    for file in growing_files(partial):
        file.write_bytes(bytes(file.stat().st_size))


def cut_the_journal_in_a_line(partial: Path):
    journal = partial / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-20])


def say_what_is_not_done(partial: Path):
    """An entry for a unit that was never made."""
    journal = partial / "journal.jsonl"
    entry = json.loads(journal.read_text().splitlines()[-1])
    entry["unit"] = "lm_head.weight"
    entry["checksums"] = {"lm_head.weight": 0}
    with open(journal, "a") as file:
        file.write(json.dumps(entry) + "\n")


def put_nonsense_into_the_journal(partial: Path):
    with open(partial / "journal.jsonl", "a") as file:
        file.write('{"unit": 3, "forms": []}\n\x00\x00\x00')


def leave_other_files(partial: Path):
    (partial / "side").mkdir()
    (partial / "side" / "config.json").write_text("{}")
    (partial / "config.json").write_text("{}")


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_byte,
        cut_files_short,
        remove_a_file,
        zero_all_bytes,
        cut_the_journal_in_a_line,
        say_what_is_not_done,
        put_nonsense_into_the_journal,
        leave_other_files,
    ],
)
def test_nothing_is_believed_that_the_files_do_not_confirm(damage, checkpoint, undisturbed, tmp_path):
    damage(interrupted(checkpoint, tmp_path / "out", 15))
    quantize_checkpoint(checkpoint, tmp_path / "out", **SHARDS)
    assert content(tmp_path / "out") == undisturbed[0]


@pytest.mark.parametrize("renames", range(1, 12, 2))
def test_a_run_that_is_stopped_while_names_become_final_is_gone_on_with(
    renames, checkpoint, undisturbed, tmp_path, monkeypatch
):
    replace, count = os.replace, 0

    def stop(source, target):
        nonlocal count
        count += 1
        if count == renames:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(work.os, "replace", stop)
        with pytest.raises(KeyboardInterrupt):
            quantize_checkpoint(checkpoint, tmp_path / "out", **SHARDS)
    assert not (tmp_path / "out").exists()
    assert not (partial_path(tmp_path / "out") / "config.json").exists()
    counted = Counted()
    quantize_checkpoint(checkpoint, tmp_path / "out", **SHARDS, on_progress=counted)
    assert counted.made == 0
    assert content(tmp_path / "out") == undisturbed[0]


def test_other_options_start_over_and_say_so(checkpoint, tmp_path):
    interrupted(checkpoint, tmp_path / "out")
    with pytest.warns(UserWarning, match="starting over"):
        quantize_checkpoint(checkpoint, tmp_path / "out", lm_head="q4_0", **SHARDS)
    quantize_checkpoint(checkpoint, tmp_path / "expected", lm_head="q4_0", **SHARDS)
    assert content(tmp_path / "out") == content(tmp_path / "expected")


def test_other_importance_starts_over(checkpoint, tmp_path):
    import torch

    interrupted(checkpoint, tmp_path / "out")
    given = {"model.layers.0.self_attn.q_proj.weight": torch.ones(64)}
    with pytest.warns(UserWarning, match="starting over"):
        quantize_checkpoint(checkpoint, tmp_path / "out", importance=given, **SHARDS)


def test_a_source_that_was_written_anew_starts_over(checkpoint, undisturbed, tmp_path):
    copy = models.saved(models.m4(), tmp_path)
    interrupted(copy, tmp_path / "out")
    os.utime(copy / "model.safetensors", ns=(1, 1))
    with pytest.warns(UserWarning, match="starting over"):
        quantize_checkpoint(copy, tmp_path / "out", **SHARDS)
    assert content(tmp_path / "out") == undisturbed[0]


def test_a_run_that_had_no_room_to_begin_is_no_work_of_another(checkpoint, undisturbed, tmp_path):
    partial = partial_path(tmp_path / "out")
    partial.mkdir()
    (partial / "model.safetensors.unfinished").touch()
    quantize_checkpoint(checkpoint, tmp_path / "out", **SHARDS)  # a warning is an error
    assert content(tmp_path / "out") == undisturbed[0]


def test_starting_over_can_be_asked_for(checkpoint, undisturbed, tmp_path):
    interrupted(checkpoint, tmp_path / "out")
    counted = Counted()
    report = quantize_checkpoint(checkpoint, tmp_path / "out", resume=False, **SHARDS, on_progress=counted)
    assert (counted.made, report.bytes_resumed) == (undisturbed[1], 0)
    assert content(tmp_path / "out") == undisturbed[0]


def test_a_source_that_changes_meanwhile_is_noticed(tmp_path, undisturbed):
    copy = models.saved(models.m4(), tmp_path)

    def touch(done, total):
        os.utime(copy / "model.safetensors", ns=(1, 1))

    with pytest.raises(StorageError, match=r"model\.safetensors.*changed since it was opened"):
        quantize_checkpoint(copy, tmp_path / "out", **SHARDS, on_progress=touch)
    assert not (tmp_path / "out").exists()
    with pytest.warns(UserWarning, match="starting over"):
        quantize_checkpoint(copy, tmp_path / "out", **SHARDS)
    assert content(tmp_path / "out") == undisturbed[0]


def test_a_source_that_changes_at_the_very_end_is_noticed(tmp_path):
    copy = models.saved(models.m4(), tmp_path)

    def touch_at_the_end(done, total):
        if done == total:
            os.utime(copy / "model.safetensors", ns=(1, 1))

    with pytest.raises(StorageError, match="changed since it was opened"):
        quantize_checkpoint(copy, tmp_path / "out", on_progress=touch_at_the_end)
    assert not (tmp_path / "out").exists()


def test_a_disk_that_fills_up_is_said_in_bytes_and_gone_on_with(checkpoint, undisturbed, tmp_path, monkeypatch):
    append, count = ShardFile.append, 0

    def full(self, name, chunk):
        nonlocal count
        count += 1
        if count > 9:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, name, chunk)

    with monkeypatch.context() as patched:
        patched.setattr(ShardFile, "append", full)
        with pytest.raises(StorageError, match=r"full: .* bytes\) are still needed, .* bytes\) are free") as caught:
            quantize_checkpoint(checkpoint, tmp_path / "out", **SHARDS)
    assert caught.value.errno == errno.ENOSPC
    assert "run the same again" in str(caught.value)
    assert not (tmp_path / "out").exists()
    counted = Counted()
    quantize_checkpoint(checkpoint, tmp_path / "out", **SHARDS, on_progress=counted)
    assert counted.made < undisturbed[1]
    assert content(tmp_path / "out") == undisturbed[0]


def test_a_disk_that_is_too_small_is_noticed_before_anything_is_written(checkpoint, tmp_path, monkeypatch):
    usage = work.shutil.disk_usage(tmp_path)._replace(free=300_000)
    monkeypatch.setattr(work.shutil, "disk_usage", lambda folder: usage)
    made = Counted()
    with pytest.raises(StorageError, match=r"300\.0 kB \(300,000 bytes\) free, and 1\.3 MB .* are needed"):
        quantize_checkpoint(checkpoint, tmp_path / "out", **SHARDS, on_progress=made)
    assert made.made == 0
    assert os.listdir(tmp_path) == []


def test_a_second_run_at_the_same_time_is_refused(checkpoint, undisturbed, tmp_path):
    def run_another(done, total):
        with pytest.raises(StorageError, match="another process is writing"):
            quantize_checkpoint(checkpoint, tmp_path / "out", **SHARDS)

    quantize_checkpoint(checkpoint, tmp_path / "out", **SHARDS, on_progress=run_another)
    assert content(tmp_path / "out") == undisturbed[0]


def test_an_older_output_stays_until_the_new_one_is_complete(checkpoint, undisturbed, tmp_path):
    quantize_checkpoint(checkpoint, tmp_path / "out", lm_head="q4_0")
    before = content(tmp_path / "out")
    interrupted(checkpoint, tmp_path / "out", overwrite=True)
    assert content(tmp_path / "out") == before
    quantize_checkpoint(checkpoint, tmp_path / "out", overwrite=True, **SHARDS)
    assert content(tmp_path / "out") == undisturbed[0]
