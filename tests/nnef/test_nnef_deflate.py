"""One gzip member as a stream, with Python's own gzip module as independent truth."""

import gzip
import io
import random

import pytest

from t2n_hf.errors import ArchiveError
from t2n_hf.nnef.deflate import GzipReader, GzipWriter

LEVELS = [0, 1, 6]


def _packed(chunks: list[bytes], level: int) -> bytes:
    out: list[bytes] = []
    writer = GzipWriter(lambda buffers: out.extend(bytes(buffer) for buffer in buffers), level)
    for chunk in chunks:
        reused = bytearray(chunk)
        writer.write(reused)
        reused[:] = b"\xee" * len(reused)  # the producer may use its memory again
    writer.close()
    return b"".join(out)


def _content(nbytes: int) -> bytes:
    generator = random.Random(nbytes)
    words = [generator.randbytes(generator.randrange(1, 40)) for _ in range(50)]
    content = b"".join(generator.choices(words, k=nbytes // 10 + 1))
    return content[:nbytes]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("nbytes", [0, 1, 65534, 65535, 65536, 3 * 65535, (1 << 20) - 1, 1 << 20, 5_000_001])
def test_gzip_reads_what_was_written(nbytes: int, level: int):
    content = _content(nbytes)
    packed = _packed([content], level)
    assert gzip.decompress(packed) == content
    assert len(packed) <= nbytes * (1 if level and nbytes > 1000 else 1.001) + 40


@pytest.mark.parametrize("level", LEVELS)
def test_bytes_do_not_depend_on_how_they_were_cut(level: int):
    content = _content(3_000_000)
    whole = _packed([content], level)
    generator = random.Random(0)
    cuts = sorted(generator.randrange(len(content)) for _ in range(40))
    pieces = [content[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True)]
    assert _packed(pieces, level) == whole
    assert _packed([content[i : i + 1000] for i in range(0, len(content), 1000)], level) == whole


@pytest.mark.parametrize("level", LEVELS)
def test_there_is_one_member_that_says_nothing_of_its_origin(level: int):
    packed = _packed([_content(3_000_000)], level)
    assert packed[:10] == bytes([0x1F, 0x8B, 8, 0, 0, 0, 0, 0, 0, 0xFF])
    reader = GzipReader(io.BytesIO(packed), "it")
    reader.finish()


@pytest.mark.parametrize("level", LEVELS)
def test_reading_and_skipping_gives_the_bytes_asked_for(level: int):
    content = _content(3_000_000)
    reader = GzipReader(io.BytesIO(gzip.compress(content, level, mtime=0)), "it")
    assert reader.read(10) == content[:10]
    reader.skip(2_000_000)
    assert reader.read(500_000) == content[2_000_010:2_500_010]
    assert reader.read(1 << 30) == content[2_500_010:]
    reader.finish()


def test_a_second_member_is_refused():
    reader = GzipReader(io.BytesIO(gzip.compress(b"one") + gzip.compress(b"two")), "it")
    with pytest.raises(ArchiveError, match="after its first gzip member"):
        reader.finish()


@pytest.mark.parametrize("cut", [1, 5, 9, 2000], ids=str)
def test_a_truncated_stream_is_refused(cut: int):
    reader = GzipReader(io.BytesIO(gzip.compress(_content(100_000))[:-cut]), "it")
    with pytest.raises(ArchiveError, match="truncated"):
        reader.finish()


def test_a_wrong_checksum_is_refused():
    packed = bytearray(gzip.compress(_content(100_000)))
    packed[-8] ^= 1
    with pytest.raises(ArchiveError, match="damaged"):
        GzipReader(io.BytesIO(bytes(packed)), "it").finish()
