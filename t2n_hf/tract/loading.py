"""Exports on disk and on the Hub, as the models that run them find them."""

import os
from pathlib import Path
from typing import Final

from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils.hub import cached_file

from t2n_hf.errors import ConfigError, HubError, StorageError
from t2n_hf.store.manifest import MANIFEST_NAME, ExportManifest

__all__ = ["archive_of", "export_folder", "generation_config_of", "manifest_of"]

_ARCHIVES: Final = ("model.nnef.tgz", "model.nnef.tar", "model")


def export_folder(export: str | os.PathLike[str], revision: str | None, token: str | bool | None) -> Path:
    """Folder of an export: the given one, or what a repository of the Hub holds, fetched into the cache.

    Raises StorageError for a name that is neither, HubError when the Hub does not give it.
    """
    if Path(export).is_dir():
        return Path(export)
    name = str(export)
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise StorageError(f"{name}: no such folder, and not the id of a repository (owner/name)")
    folder = _fetch(name, MANIFEST_NAME, revision, token).parent
    # The files of the commit that the manifest is from, whatever the branch has become meanwhile.
    for listed in ExportManifest.read(folder).files:
        _fetch(name, listed, folder.name, token)
    return folder


def _fetch(repository: str, name: str, revision: str | None, token: str | bool | None) -> Path:
    try:
        path = cached_file(repository, name, revision=revision, token=token)
    except OSError as error:
        raise HubError(f"{name} of {repository} cannot be fetched: {error}") from error
    if path is None:
        raise HubError(f"{repository} has no {name}")
    return Path(path)


def archive_of(folder: Path, verify: bool) -> tuple[Path, int | None]:
    """Archive of an export that is one graph, and the positions that it was exported for.

    Raises StorageError for a folder without an export, ArchiveError for files that are not what its manifest says,
    ConfigError for an export of several graphs.
    """
    if (folder / MANIFEST_NAME).exists():
        manifest = ExportManifest.read(folder)
        if verify:
            manifest.verify(folder)
        if manifest.parts:
            raise ConfigError(
                f"{folder} holds several graphs ({', '.join(manifest.archives)}) for {manifest.task}: load it with "
                "TractModelForSeq2SeqLM or TractModelForImageTextToText"
            )
        return folder / manifest.archive, manifest.max_context
    for name in _ARCHIVES:
        if (folder / name).exists():
            return folder / name, None
    raise StorageError(f"{folder} holds no export: neither {MANIFEST_NAME} nor {', '.join(_ARCHIVES)}")


def manifest_of(folder: Path, verify: bool) -> ExportManifest:
    """Manifest of an export. Raises StorageError when there is none, ArchiveError when the files differ from it."""
    manifest = ExportManifest.read(folder)
    if verify:
        manifest.verify(folder)
    return manifest


def generation_config_of(folder: Path, config: PreTrainedConfig) -> GenerationConfig:
    """How the model of an export generates, as it was exported with it."""
    if (folder / "generation_config.json").exists():
        return GenerationConfig.from_pretrained(folder)
    return GenerationConfig.from_model_config(config)
