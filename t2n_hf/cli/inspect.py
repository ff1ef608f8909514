"""`t2n-hf inspect`: formats and bytes of what a checkpoint, an export or an archive holds, without loading it."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from t2n_hf.cli.options import print_json
from t2n_hf.contract import Tag
from t2n_hf.errors import CheckpointNotFoundError, ConfigError
from t2n_hf.export.report import format_bytes
from t2n_hf.hf.stored import StoredForms
from t2n_hf.nnef.archive import ArchiveReader
from t2n_hf.store.checkpoint import CheckpointIndex
from t2n_hf.store.manifest import MANIFEST_NAME, ExportManifest

__all__ = ["inspect"]

# Numbers of layers. One at the end of a word may be part of a name: parts of packed weights end in "_q4_0".
_NUMBER: Final = re.compile(r"(?<=[._])\d+(?=[._])|(?<=\.)\d+$")


@dataclass(frozen=True)
class _Entry:
    name: str
    format: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class _Finding:
    """What was found at a path: `facts` to print first, the tensors, and why some are dense."""

    kind: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    entries: tuple[_Entry, ...]
    dense: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON can hold it."""
        return {
            "kind": self.kind,
            **self.facts,
            "tensors": [vars(entry) for entry in self.entries],
            "bytes": sum(entry.nbytes for entry in self.entries),
            "dense": dict(self.dense),
        }


def inspect(
    path: Annotated[Path, typer.Argument(help="A checkpoint folder, an export folder, or an archive.")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one entry per tensor.")] = False,
) -> None:
    """Show what a checkpoint, an export or an archive holds."""
    finding = _look(path)
    if as_json:
        print_json(finding.to_dict())
        return
    for line in _lines(finding):
        print(line)


def _look(path: Path) -> _Finding:
    if not path.exists():
        raise CheckpointNotFoundError(f"{path} does not exist")
    if (path / MANIFEST_NAME).is_file():
        return _export(path)
    if path.is_file() and path.suffix != ".safetensors":
        return _Finding(kind="archive", entries=tuple(_archived(path)))
    if (path / "graph.nnef").is_file():
        return _Finding(kind="archive", entries=tuple(_archived(path)))
    return _checkpoint(path)


def _export(path: Path) -> _Finding:
    manifest = ExportManifest.read(path)
    facts = {
        "model": manifest.source.get("id"),
        "task": manifest.task,
        "dtype": manifest.dtype,
        "weights": manifest.weights,
        "archive": manifest.archive,
        "least_tract": manifest.least_tract,
        "max_context": manifest.max_context,
    }
    known = {name: value for name, value in facts.items() if value is not None}
    entries = tuple(_archived(path / manifest.archive))
    return _Finding(kind="export", facts=known, entries=entries, dense=_reasons(manifest.dense))


def _reasons(dense: Iterable[Any]) -> dict[str, str]:
    return {entry["name"]: entry["reason"] for entry in dense}


def _archived(path: Path) -> Iterator[_Entry]:
    reader = ArchiveReader(path)
    for name in reader.names():
        if name.endswith(".dat"):
            header = reader.header(name.removesuffix(".dat"))
            yield _Entry(name.removesuffix(".dat"), header.format, header.shape, header.nbytes)


def _checkpoint(path: Path) -> _Finding:
    index = CheckpointIndex.open(path)
    config = _read_json(path / "config.json") if path.is_dir() else {}
    quantized = config.get("quantization_config", {})
    forms = StoredForms.from_json(quantized.get("tensors"))
    facts = {
        "architecture": ", ".join(config.get("architectures") or []),
        "quantization": quantized.get("quant_method"),
    }
    entries = tuple(
        _Entry(name, _format_of_part(name, forms) or span.dtype, span.shape, span.nbytes)
        for name, span in index.items()
    )
    return _Finding(kind="checkpoint", facts={k: v for k, v in facts.items() if v}, entries=entries)


def _format_of_part(key: str, forms: StoredForms) -> str | None:
    """Format of the parameter that the stored tensor `key` is a part of; None when it is stored plainly."""
    for place in [match.start() for match in re.finditer("_", key)]:
        form = forms.find(key[:place])
        if form is not None and key[place + 1 :] in form.parts:
            return Tag.parse(form.meta.get("inner_tag", form.tag)).short
    return None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    return found if isinstance(found, dict) else {}


def _lines(finding: _Finding) -> Iterator[str]:
    yield finding.kind
    for name, value in finding.facts.items():
        yield f"  {name:<13} {value}"
    groups: dict[tuple[str, str, tuple[int, ...]], list[_Entry]] = {}
    for entry in finding.entries:
        groups.setdefault((_NUMBER.sub("*", entry.name), entry.format, entry.shape), []).append(entry)
    width = max((len(name) for name, _, _ in groups), default=0)
    for (name, kind, shape), entries in groups.items():
        size = format_bytes(sum(entry.nbytes for entry in entries))
        yield f"  {name:<{width}}  {len(entries):>4} x  {kind:<5} {list(shape)!s:<16} {size:>9}"
    yield from _totals(finding.entries)
    for name, reason in finding.dense.items():
        yield f"  dense: {name}: {reason}"


def _totals(entries: tuple[_Entry, ...]) -> Iterator[str]:
    by_format: dict[str, int] = {}
    for entry in entries:
        by_format[entry.format] = by_format.get(entry.format, 0) + entry.nbytes
    parts = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in by_format.items())
    yield f"  {len(entries)} tensors, {format_bytes(sum(by_format.values()))}: {parts}"
