"""A real export makes the journey: it runs when checkpoint and export folder are gone, and no code comes along."""

import json
import shutil
from pathlib import Path

import models
import pytest
import torch

from t2n_hf import TractModelForCausalLM, export_nnef


@pytest.mark.tract
def test_a_pulled_export_generates_what_the_checkpoint_would_have(lfs_worker, server, repo, tmp_path):
    model = models.m1()
    checkpoint = models.saved(model, tmp_path)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoConfig": "evil.Config"}}))
    (checkpoint / "evil.py").write_text("raise SystemExit('this code must never run')")
    (checkpoint / "README.md").write_text("---\nlicense: mit\nbase_model: /home/alice/models/tiny\n---\nby alice\n")
    (checkpoint / "LICENSE").write_text("Do what you like.\n")
    export_nnef(checkpoint, tmp_path / "export", check=False)
    first = lfs_worker.push(tmp_path / "export", repo)
    assert lfs_worker.push(tmp_path / "export", repo).oid == first.oid
    assert len(server.commits(repo)) == 1
    shutil.rmtree(checkpoint)
    shutil.rmtree(tmp_path / "export")
    pulled = Path(lfs_worker.pull(repo).result)
    assert not list(pulled.rglob("*.py"))
    assert "evil" not in (pulled / "config.json").read_text()
    assert "license: mit" in (pulled / "README.md").read_text()
    assert "/home/alice" not in (pulled / "README.md").read_text()
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    with TractModelForCausalLM.from_pretrained(pulled) as runner:
        assert torch.equal(runner.generate(ids, max_new_tokens=6, do_sample=False), expected)
