"""The checksum by compiled code: zlib's for any bytes, and zlib itself where there is no such code."""

import shutil
import zlib

import numpy as np
import pytest

from t2n_hf.export import checksum
from t2n_hf.export.checksum import native_crc32, quick_crc32
from t2n_hf.nnef.archive import ArchiveReader, ArchiveWriter
from t2n_hf.tensor.quant.native import Compiled

BYTES = np.random.default_rng(1).bytes(300_007)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no C compiler on this machine")
    found, report = native_crc32(tmp_path_factory.mktemp("compiled"))
    if "products without carries" in report:
        pytest.skip(report)
    assert found is not None, report
    return found


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 127, 128, 1000, 65535, 300_000])
@pytest.mark.parametrize("start", [0, 1, 7])
def test_it_is_that_of_zlib_wherever_the_bytes_begin_and_end(compiled, nbytes, start):
    part = memoryview(BYTES)[start : start + nbytes]
    for value in (0, 1, 0x12345678, 0xFFFFFFFF):
        assert compiled(part, value) == zlib.crc32(part, value)
    assert compiled(bytearray(part)) == zlib.crc32(part)


def test_bytes_that_come_in_pieces_have_the_checksum_of_all(compiled):
    value = 0
    for start in range(0, len(BYTES), 70_000):
        value = compiled(BYTES[start : start + 70_000], value)
    assert value == zlib.crc32(BYTES)


def test_an_archive_has_the_same_bytes_by_either(compiled, tmp_path):
    for name, crc32 in (("ours.tgz", compiled), ("zlib.tgz", zlib.crc32)):
        with ArchiveWriter(tmp_path / name, crc32=lambda data, value, by=crc32: by(data, value)) as archive:
            archive.add("weights", len(BYTES), [BYTES[:100_000], BYTES[100_000:]])
    assert (tmp_path / "ours.tgz").read_bytes() == (tmp_path / "zlib.tgz").read_bytes()
    assert ArchiveReader(tmp_path / "ours.tgz").read("weights") == BYTES


def test_a_process_that_writes_little_compiles_nothing(monkeypatch):
    asked = []
    monkeypatch.setattr(checksum, "_COMPILED", Compiled(lambda may_compile: asked.append(may_compile), 400_000))
    for _ in range(2):
        assert quick_crc32(BYTES[:1000]) == zlib.crc32(BYTES[:1000])
        assert asked == []
    assert quick_crc32(BYTES) == zlib.crc32(BYTES)
    assert asked == [False]
    for _ in range(2):
        assert quick_crc32(BYTES, 5) == zlib.crc32(BYTES, 5)
        assert asked == [False, True]


def test_code_that_gives_another_checksum_is_not_used(compiled, tmp_path, monkeypatch):
    wrong = tmp_path / "crc32.c"
    wrong.write_text(checksum.SOURCE.read_text().replace("0x0163cd6124", "0x0163cd6125"))
    monkeypatch.setattr(checksum, "SOURCE", wrong)
    found, reason = native_crc32(tmp_path / "code")
    assert (found, reason) == (None, "the compiled code gives another checksum than zlib for 64 bytes")
