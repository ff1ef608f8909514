"""Fetch an export from the Hub and hand it out only when every byte is what its manifest says."""

import glob
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import httpx2
from huggingface_hub import cached_assets_path
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from huggingface_hub.hf_api import RepoFile

from t2n_hf.atomic import staged_folder
from t2n_hf.errors import ArchiveError, FormatError, HubError, OutputExistsError
from t2n_hf.hub.connection import Connection, check_repo_id
from t2n_hf.hub.stage import refuse_code
from t2n_hf.nnef.archive import ArchiveReader
from t2n_hf.store.manifest import (
    CARD_NAME,
    FREE_TEXT_PREFIXES,
    MANIFEST_NAME,
    ExportManifest,
    file_entry,
    is_free_text,
)

__all__ = ["pull_nnef_from_hub"]

_COPIED_NBYTES: Final = 8 << 20
_MAX_REPORTED: Final = 10


def pull_nnef_from_hub(
    repo_id: str, revision: str | None = None, *, path: str | Path | None = None, token: str | None = None
) -> Path:
    """Fetch the export in the Hub repository `repo_id` ("owner/name") and return its folder.

    The files come through the cache of the Hub client (shared with it, resumed when cut, usable offline), and the
    folder holds those of the manifest, the card and the licence texts, and nothing else. It appears only when the
    sha256 and size of every file are right and the archive holds no hostile member: else ArchiveError, and no folder.

    `revision`: a branch, tag or commit; else the main branch. `path`: the folder to make, which must not exist; else
    one in the assets cache of the Hub client, by commit. `token`: else the one of HF_TOKEN or `hf auth login`, if any.

    Raises ConfigError for bad arguments, OutputExistsError when `path` exists, HubError when the Hub refuses or cannot
    be reached.
    """
    check_repo_id(repo_id)
    if path is not None and os.path.lexists(path):
        raise OutputExistsError(f"{path} exists already; choose another place for {repo_id}")
    connection = Connection.open(token, required=False)
    with connection.failures(f"pull from {repo_id}"):
        snapshot = _manifest_file(connection, repo_id, revision).parent
    manifest = _read_manifest(snapshot, repo_id)
    commit = snapshot.name  # the cache of the Hub client names a snapshot by its commit
    target = Path(path) if path is not None else _assets_folder(repo_id, commit)
    if path is None and _is_intact(target, snapshot / MANIFEST_NAME):
        return target
    with connection.failures(f"pull from {repo_id}"):
        _refuse_mismatch(_remote_sizes(connection, repo_id, commit), manifest, repo_id)
        connection.api.snapshot_download(repo_id, revision=commit, allow_patterns=_patterns(manifest))
    with staged_folder(target, overwrite=path is None, marker=MANIFEST_NAME) as folder:
        _assemble(snapshot, manifest, folder)
    return target


def _manifest_file(connection: Connection, repo_id: str, revision: str | None) -> Path:
    """Fetch the manifest. Its folder in the cache is named by the commit, and holds what else is fetched of it."""
    try:
        path = connection.api.hf_hub_download(repo_id, MANIFEST_NAME, revision=revision)
    except LocalEntryNotFoundError:
        raise
    except EntryNotFoundError:
        raise HubError(
            f"{repo_id} holds no {MANIFEST_NAME}, so it is no export of t2n_hf; push_nnef_to_hub makes one of a folder"
        ) from None
    return Path(path)


def _read_manifest(snapshot: Path, repo_id: str) -> ExportManifest:
    try:
        manifest = ExportManifest.read(snapshot)
        refuse_code(manifest)
    except FormatError as error:
        raise ArchiveError(f"{repo_id} is refused, and nothing else was fetched of it: {error}") from error
    return manifest


def _remote_sizes(connection: Connection, repo_id: str, commit: str) -> dict[str, int] | None:
    """Sizes of the files of the repository; None when the Hub is out of reach, and only the cache can help."""
    try:
        entries = list(connection.api.list_repo_tree(repo_id, recursive=True, revision=commit))
    except (ConnectionError, httpx2.TransportError):
        return None
    return {entry.path: entry.size for entry in entries if isinstance(entry, RepoFile)}


def _refuse_mismatch(sizes: Mapping[str, int] | None, manifest: ExportManifest, repo_id: str) -> None:
    """Raise ArchiveError for what can be known to be wrong before anything large is fetched."""
    if sizes is None:
        return
    problems = []
    for name, entry in manifest.files.items():
        if name not in sizes:
            problems.append(f"{name}: missing")
        elif sizes[name] != entry.size:
            problems.append(f"{name}: {sizes[name]} bytes, expected {entry.size}")
    folders = tuple(f"{archive}/" for archive in manifest.archives.values())
    problems += [f"{name}: not listed" for name in sizes if name.startswith(folders) and name not in manifest.files]
    if problems:
        texts = "".join(f"\n  {problem}" for problem in problems[:_MAX_REPORTED])
        raise ArchiveError(f"{repo_id} is not what its {MANIFEST_NAME} says, and was not fetched:{texts}")


def _assets_folder(repo_id: str, commit: str) -> Path:
    return cached_assets_path(library_name="t2n_hf", namespace=repo_id, subfolder="exports") / commit


def _is_intact(folder: Path, manifest_file: Path) -> bool:
    """Whether an earlier pull of this commit is there and still what it was."""
    try:
        if (folder / MANIFEST_NAME).read_bytes() != manifest_file.read_bytes():
            return False
        ExportManifest.read(folder).verify(folder)
    except (OSError, FormatError):
        return False
    return True


def _patterns(manifest: ExportManifest) -> list[str]:
    names = [glob.escape(name) for name in manifest.files]
    return [MANIFEST_NAME, CARD_NAME, *(f"{prefix}*" for prefix in FREE_TEXT_PREFIXES), *names]


def _assemble(snapshot: Path, manifest: ExportManifest, folder: Path) -> None:
    """Fill `folder` from the cache, file by file, and check it. Raises ArchiveError."""
    texts = [path.name for path in snapshot.iterdir() if is_free_text(path.name) and path.is_file()]
    for name in [MANIFEST_NAME, *texts, *manifest.files]:
        source = snapshot / name
        if not source.is_file():
            raise ArchiveError(f"the repository lacks {name}, which its {MANIFEST_NAME} lists")
        _place(source.resolve(), folder / name)
    try:
        manifest.verify(folder)
    except ArchiveError:
        _forget_spoiled(snapshot, manifest)
        raise
    for archive in manifest.archives.values():
        reader = ArchiveReader(folder / archive)
        for label in reader.labels():
            reader.header(label)
        reader.text()


def _place(source: Path, destination: Path) -> None:
    """Link a large file, so that it is on the disk once; copy a small one, which somebody may edit."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    if source.stat().st_size > _COPIED_NBYTES:
        try:
            os.link(source, destination)
            return
        except OSError:  # another disk, or a file system without links
            pass
    shutil.copyfile(source, destination)


def _forget_spoiled(snapshot: Path, manifest: ExportManifest) -> None:
    """Take files that are not what they should be out of the cache, so that the next pull fetches them again."""
    for name, entry in manifest.files.items():
        path = snapshot / name
        if path.is_file() and file_entry(path) != entry:
            path.resolve().unlink()
            path.unlink(missing_ok=True)
