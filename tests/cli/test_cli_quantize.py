"""`t2n-hf quantize`: what it prints, its exit codes, and that its options arrive."""

import json
import os
import subprocess
import sys
import time

import models
import pytest
import torch

from t2n_hf import Importance
from t2n_hf.atomic import partial_path
from t2n_hf.cli import main as cli
from t2n_hf.cli import quantize as command
from t2n_hf.store.checkpoint import CheckpointIndex


def run(*arguments):
    with pytest.raises(SystemExit) as end:
        cli.main(["quantize", *map(str, arguments)])
    return end.value.code


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return models.saved(models.m2(), tmp_path_factory.mktemp("checkpoint"))


def test_a_report_is_printed_and_nothing_else(checkpoint, tmp_path, capsys):
    assert run(checkpoint, tmp_path / "out") == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0] == f"{checkpoint} quantized to {tmp_path / 'out'}"
    assert lines[1].startswith("before ")
    assert lines[2].startswith("after ")
    assert any(line.split()[:3] == ["q4_0", "14", "weights"] and "relative error 0.0" in line for line in lines)
    assert lines[-1].endswith(" s")
    assert captured.err == ""


def test_the_report_as_json_is_for_scripts(checkpoint, tmp_path, capsys):
    assert run(checkpoint, tmp_path / "out", "--json", "--lm-head", "q4_0") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bytes_after"] == (tmp_path / "out" / "model.safetensors").stat().st_size
    assert {row["name"]: row["format"] for row in report["weights"]}["lm_head.weight"] == "q4_0"
    assert report["dry_run"] is False


def test_a_dry_run_writes_nothing(checkpoint, tmp_path, capsys):
    assert run(checkpoint, tmp_path / "out", "--dry-run") == 0
    out = capsys.readouterr().out
    assert "would be quantized to" in out
    assert "bytes needed" in out
    assert os.listdir(tmp_path) == []


def test_options_arrive(checkpoint, tmp_path):
    assert run(checkpoint, tmp_path / "a", "--skip", "mlp", "--max-shard-size", "40KB", "--dtype", "bf16") == 0
    index = CheckpointIndex.open(tmp_path / "a")
    assert len(index.files) > 2
    assert index["model.layers.0.mlp.up_proj.weight"].dtype == "bf16"
    assert "model.layers.0.self_attn.q_proj.weight_q4_0" in index
    assert run(checkpoint, tmp_path / "b", "--weights", "none", "--embeddings", "q4_0", "--skip-nothing") == 0
    packed = [name for name in CheckpointIndex.open(tmp_path / "b") if name.endswith("_q4_0")]
    assert packed == ["model.embed_tokens.weight_q4_0"]


def test_importance_is_read_from_a_file(checkpoint, tmp_path, capsys):
    file = tmp_path / "importance.safetensors"
    Importance({"model.layers.0.mlp.up_proj.weight": torch.ones(63)}).save(file)
    assert run(checkpoint, tmp_path / "out", "--importance", file) == 1
    assert "model.layers.0.mlp.up_proj.weight has 64 input channels" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--weights", "q9"], 1, "no installed class for format 'q9'"),
        (["--weights", "none"], 1, "nothing to quantize"),
        (["--max-shard-size", "much"], 2, "is not a size"),
        (["--skip", "mlp", "--skip-nothing"], 2, "exclude each other"),
        (["--threads", "0"], 2, "threads"),
        (["--nonsense"], 2, "No such option"),
    ],
)
def test_what_cannot_be_done_is_said_on_stderr(arguments, code, text, checkpoint, tmp_path, capsys):
    assert run(checkpoint, tmp_path / "out", *arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert text in captured.err
    assert "Traceback" not in captured.err
    assert os.listdir(tmp_path) == []


def test_a_missing_argument_is_wrong_usage(capsys):
    assert run() == 2
    assert "Usage" in capsys.readouterr().err


def test_an_output_that_is_there_is_refused_and_replaced_with_overwrite(checkpoint, tmp_path, capsys):
    assert run(checkpoint, tmp_path / "out") == 0
    capsys.readouterr()
    assert run(checkpoint, tmp_path / "out") == 1
    assert capsys.readouterr().err.startswith(f"t2n-hf: {tmp_path / 'out'} exists already")
    assert run(checkpoint, tmp_path / "out", "--overwrite") == 0


def test_threads_are_set_when_asked_for(checkpoint, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(command.torch, "set_num_threads", asked.append)
    assert run(checkpoint, tmp_path / "a") == 0
    assert run(checkpoint, tmp_path / "b", "--threads", "3") == 0
    assert asked == [3]


def test_a_person_at_a_terminal_sees_a_bar(checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "progress_bar", lambda: True)
    assert run(checkpoint, tmp_path / "out") == 0
    assert "quantizing" in capsys.readouterr().err


def test_an_interrupt_says_that_the_work_is_kept(checkpoint, tmp_path, monkeypatch, capsys):
    def stop(self, done, total):
        self._begun = True
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(command._Progress, "update", stop)
        assert run(checkpoint, tmp_path / "out") == 130
    assert "goes on with it" in capsys.readouterr().err
    assert os.listdir(tmp_path) == [partial_path("out").name]
    assert run(checkpoint, tmp_path / "out") == 0
    assert "bytes were there already" in capsys.readouterr().out


def length_of(file):
    """Bytes of a file that another process makes, and takes away."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def test_a_command_that_is_killed_leaves_no_model_and_is_gone_on_with(tmp_path):
    """From outside, at whatever moment that is."""
    checkpoint = models.saved(models.m2(num_hidden_layers=24, hidden_size=256), tmp_path)
    program = "from t2n_hf.cli.main import main; main()"
    words = [sys.executable, "-c", program, "quantize", str(checkpoint), str(tmp_path / "out")]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as process:
        journal = partial_path(tmp_path / "out") / "journal.jsonl"
        while process.poll() is None and length_of(journal) <= 2000:
            time.sleep(0.002)
        process.kill()
    assert run(checkpoint, tmp_path / "again") == 0
    whole = (tmp_path / "again" / "model.safetensors").read_bytes()
    if (tmp_path / "out").exists():  # it was done before this process came to kill it
        assert (tmp_path / "out" / "model.safetensors").read_bytes() == whole
    assert run(checkpoint, tmp_path / "out", *(["--overwrite"] if (tmp_path / "out").exists() else [])) == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == whole
