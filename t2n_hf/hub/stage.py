"""What a push sends: the files of the manifest, the card and the licence texts, and nothing else that lies around."""

import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from t2n_hf.errors import ArchiveError
from t2n_hf.hub.card import build_card, name_repo
from t2n_hf.store.manifest import CARD_NAME, MANIFEST_NAME, ExportManifest, is_free_text

__all__ = ["Staged", "refuse_code", "stage"]

_MAX_FREE_TEXT_NBYTES: Final = 8 << 20
_CODE_SUFFIXES: Final = frozenset(
    (".bat", ".bin", ".ckpt", ".cmd", ".dll", ".dylib", ".exe", ".joblib", ".js", ".npy", ".npz", ".pickle", ".pkl")
) | frozenset((".ps1", ".pt", ".pth", ".py", ".pyc", ".pyd", ".sh", ".so", ".whl"))


@dataclass(frozen=True)
class Staged:
    """A verified export, ready to be sent.

    `files` maps each path in the repository to the file on disk, or to its bytes when the manifest does not list it.
    """

    folder: Path
    manifest: ExportManifest
    files: Mapping[str, Path | bytes]


def stage(folder: str | Path, repo_id: str) -> Staged:
    """Verify an export folder against its manifest and list what a push to `repo_id` sends. Sends and writes nothing.

    The card is the folder's README.md (else a fresh one), with `repo_id` where it says `<repo>`. Raises ArchiveError
    for a file that is missing, changed, a link, or code; StorageError when the folder is no export.
    """
    folder = Path(folder)
    manifest = ExportManifest.read(folder)
    refuse_code(manifest)
    texts = sorted(path.name for path in folder.iterdir() if is_free_text(path.name))
    names = [MANIFEST_NAME, *sorted(manifest.files), *(name for name in texts if name not in manifest.files)]
    for name in names:
        _check_regular(folder, name)
    manifest.verify(folder)
    # What no sha256 is known of is read once: what is scanned is what is sent.
    files: dict[str, Path | bytes] = {
        name: folder / name if name in manifest.files else (folder / name).read_bytes() for name in names
    }
    files[CARD_NAME] = name_repo(_card(folder, manifest), repo_id).encode()
    return Staged(folder, manifest, files)


def refuse_code(manifest: ExportManifest) -> None:
    """Raise ArchiveError when the manifest lists files that hold code or pickles: no export has them."""
    bad = sorted(name for name in manifest.files if Path(name).suffix.lower() in _CODE_SUFFIXES)
    if bad:
        raise ArchiveError(f"{MANIFEST_NAME} lists {', '.join(bad)}: an export holds data only, never code or pickles")


def _check_regular(folder: Path, name: str) -> None:
    """Raise ArchiveError unless `name` is a plain file that no link leads to: a link could publish any file."""
    path = folder
    for part in Path(name).parts:
        path = path / part
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError as error:
            raise ArchiveError(f"{folder} lacks {name}, which its {MANIFEST_NAME} lists; export again") from error
        if stat.S_ISLNK(mode):
            raise ArchiveError(f"{name} in {folder} is a link, and links are never sent; put the file itself there")
    if not stat.S_ISREG(mode):
        raise ArchiveError(f"{name} in {folder} is not a plain file")
    if is_free_text(name) and path.stat().st_size > _MAX_FREE_TEXT_NBYTES:
        raise ArchiveError(
            f"{name} in {folder} has {path.stat().st_size} bytes; a text of at most {_MAX_FREE_TEXT_NBYTES} is sent"
        )


def _card(folder: Path, manifest: ExportManifest) -> str:
    try:
        return (folder / CARD_NAME).read_text("utf-8")
    except FileNotFoundError:
        return build_card(manifest)
    except UnicodeDecodeError as error:
        raise ArchiveError(
            f"{CARD_NAME} in {folder} is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from error
