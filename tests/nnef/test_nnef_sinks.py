"""Files written behind the caller hold what was written, in its order, whatever happens to the caller's memory."""

import contextlib
import errno
import hashlib
import os
from pathlib import Path

import pytest

from t2n_hf.nnef import sinks
from t2n_hf.nnef.sinks import HashedFile, write_behind

MIB = 1 << 20


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "past the cache"])
@pytest.mark.parametrize("sizes", [[0], [1], [5, 65535] * 100, [2 * MIB], [2 * MIB - 1, 2, 3 * MIB + 7], [19 * MIB]])
def test_a_file_holds_what_was_written_though_the_memory_was_used_again(tmp_path: Path, sizes: list[int], cached: bool):
    content = os.urandom(sum(sizes))
    with write_behind(cached=cached) as behind, contextlib.closing(HashedFile(tmp_path / "file", behind)) as file:
        start = 0
        for size in sizes:
            chunk = bytearray(content[start : start + size])
            file.write([chunk[: size // 2], chunk[size // 2 :]])
            chunk[:] = bytes(size)
            start += size
        assert file.finish() == (hashlib.sha256(content).hexdigest(), len(content))
    assert (tmp_path / "file").read_bytes() == content


def test_one_file_after_another_goes_through_the_same_buffers(tmp_path: Path):
    contents = [os.urandom(3 * MIB), b"", os.urandom(10)]
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
            file.write([bytes(20 * MIB)])
        with pytest.raises(OSError, match="No space left"):
            file.finish()


def test_what_is_not_read_soon_goes_past_the_cache_but_for_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    turned = []
    set_direct = sinks._set_direct
    monkeypatch.setattr(sinks, "_set_direct", lambda fd, on: turned.append((on, done := set_direct(fd, on))) or done)
    content = os.urandom(4 * MIB + 10)
    with write_behind(cached=False) as behind, contextlib.closing(HashedFile(tmp_path / "file", behind)) as file:
        if not file._direct:
            pytest.skip("this file system, or system, writes to its cache only")
        file.write([content])
        assert file.finish() == (hashlib.sha256(content).hexdigest(), len(content))
    assert turned == [(True, True), (False, True)]
    assert (tmp_path / "file").read_bytes() == content


def test_a_disk_of_larger_blocks_is_written_through_the_cache(tmp_path: Path):
    class Refuses:
        def __init__(self, file):
            self.file, self.refused = file, 0

        def write(self, view):
            if len(view) > sinks.WRITE_NBYTES:
                self.refused += 1
                raise OSError(errno.EINVAL, "Invalid argument")
            return self.file.write(view)

        def __getattr__(self, name):
            return getattr(self.file, name)

    content = os.urandom(5 * MIB)
    with write_behind(cached=False) as behind, contextlib.closing(HashedFile(tmp_path / "file", behind)) as file:
        file._file, file._direct = Refuses(file._file), True
        file.write([content])
        assert file.finish() == (hashlib.sha256(content).hexdigest(), len(content))
        assert file._file.refused == 1
    assert (tmp_path / "file").read_bytes() == content


def test_a_file_that_is_written_is_brought_to_the_disk_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced = []
    monkeypatch.setattr(sinks, "sync_to_disk", lambda fd: synced.append(os.fstat(fd).st_size))
    monkeypatch.setattr(sinks, "_SYNC_NBYTES", 4 * MIB)
    with write_behind() as behind, contextlib.closing(HashedFile(tmp_path / "file", behind)) as file:
        file.write([bytes(21 * MIB)])
        file.finish()
    assert 1 <= len(synced) <= 5
    assert synced == sorted(synced)


def test_a_disk_that_fails_while_a_file_is_brought_to_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def failing(fd):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sinks, "sync_to_disk", failing)
    monkeypatch.setattr(sinks, "_SYNC_NBYTES", MIB)
    with write_behind() as behind, contextlib.closing(HashedFile(tmp_path / "file", behind)) as file:
        file.write([bytes(3 * MIB)])
        with pytest.raises(OSError, match="Input/output"):
            file.finish()
