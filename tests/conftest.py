"""What every test shares: one thread per process, and the real models that scripts/models.py builds."""

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

CACHE = Path(__file__).resolve().parent.parent / ".cache"


def _model(name: str) -> Path:
    folder = CACHE / name
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is missing; run scripts/models.py (scripts/test does)")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct in f32."""
    return _model("SmolLM2-135M-Instruct")


@pytest.fixture(scope="session")
def smollm2_bf16() -> Path:
    """SmolLM2-135M-Instruct in bf16."""
    return _model("SmolLM2-135M-Instruct-bf16")


@pytest.fixture(scope="session")
def minilm() -> Path:
    """all-MiniLM-L6-v2 in f32."""
    return _model("all-MiniLM-L6-v2")
