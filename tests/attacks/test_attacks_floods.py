"""Small archives that would cost gigabytes of memory or hours of time, or say one thing to us and another to tract."""

import gzip
import tarfile
import zlib
from pathlib import Path

import pytest

from t2n_hf.errors import ArchiveError
from t2n_hf.nnef.archive import ArchiveReader


def header(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


def test_a_stream_that_goes_on_after_the_last_member_is_not_inflated_to_its_end(tmp_path: Path):
    squeeze = zlib.compressobj(9, zlib.DEFLATED, 31)
    with open(tmp_path / "m", "wb") as file:
        file.write(squeeze.compress(header("graph.nnef") + bytes(1024)))
        for _ in range(300):
            file.write(squeeze.compress(bytes(1 << 20)))
        file.write(squeeze.flush())
    assert (tmp_path / "m").stat().st_size < 1 << 20
    with pytest.raises(ArchiveError, match="inflates to more than"):
        ArchiveReader(tmp_path / "m").names()


def test_a_flood_of_empty_members_is_not_taken_into_memory(tmp_path: Path):
    first = bytearray(header("000000.dat"))
    checksum = int(first[148:154], 8)
    with gzip.open(tmp_path / "m", "wb", 1) as file:
        for number in range(100_001):
            name = b"%06d" % number
            first[:6] = name
            first[148:154] = b"%06o" % (checksum + sum(name) - 6 * ord("0"))
            file.write(first)
        file.write(bytes(1024))
    with pytest.raises(ArchiveError, match=r"more than \d+ members"):
        ArchiveReader(tmp_path / "m", max_nbytes=1 << 40).names()


def test_a_name_for_all_members_is_refused_because_tract_would_not_use_it(tmp_path: Path):
    record = b"%d path=other.txt\n" % 18
    content = header("pax", len(record), tarfile.XGLTYPE) + record + bytes(-len(record) % 512)
    (tmp_path / "m").write_bytes(content + header("graph.nnef") + bytes(1024))
    with pytest.raises(ArchiveError, match="for all members"):
        ArchiveReader(tmp_path / "m").names()
