"""An offload state as one file: safetensors, with the tag and the meta as JSON in its metadata. Nothing is pickled."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, TypedDict

import torch

from t2n_hf.atomic import WRITE_NBYTES, staged_file
from t2n_hf.dtypes import dtype_of
from t2n_hf.errors import ConfigError, FormatError
from t2n_hf.store.checkpoint import CheckpointFile
from t2n_hf.store.header import load_json_object
from t2n_hf.store.memory import tensor_chunks

__all__ = ["StoredState", "read_state", "write_state", "write_tensors"]

_KEY: Final = "t2n_hf.offload_state"
_SCHEMA_VERSION: Final = 1
_ALIGNMENT: Final = 8


class StoredState(TypedDict):
    """What is kept: the tag of a class, plain CPU tensors by part name, and what JSON can hold."""

    tag: str
    tensors: dict[str, torch.Tensor]
    meta: dict[str, Any]


def write_state(path: str | Path, state: StoredState) -> None:
    """Write `state` to `path`; the file appears when it is complete. The same state gives the same bytes.

    Raises FormatError for parts that are no plain tensors, part names that are no identifiers, and meta that JSON
    cannot hold; StorageError on a full disk.
    """
    tag, tensors, meta = state["tag"], state["tensors"], state["meta"]
    for part in tensors:
        if not part.isidentifier():
            raise FormatError(f"state of {tag}: part name {part!r} is no identifier")
    try:
        content = {"schema_version": _SCHEMA_VERSION, "tag": tag, "meta": meta}
        text = json.dumps(content, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise FormatError(f"state of {tag}: its meta cannot be written as JSON: {error}") from error
    write_tensors(path, tensors, {_KEY: text})


def read_state(path: str | Path) -> StoredState:
    """Read a state back: tag, tensors on the CPU, meta.

    Raises FormatError for anything that `write_state` did not write, a pickle included (it is never unpickled),
    StorageError for a truncated file.
    """
    file = CheckpointFile(path)
    try:
        if _KEY not in file.metadata:
            raise FormatError(f"{path} is a safetensors file, but holds no offload state: its metadata lacks {_KEY!r}")
        content = load_json_object(file.metadata[_KEY].encode(), f"{_KEY} of {path}")
        version, tag, meta = (content.get(key) for key in ("schema_version", "tag", "meta"))
        if version != _SCHEMA_VERSION:
            raise FormatError(f"{path} has offload-state schema {version!r}; this t2n_hf reads {_SCHEMA_VERSION}")
        if not isinstance(tag, str) or not isinstance(meta, dict):
            raise FormatError(
                f"{path}: {_KEY} needs a tag (text) and a meta (object), got {tag!r:.80} and {meta!r:.80}"
            )
        return {"tag": tag, "tensors": {name: file.byte_range(name).read() for name in file.names()}, "meta": meta}
    finally:
        file.close()


def write_tensors(path: str | Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file: plain tensors by name, wide dtypes first, then by name, so that each is aligned.

    One chunk of a tensor at a time is copied, and only when it is not contiguous in CPU memory already. Raises
    FormatError for a dtype or kind of tensor that the format has not, StorageError on a full disk.
    """
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    position = 0
    for name in order:
        tensor = tensors[name]
        try:
            dtype = dtype_of(tensor.dtype).name.upper()
        except ConfigError as error:
            raise FormatError(f"{path}: {name!r} has dtype {tensor.dtype}, which is not supported") from error
        end = position + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with staged_file(path) as partial, open(partial, "wb", buffering=0) as file:
        _write_all(file, memoryview(len(text).to_bytes(8, "little") + text))
        for name in order:
            for chunk in tensor_chunks(tensors[name], name):
                _write_all(file, chunk)


def _write_all(file: BinaryIO, view: memoryview) -> None:
    while view:
        view = view[file.write(view[:WRITE_NBYTES]) :]
