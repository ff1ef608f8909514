"""The export folder: archives, configuration, tokenizer, licence, card and manifest."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from torch import nn

from t2n_hf.errors import CheckpointNotFoundError
from t2n_hf.export.config import ExportConfig
from t2n_hf.export.graph import TensorShape
from t2n_hf.export.origin import Origin
from t2n_hf.export.parts import Part
from t2n_hf.export.side_files import copy_companions, save_tokenizer, write_config
from t2n_hf.export.weights import PlannedWeight
from t2n_hf.hub.card import build_card, read_card_metadata
from t2n_hf.nnef.archive import GRAPH_FILE, ArchiveWriter
from t2n_hf.nnef.dat import BLOCK_FORMATS, Payload
from t2n_hf.nnef.sinks import WrittenFile
from t2n_hf.store.manifest import CARD_NAME, ExportManifest, FileEntry, list_files

__all__ = ["write_archives", "write_card", "write_manifest", "write_side_files"]

_PACKAGES: Final = ("t2n-hf", "torch", "transformers", "tract")


def write_archives(
    staging: Path,
    config: ExportConfig,
    parts: Sequence[Part],
    on_progress: Callable[[int, int], None] | None,
) -> dict[str, WrittenFile]:
    """Write the archive of each part into `staging`; returns what each file is.

    One weight is in memory at a time, or two when the next one is quantized meanwhile.

    `on_progress(done, total)` is told bytes.
    """
    total, done = sum(part.weight_bytes for part in parts), 0
    files: dict[str, WrittenFile] = {}
    for part in parts:
        with (
            tempfile.TemporaryDirectory(dir=staging) as scratch,
            ArchiveWriter(
                staging / part.archive,
                config.format,  # type: ignore[arg-type]
                level=config.compression_level,
            ) as archive,
        ):
            archive.add_text(GRAPH_FILE, part.graph.text)
            for weight, payload in _opened(part.graph.weights, Path(scratch)):
                archive.add_dat(weight.label, payload)
                done += weight.nbytes
                if on_progress is not None:
                    on_progress(done, total)
        files |= archive.files
    return files


def _opened(weights: Sequence[PlannedWeight], scratch: Path) -> Iterator[tuple[PlannedWeight, Payload]]:
    """Give each weight with its payload, opening what may be opened early while the one before is written."""
    with ThreadPoolExecutor(1) as executor:
        opening: Future[Payload] | None = None
        for place, weight in enumerate(weights):
            payload = weight.open(scratch) if opening is None else opening.result()
            early = [following for following in weights[place + 1 : place + 2] if following.early]
            opening = executor.submit(early[0].open, scratch) if early else None
            yield weight, payload


def write_side_files(staging: Path, model: nn.Module, origin: Origin, tokenizer: Any) -> None:  # noqa: ANN401
    """Write what a user of the archive needs beside it.

    `tokenizer` is an object that saves itself, a folder that holds its files, or None: then they come from `origin`.
    Raises CheckpointNotFoundError for a folder that does not exist.
    """
    for attribute, name in (("config", "config.json"), ("generation_config", "generation_config.json")):
        found = getattr(model, attribute, None)
        if hasattr(found, "to_dict"):
            write_config(found, staging, name)
    if isinstance(tokenizer, (str, Path)):
        if not Path(tokenizer).is_dir():
            raise CheckpointNotFoundError(
                f"tokenizer={str(tokenizer)!r} is no folder; give a folder or a tokenizer object"
            )
        copy_companions(Path(tokenizer), staging, tokenizer=True)
    elif tokenizer is not None:
        save_tokenizer(tokenizer, staging, staging / "tokenizer-in-progress")
    if origin.folder is not None:
        copy_companions(origin.folder, staging, tokenizer=tokenizer is None)


def write_card(staging: Path, manifest: ExportManifest, origin: Origin) -> None:
    """Write README.md, with the licence and languages of the source's own card."""
    source = origin.folder / CARD_NAME if origin.folder is not None else None
    # Somebody else's text, of which a few short values are taken: its encoding is no reason to fail.
    text = source.read_text(encoding="utf-8", errors="replace") if source is not None and source.is_file() else ""
    metadata = read_card_metadata(text)
    (staging / CARD_NAME).write_text(build_card(manifest, metadata), encoding="utf-8")


def write_manifest(
    staging: Path,
    config: ExportConfig,
    task: str,
    parts: Sequence[Part],
    origin: Origin,
    *,
    least_tract: str | None,
    archive_files: Mapping[str, WrittenFile],
) -> ExportManifest:
    """Write t2n_export.json over the files of `staging`, which are all there but the card."""
    main = parts[-1]
    owner = main.interface.weight_owner
    assert config.dtype is not None
    dense = {name: reason for part in parts for name, reason in part.graph.dense.items()}
    manifest = ExportManifest(
        archive=main.archive,
        dtype=config.dtype,
        weights=_main_format(parts),
        source={"id": origin.hub_id, "revision": origin.revision},
        versions=_versions(),
        least_tract=least_tract,
        task=task or None,
        model_type=getattr(getattr(owner, "config", None), "model_type", None),
        architecture=type(owner).__name__,
        **_signature(main),
        max_context=main.interface.extra.get("max_context"),
        fixed_shapes=any(part.graph.fixed_shapes for part in parts),
        reads=list(dict.fromkeys(read for part in parts for read in part.graph.reads)),
        dense=[{"name": name, "reason": reason} for name, reason in dense.items()],
        parts=[{"name": part.name, "archive": part.archive, **_signature(part)} for part in parts if len(parts) > 1],
        files=list_files(staging, {name: FileEntry(*written) for name, written in archive_files.items()}),
    )
    manifest.write(staging)
    return manifest


def _signature(part: Part) -> dict[str, Any]:
    return {
        "inputs": [_described(value) for value in part.graph.inputs],
        "outputs": [_described(value) for value in part.graph.outputs],
        "symbols": list(part.graph.symbols),
    }


def _main_format(parts: Sequence[Part]) -> str:
    """The block format that holds most bytes, or "none"."""
    blocks: dict[str, int] = {}
    for weight in (weight for part in parts for weight in part.graph.weights):
        if weight.format in BLOCK_FORMATS:
            blocks[weight.format] = blocks.get(weight.format, 0) + weight.nbytes
    return max(blocks, key=lambda name: blocks[name], default="none")


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _described(value: TensorShape) -> dict[str, Any]:
    return {"name": value.name, "dtype": value.dtype, "shape": list(value.shape)}
