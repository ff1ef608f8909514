"""Where a model comes from: loading a checkpoint for export, and what a loaded model remembers of its own."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from torch import nn

from t2n_hf.errors import CheckpointNotFoundError
from t2n_hf.export.config import ExportConfig
from t2n_hf.garbage import collection_paused
from t2n_hf.hf.companions import fetch_companions
from t2n_hf.hf.config import Late
from t2n_hf.hf.loading import checkpoint_folder, load_checkpoint

__all__ = ["Origin", "load", "origin_of"]

# The Hub's cache names a snapshot by its commit.
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a model came from: its Hub id and commit when it has them, and a local folder with its companion files."""

    hub_id: str | None = None
    revision: str | None = None
    folder: Path | None = None


def load(
    model: str | os.PathLike[str], config: ExportConfig, options: Mapping[str, Any]
) -> tuple[nn.Module, Origin, ExportConfig]:
    """Load a checkpoint folder or a Hub id, its weights on disk unless `options` has a device map.

    Matrices are quantized when they are read, which is while they are written, as far as their class can make rows one
    by one; others while they are loaded. Those of a checkpoint that is quantized already are left as they are; the
    returned configuration still asks for a format: the exporter quantizes what is in none that tract reads.
    """
    given = {name: value for name, value in options.items() if value is not None}
    asked = {"weights": config.weights, "embeddings": config.embeddings, "lm_head": config.lm_head}
    source = os.fspath(model)
    folder = checkpoint_folder(source, given.get("revision"))
    if not _is_quantized(folder):
        given |= asked
        config = replace(config, weights=None, embeddings=None, lm_head=None)
    # Each weight is read to be written, and then only to check what was written.
    late: Late = "once" if config.check else "always"
    with collection_paused():
        loaded = load_checkpoint(source, task=config.task, late=late, **given)
    return loaded, Origin(folder=folder) if Path(source).is_dir() else _from_hub(source, folder), config


def origin_of(model: nn.Module) -> Origin:
    """Find out where a loaded model came from, as far as it remembers and the Hub's cache agrees."""
    name = getattr(getattr(model, "config", None), "_name_or_path", None)
    if not isinstance(name, str) or not name:
        return Origin()
    if Path(name).is_dir():
        return Origin(folder=Path(name))
    try:
        # A folder that is gone may be called like a repository: only what the cache holds came from the Hub.
        return _from_hub(name, checkpoint_folder(name, local_files_only=True))
    except CheckpointNotFoundError:
        return Origin()


def _from_hub(repo_id: str, snapshot: Path) -> Origin:
    commit = snapshot.name if _COMMIT.fullmatch(snapshot.name) else None
    return Origin(hub_id=repo_id, revision=commit, folder=fetch_companions(repo_id, commit))


def _is_quantized(folder: Path) -> bool:
    path = folder / "config.json"
    if not path.is_file():
        return False
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False  # the loader says what is wrong with it
    return isinstance(found, dict) and found.get("quantization_config") is not None
