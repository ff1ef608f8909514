"""Good files with random damage: read, or refused with an error of ours; never another exception, never a leftover."""

import contextlib
import gzip
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from t2n_hf.errors import T2NError
from t2n_hf.nnef.archive import ArchiveReader, ArchiveWriter
from t2n_hf.nnef.dat import DatHeader, array_payload
from t2n_hf.store.manifest import ExportManifest
from t2n_hf.store.state import read_state, write_state

ROUNDS = 150
INSERTS = [b"\0", b"9", b"-", b"/", b"..", b'"', b"{", b"xxxxx", b"\xff"]


def damage(content: bytes, generator: random.Random) -> bytes:
    data = bytearray(content)
    for _ in range(generator.choice([1, 1, 2, 5, 30])):
        place, other = generator.randrange(len(data) + 1), generator.randrange(len(data) + 1)
        kind = generator.randrange(4)
        if kind == 0:
            data[place : place + 1] = bytes([generator.randrange(256)])
        elif kind == 1:
            del data[place : place + generator.randrange(1, 20)]
        elif kind == 2:
            data[place:place] = generator.choice(INSERTS)
        else:
            data[place : place + 8] = data[other : other + 8]
    return bytes(data)


def extract(path: Path) -> None:
    reader = ArchiveReader(path)
    reader.extract(path.parent / "out" / str(len(os.listdir(path.parent / "out"))))
    reader.text()
    for label in reader.labels():
        reader.header(label)


def good_tar(folder: Path) -> bytes:
    with ArchiveWriter(folder / "good", "tar") as writer:
        writer.add_text("graph.nnef", "version 1.0;\n")
        writer.add_dat("a" * 120, array_payload(np.ones((3, 4), np.float32)))
        writer.add_dat("b/c", array_payload(np.ones(3)))
    return (folder / "good").read_bytes()


def good_state(folder: Path) -> bytes:
    tensors = {"q": torch.ones(5, dtype=torch.uint8), "d": torch.ones(3).half()}
    write_state(folder / "good", {"tag": "a.b.v1", "tensors": tensors, "meta": {"a": 1}})
    return (folder / "good").read_bytes()


def good_manifest(folder: Path) -> bytes:
    return ExportManifest(archive="m.tgz", dtype="f32", weights="none").to_json()


def good_header(folder: Path) -> bytes:
    return array_payload(np.ones((3, 4), np.float32)).header.pack()


Case = tuple[Callable[[Path], bytes], Callable[[Path], object]]
CASES: dict[str, Case] = {
    "tar": (good_tar, extract),
    "stored tgz": (lambda folder: gzip.compress(good_tar(folder), 0), extract),
    "tgz": (lambda folder: gzip.compress(good_tar(folder)), extract),
    "state": (good_state, read_state),
    "manifest": (good_manifest, lambda path: ExportManifest.from_json(path.read_bytes())),
    "dat header": (good_header, lambda path: DatHeader.unpack(path.read_bytes())),
}


@pytest.mark.parametrize("case", CASES)
def test_a_damaged_file_is_read_or_refused(tmp_path: Path, case: str):
    make, read = CASES[case]
    good, generator = make(tmp_path), random.Random(case)
    (tmp_path / "out").mkdir()
    for _ in range(ROUNDS):
        (tmp_path / "damaged").write_bytes(damage(good, generator))
        with contextlib.suppress(T2NError):
            read(tmp_path / "damaged")
    assert set(os.listdir(tmp_path)) <= {"good", "damaged", "out"}
    assert not [name for name in os.listdir(tmp_path / "out") if name.startswith(".")]
