"""`t2n_export.json`: what an export folder holds, and how to tell that it still does.

It says nothing of when, where and by whom it was written. A manifest may come from anywhere: its file names are checked
before anybody uses them.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Final, NamedTuple

from t2n_hf.atomic import staged_file
from t2n_hf.errors import ArchiveError, FormatError, StorageError
from t2n_hf.store.header import load_json_object

__all__ = [
    "CARD_NAME",
    "FREE_TEXT_PREFIXES",
    "MANIFEST_NAME",
    "ExportManifest",
    "FileEntry",
    "file_entry",
    "is_free_text",
    "list_files",
]

MANIFEST_NAME: Final = "t2n_export.json"
CARD_NAME: Final = "README.md"
FREE_TEXT_PREFIXES: Final = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
_MAX_NBYTES: Final = 16 << 20
_READ_NBYTES: Final = 1 << 20
_MAX_NAME_LENGTH: Final = 512
_MAX_REPORTED: Final = 10
_DEVICE: Final = re.compile(r"(?:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\..*)?", re.IGNORECASE)
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_TEXTS: Final = ("archive", "dtype", "weights")
_OPTIONAL_TEXTS: Final = ("task", "model_type", "architecture", "least_tract")
_KINDS: Final[Mapping[str, type]] = {
    **dict.fromkeys(("source", "versions", "files"), dict),
    **dict.fromkeys(("inputs", "outputs", "symbols", "dense", "parts", "reads"), list),
}
_VALUE_KEYS: Final = {"name", "dtype", "shape"}
_PART_KEYS: Final = {"name", "archive", "inputs", "outputs", "symbols"}
_REASON_KEYS: Final = {"name", "reason"}


class FileEntry(NamedTuple):
    """The sha256 (64 hexadecimal digits) and the size in bytes of a file."""

    sha256: str
    size: int


@dataclass(frozen=True, kw_only=True)
class ExportManifest:
    """The content of `t2n_export.json`.

    Attributes:
        archive: name of the NNEF archive in the folder: a file, or a folder whose files are all listed.
        dtype: numbers of the dense weights and of inputs and outputs, "f32" or "f16".
        weights: format of the quantized weights, such as "q4_0"; "none" when all are dense.
        source: `id` (Hub id or None) and `revision` (commit or None) of the model.
        versions: name of a package -> its version.
        least_tract: least version of tract that runs what the archive is made of, as measured with every version; None
            when the archive itself was not run. `versions` says with which version it was.
        task: such as "text-generation"; `model_type` and `architecture` as in the model's config.
        inputs: one object per input: `name`, `dtype`, `shape` (integers, or texts such as "S+P"). outputs: the same.
        symbols: names of the free dimensions.
        max_context: largest number of positions, past included; None when not bounded.
        fixed_shapes: whether it runs at the shapes of its inputs alone: it was captured at fixed lengths.
        reads: what the model asked of the values of its inputs when it was captured, and was told: the archive holds
            for inputs that answer the same.
        parts: one object per graph of a model that is several: `name`, `archive`, `inputs`, `outputs` and `symbols`, in
            the order in which they run. An input with the name of an output of an earlier part takes that output.
            Empty for a model that is one graph; of several, `archive` and what goes with it are those of the last.
        dense: one object per weight that is dense although it is, or was to be, quantized: `name`, `reason`.
        files: every file of the folder, by relative path, but this one, the card and the licence texts: those may be
            edited.

    Raises FormatError for a value of a wrong kind, and ArchiveError for a file name that is not a plain relative path.
    """

    SCHEMA_VERSION: ClassVar[int] = 1
    PARTS_VERSION: ClassVar[int] = 2  # of a manifest with parts: who reads only version 1 would run one of them alone

    archive: str
    dtype: str
    weights: str
    source: Mapping[str, str | None] = field(default_factory=lambda: {"id": None, "revision": None})
    versions: Mapping[str, str] = field(default_factory=dict)
    least_tract: str | None = None
    task: str | None = None
    model_type: str | None = None
    architecture: str | None = None
    inputs: Sequence[Mapping[str, Any]] = ()
    outputs: Sequence[Mapping[str, Any]] = ()
    symbols: Sequence[str] = ()
    max_context: int | None = None
    fixed_shapes: bool = False
    reads: Sequence[str] = ()
    dense: Sequence[Mapping[str, str]] = ()
    parts: Sequence[Mapping[str, Any]] = ()
    files: Mapping[str, FileEntry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check kinds and names."""
        for name in (*_TEXTS, *_OPTIONAL_TEXTS):
            value = getattr(self, name)
            _expect(isinstance(value, str) or (value is None and name in _OPTIONAL_TEXTS), name, "a text", value)
        _expect(self.max_context is None or _is_count(self.max_context), "max_context", "a count", self.max_context)
        for name in ("source", "versions"):
            values = getattr(self, name)
            _expect(all(value is None or isinstance(value, str) for value in values.values()), name, "texts", values)
        for name, keys in (
            ("inputs", _VALUE_KEYS),
            ("outputs", _VALUE_KEYS),
            ("dense", _REASON_KEYS),
            ("parts", _PART_KEYS),
        ):
            for item in getattr(self, name):
                _expect(
                    isinstance(item, Mapping) and keys <= item.keys(), name, f"{', '.join(sorted(keys))} of each", item
                )
        _expect(isinstance(self.fixed_shapes, bool), "fixed_shapes", "true or false", self.fixed_shapes)
        for name in ("symbols", "reads"):
            texts = getattr(self, name)
            _expect(all(isinstance(text, str) for text in texts), name, "texts", texts)
        _check_names(list(self.files))
        for archive in self.archives.values():
            _expect(isinstance(archive, str), "archive", "a text", archive)
            _check_name(archive)
            if self.files and not any(name == archive or name.startswith(f"{archive}/") for name in self.files):
                raise FormatError(f"{MANIFEST_NAME} lists no file of its archive {archive!r}; export again")
        repeated = len(self.archives) != max(1, len(self.parts)) or self.archive not in self.archives.values()
        _expect(not repeated, "parts", "parts of different names, one of them with the main archive", self.archives)

    @property
    def archives(self) -> dict[str, str]:
        """Name of each part -> its archive; a model that is one graph has the part "model"."""
        return {str(part["name"]): part["archive"] for part in self.parts} or {"model": self.archive}

    @property
    def source_id(self) -> str | None:
        """Hub id of the model, if it has one."""
        return self.source.get("id")

    @classmethod
    def from_json(cls, content: bytes) -> "ExportManifest":
        """Parse the file. Raises FormatError (ArchiveError for a hostile file name)."""
        if len(content) > _MAX_NBYTES:
            raise FormatError(f"{MANIFEST_NAME} has {len(content)} bytes; the limit is {_MAX_NBYTES}")
        content_object = load_json_object(content, MANIFEST_NAME)
        version = content_object.get("schema_version")
        if version not in (cls.SCHEMA_VERSION, cls.PARTS_VERSION):
            raise FormatError(
                f"{MANIFEST_NAME} has schema version {version!r}; this t2n_hf reads up to {cls.PARTS_VERSION}: "
                "use the t2n_hf that made it, or a newer one"
            )
        known = {item.name: content_object[item.name] for item in fields(cls) if item.name in content_object}
        missing = [name for name in (*_TEXTS, "files") if name not in known]
        if missing:
            raise FormatError(f"{MANIFEST_NAME} lacks {', '.join(missing)}")
        for name, kind in _KINDS.items():
            value = known.get(name, kind())
            _expect(isinstance(value, kind), name, "an object" if kind is dict else "a list", value)
        return cls(**{**known, "files": {name: _entry(name, entry) for name, entry in known["files"].items()}})

    def to_json(self) -> bytes:
        """Return the content of the file: the same manifest gives the same bytes."""
        value = {item.name: getattr(self, item.name) for item in fields(self)}
        value["files"] = {name: {"sha256": entry.sha256, "size": entry.size} for name, entry in self.files.items()}
        version = self.PARTS_VERSION if self.parts else self.SCHEMA_VERSION
        value |= {"schema_version": version, "source": dict(self.source), "versions": dict(self.versions)}
        value |= {name: list(value[name]) for name in ("inputs", "outputs", "symbols", "dense", "reads")}
        value["parts"] = [dict(part) for part in self.parts]
        if not self.parts:
            del value["parts"]
        return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()

    @classmethod
    def read(cls, folder: str | Path) -> "ExportManifest":
        """Read it from an export folder. Raises StorageError when there is none, FormatError as `from_json`."""
        path = Path(folder) / MANIFEST_NAME
        try:
            with open(path, "rb") as file:
                return cls.from_json(file.read(_MAX_NBYTES + 1))
        except OSError as error:
            raise StorageError(
                f"{folder} is not an export: {MANIFEST_NAME} cannot be read ({error.strerror}); export_nnef makes one"
            ) from error

    def write(self, folder: str | Path) -> None:
        """Write it into an export folder, replacing an older one when complete."""
        with staged_file(Path(folder) / MANIFEST_NAME) as path:
            path.write_bytes(self.to_json())

    def verify(self, folder: str | Path) -> None:
        """Read every listed file. Raises ArchiveError naming those that are missing, changed, or too many.

        Too many are files in the folder of an archive that the manifest does not list: tract would load them.
        """
        folder = Path(folder)
        problems = [f"{name}: {problem}" for name, problem in self._problems(folder)]
        if problems:
            more = f"\n  and {len(problems) - _MAX_REPORTED} more" if len(problems) > _MAX_REPORTED else ""
            texts = "".join(f"\n  {problem}" for problem in problems[:_MAX_REPORTED])
            raise ArchiveError(
                f"{folder} is not what its {MANIFEST_NAME} says:{texts}{more}\nExport it or fetch it again"
            )

    def _problems(self, folder: Path) -> Iterator[tuple[str, str]]:
        for name, entry in sorted(self.files.items()):
            try:
                size = (folder / name).stat().st_size
                if size != entry.size:
                    yield name, f"{size} bytes, expected {entry.size}"
                elif file_entry(folder / name) != entry:
                    yield name, "its sha256 is another one"
            except OSError as error:
                yield name, f"missing or not readable ({error.strerror})"
        for archive in (folder / name for name in self.archives.values()):
            if archive.is_dir():
                for name in sorted(_names_below(archive, folder) - self.files.keys()):
                    yield name, "not listed"


def file_entry(path: Path) -> FileEntry:
    """Hash a file. Raises OSError."""
    digest, size = hashlib.sha256(), 0
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_READ_NBYTES):
            digest.update(piece)
            size += len(piece)
    return FileEntry(digest.hexdigest(), size)


def is_free_text(name: str) -> bool:
    """Whether `name` is the card or a licence text: files at the root that a manifest does not list."""
    return "/" not in name and (name == CARD_NAME or name.upper().startswith(FREE_TEXT_PREFIXES))


def list_files(folder: Path, known: Mapping[str, tuple[str, int]] | None = None) -> dict[str, FileEntry]:
    """Return the `files` of the manifest of a folder, hashing those that are not `known` as (sha256, size)."""
    known = known or {}
    names = sorted(name for name in _names_below(folder, folder) if name != MANIFEST_NAME and not is_free_text(name))
    return {name: FileEntry(*known[name]) if name in known else file_entry(folder / name) for name in names}


def _names_below(folder: Path, root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}


def _expect(condition: bool, key: str, expected: str, got: object) -> None:
    if not condition:
        raise FormatError(f"{MANIFEST_NAME}: {key} is {str(got)[:80]!r}; expected {expected}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _entry(name: str, entry: object) -> FileEntry:
    sha256, size = (entry.get("sha256"), entry.get("size")) if isinstance(entry, Mapping) else (None, None)
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256) or not _is_count(size):
        raise FormatError(
            f"{MANIFEST_NAME}: the entry of {name!r} is {str(entry)[:80]!r}; expected a sha256 and a size"
        )
    return FileEntry(sha256, size)  # type: ignore[arg-type]


def _check_names(names: list[str]) -> None:
    """Raise ArchiveError for a name that could mean another place, or two places, on some system."""
    seen: dict[str, str] = {}
    for name in names:
        _check_name(name)
        twin = seen.setdefault(name.casefold(), name)
        if twin != name:
            raise ArchiveError(f"{MANIFEST_NAME} lists {name!r} and {twin!r}, which are one name on some systems")
    for folded, name in seen.items():
        for parent in PurePosixPath(folded).parents:
            if str(parent) in seen:
                raise ArchiveError(f"{MANIFEST_NAME} lists {name!r}, and {seen[str(parent)]!r} as a file")


def _check_name(name: str) -> None:
    problem = _name_problem(name)
    if problem is not None:
        raise ArchiveError(f"{MANIFEST_NAME} names the file {name!r}, which is refused: {problem}")


def _name_problem(name: str) -> str | None:
    if not name or len(name) > _MAX_NAME_LENGTH:
        return f"a name has 1 to {_MAX_NAME_LENGTH} characters"
    if not name.isprintable() or any(character in name for character in '\\:*?"<>|'):
        return "it holds a character that not every system has in names"
    parts = name.split("/")
    if any(part == "" or part.startswith(".") or part.endswith((".", " ")) for part in parts):
        return "a part of it is empty, starts with a dot, or ends with a dot or a space"
    if any(_DEVICE.fullmatch(part) for part in parts):
        return "a part of it is the name of a device on Windows"
    if name in (CARD_NAME, MANIFEST_NAME):
        return "this file is not listed"
    return None
