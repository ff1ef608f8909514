"""A model of the Hub is quantized by its id, and one whose weights are pickled is refused."""

import subprocess
import sys

import models
from hub_folders import hub_environment
from hub_processes import TOKEN

from t2n_hf import quantize_checkpoint

PROGRAM = """
import sys
from pathlib import Path
from huggingface_hub import HfApi
from t2n_hf import quantize_checkpoint
from t2n_hf.errors import CheckpointNotFoundError

folder, repo, out = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
api = HfApi()
api.create_repo(repo)
commit = api.upload_folder(repo_id=repo, folder_path=folder).oid
for revision in (None, commit):
    quantize_checkpoint(repo, out / str(revision is None), revision=revision)
api.create_repo(repo + "-bin")
(folder / "model.safetensors").rename(folder / "pytorch_model.bin")
api.upload_folder(repo_id=repo + "-bin", folder_path=folder)
try:
    quantize_checkpoint(repo + "-bin", out / "bin")
except CheckpointNotFoundError as error:
    print(error)
"""


def test_an_id_is_enough(server, repo, tmp_path):
    checkpoint = models.saved(models.m1(), tmp_path)
    (checkpoint / "LICENSE").write_text("Do what you like.\n")
    (checkpoint / "tokenizer.json").write_text("{}")
    quantize_checkpoint(checkpoint, tmp_path / "expected")
    (tmp_path / "out").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(checkpoint), repo[:80], str(tmp_path / "out")],
        env=hub_environment(tmp_path / "home", server.url, xet=False, token=TOKEN),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    for found in (tmp_path / "out" / "True", tmp_path / "out" / "False"):
        files = {path.name: path.read_bytes() for path in found.iterdir()}
        assert files == {path.name: path.read_bytes() for path in (tmp_path / "expected").iterdir()}
    assert "has no weights in safetensors" in done.stdout
    assert "save_pretrained" in done.stdout
    assert str(tmp_path) not in done.stdout
    assert not (tmp_path / "out" / "bin").exists()
