"""Files written behind the caller hold what was written, in its order, whatever happens to the caller's memory."""

import contextlib
import hashlib
import os
from pathlib import Path

import pytest

from t2n_hf.nnef.sinks import HashedFile, write_behind

MIB = 1 << 20


@pytest.mark.parametrize("sizes", [[0], [1], [5, 65535] * 100, [2 * MIB], [4 * MIB - 1, 2, 3 * MIB + 7], [19 * MIB]])
def test_a_file_holds_what_was_written_though_the_memory_was_used_again(tmp_path: Path, sizes: list[int]):
    content = os.urandom(sum(sizes))
    with write_behind() as behind, contextlib.closing(HashedFile(tmp_path / "file", behind)) as file:
        start = 0
        for size in sizes:
            chunk = bytearray(content[start : start + size])
            file.write([chunk[: size // 2], chunk[size // 2 :]])
            chunk[:] = bytes(size)
            start += size
        assert file.finish() == (hashlib.sha256(content).hexdigest(), len(content))
    assert (tmp_path / "file").read_bytes() == content


def test_one_file_after_another_goes_through_the_same_buffers(tmp_path: Path):
    contents = [os.urandom(5 * MIB), b"", os.urandom(10)]
    with write_behind() as behind:
        for number, content in enumerate(contents):
            with contextlib.closing(HashedFile(tmp_path / str(number), behind)) as file:
                file.write([content])
                assert file.finish() == (hashlib.sha256(content).hexdigest(), len(content))
    assert [(tmp_path / str(number)).read_bytes() for number in range(3)] == contents


def test_what_goes_wrong_behind_is_raised_and_closing_is_still_possible():
    # /dev/full takes nothing: ENOSPC at every write.
    with write_behind() as behind, contextlib.closing(HashedFile(Path("/dev/full"), behind)) as file:
        file.write([bytes(2 * MIB)])
        with pytest.raises(OSError, match="No space left"):
            file.write([bytes(8 * MIB)])
        with pytest.raises(OSError, match="No space left"):
            file.finish()
