"""`t2n-hf inspect`: formats, bytes and errors of what a checkpoint, an export or an archive holds; it is not loaded."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import torch
import typer

from t2n_hf.cli.options import print_json
from t2n_hf.contract import Tag
from t2n_hf.errors import CheckpointNotFoundError, ConfigError, T2NError
from t2n_hf.export.report import format_bytes
from t2n_hf.hf.comparing import checkpoint_errors, dense_reasons_of, original_weights, stored_error
from t2n_hf.hf.stored import StoredForms
from t2n_hf.nnef.archive import ArchiveReader
from t2n_hf.nnef.dat import BLOCK_FORMATS, HEADER_NBYTES, decode_blocks
from t2n_hf.store.checkpoint import CheckpointIndex
from t2n_hf.store.manifest import MANIFEST_NAME, ExportManifest

__all__ = ["inspect"]

# Numbers of layers. One at the end of a word may be part of a name: parts of packed weights end in "_q4_0".
_NUMBER: Final = re.compile(r"(?<=[._])\d+(?=[._])|(?<=\.)\d+$")


@dataclass(frozen=True)
class _Entry:
    """A stored tensor; `weight` is the parameter that it is, or is a part of."""

    name: str
    format: str
    shape: tuple[int, ...]
    nbytes: int
    weight: str
    relative_error: float | None = None


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
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="MODEL",
            help="The plain weights that it was made from (a folder, or an id of the Hub): tell each weight's error.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one entry per tensor.")] = False,
) -> None:
    """Show what a checkpoint, an export or an archive holds."""
    finding = _look(path)
    if against is not None:
        finding = _compared(path, finding, against)
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
        "archive": ", ".join(manifest.archives.values()),
        "least_tract": manifest.least_tract,
        "max_context": manifest.max_context,
        "fixed_shapes": manifest.fixed_shapes or None,
        "reads": "; ".join(manifest.reads) or None,
    }
    known = {name: value for name, value in facts.items() if value is not None}
    entries = tuple(entry for archive in manifest.archives.values() for entry in _archived(path / archive))
    return _Finding(kind="export", facts=known, entries=entries, dense=_reasons(manifest.dense))


def _reasons(dense: Iterable[Any]) -> dict[str, str]:
    return {entry["name"]: entry["reason"] for entry in dense}


def _archived(path: Path) -> Iterator[_Entry]:
    reader = ArchiveReader(path)
    for name in reader.names():
        if name.endswith(".dat"):
            header = reader.header(name.removesuffix(".dat"))
            label = name.removesuffix(".dat")
            yield _Entry(label, header.format, header.shape, header.nbytes, label)


def _checkpoint(path: Path) -> _Finding:
    index = CheckpointIndex.open(path)
    config = _read_json(path / "config.json") if path.is_dir() else {}
    quantized = config.get("quantization_config", {})
    forms = StoredForms.from_json(quantized.get("tensors"))
    facts = {
        "architecture": ", ".join(config.get("architectures") or []),
        "quantization": quantized.get("quant_method"),
    }
    entries = tuple(_stored_entry(name, forms, span.dtype, span.shape, span.nbytes) for name, span in index.items())
    known = {name: value for name, value in facts.items() if value}
    return _Finding(kind="checkpoint", facts=known, entries=entries, dense=_dense(path, quantized))


def _dense(path: Path, quantized: Mapping[str, Any]) -> dict[str, str]:
    """Say why matrices of a quantized checkpoint stayed float, where this transformers knows the model."""
    try:
        return dense_reasons_of(path, quantized) if quantized else {}
    except (T2NError, AttributeError, ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError):
        return {}


def _stored_entry(key: str, forms: StoredForms, dtype: str, shape: tuple[int, ...], nbytes: int) -> _Entry:
    """Describe a stored tensor: by the format of the weight that it is a part of, or by its own dtype."""
    for place in [match.start() for match in re.finditer("_", key)]:
        form = forms.find(key[:place])
        if form is not None and key[place + 1 :] in form.parts:
            return _Entry(key, Tag.parse(form.meta.get("inner_tag", form.tag)).short, shape, nbytes, key[:place])
    return _Entry(key, dtype, shape, nbytes, key)


def _compared(path: Path, finding: _Finding, against: str) -> _Finding:
    """Add the relative errors of packed weights."""
    original = original_weights(against)
    if finding.kind == "checkpoint":
        errors = dict(checkpoint_errors(path, original))
    else:
        manifest = ExportManifest.read(path) if finding.kind == "export" else None
        archives = [path] if manifest is None else [path / archive for archive in manifest.archives.values()]
        packed = {f"{entry.name}.dat": entry for entry in finding.entries if entry.format in BLOCK_FORMATS}
        errors = {
            packed[member].name: stored_error(packed[member].name, _decoded(content, packed[member]), original)
            for reader in map(ArchiveReader, archives)
            for member, content in reader.read_each([name for name in reader.names() if name in packed])
        }
    entries = tuple(replace(entry, relative_error=errors.get(entry.weight)) for entry in finding.entries)
    return replace(finding, entries=entries)


def _decoded(content: bytes, entry: _Entry) -> torch.Tensor:
    data = np.frombuffer(content, dtype=np.uint8, offset=HEADER_NBYTES)
    return torch.from_numpy(decode_blocks(data, entry.format)).view(entry.shape)


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
        line = f"  {name:<{width}}  {len(entries):>4} x  {kind:<5} {list(shape)!s:<16} {size:>9}"
        yield line + _error_of(entries)
    yield from _totals(finding.entries)
    alike: dict[tuple[str, str], int] = {}
    for name, reason in finding.dense.items():
        key = (_NUMBER.sub("*", name), reason)
        alike[key] = alike.get(key, 0) + 1
    for (name, reason), count in alike.items():
        yield f"  dense: {name}{f' ({count})' if count > 1 else ''}: {reason}"


def _error_of(entries: list[_Entry]) -> str:
    known = [entry.relative_error for entry in entries if entry.relative_error is not None]
    if not known:
        return ""
    low, high = f"{min(known):.4f}", f"{max(known):.4f}"
    return f"  error {low}" if low == high else f"  error {low} to {high}"


def _totals(entries: tuple[_Entry, ...]) -> Iterator[str]:
    by_format: dict[str, int] = {}
    for entry in entries:
        by_format[entry.format] = by_format.get(entry.format, 0) + entry.nbytes
    parts = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in by_format.items())
    yield f"  {len(entries)} tensors, {format_bytes(sum(by_format.values()))}: {parts}"
