"""A safetensors file with known weights, and what the tests of offloaded tensors read from it."""

import os

import torch
from safetensors.torch import save_file

from t2n_hf.store.checkpoint import CheckpointIndex


def weights(seed=0):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    return {
        "linear": random(24, 64),
        "half": random(24, 64).to(torch.bfloat16),
        "table": random(50, 16),
        "experts": random(4, 8, 32),
        "expert.0": random(8, 32),
        "expert.1": random(8, 32),
        "bias": random(24),
    }


def checkpoint(folder):
    """Save the weights; give (path, weights, byte ranges by name)."""
    path = folder / "model.safetensors"
    values = weights()
    save_file(values, path)
    return path, values, CheckpointIndex.open(path)


class Readings:
    """Counts the bytes that reach `CheckpointFile.read_pieces` of one file."""

    def __init__(self, byte_range, monkeypatch):
        self.nbytes = 0
        file = byte_range.file
        original = file.read_pieces

        def counted(pieces, *args):
            self.nbytes += sum(len(view) for view, _ in pieces)
            return original(pieces, *args)

        monkeypatch.setattr(file, "read_pieces", counted)

    def take(self):
        taken, self.nbytes = self.nbytes, 0
        return taken


def stamp(path):
    status = os.stat(path)
    return path.read_bytes(), status.st_mtime_ns, sorted(os.listdir(path.parent))
