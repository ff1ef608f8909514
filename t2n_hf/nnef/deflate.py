"""One gzip member, written and read as a stream.

tract reads only the first member of a gzip file, so everything is in one. Level 0 stores: a checksum and a copy, for
weights that hardly compress. Higher levels deflate blocks of 1 MiB on several threads. What is written depends on the
bytes alone, not on how they were cut into chunks, nor on the number of threads.
"""

import os
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO, Final

from t2n_hf.errors import ArchiveError
from t2n_hf.nnef.dat import Buffer

try:
    from isal.isal_zlib import crc32  # fifteen times as fast; its wheels are not for every processor
except ImportError:
    from zlib import crc32

__all__ = ["GzipReader", "GzipWriter"]

# Magic, deflate, no flags, no time, no extra flags, unknown system: nothing about where the file was made.
_HEADER: Final = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
_STORED_NBYTES: Final = 65535  # the longest stored block of deflate
_STORED_HEADER: Final = b"\x00\xff\xff\x00\x00"
_BLOCK_NBYTES: Final = 1 << 20
_WINDOW_NBYTES: Final = 1 << 15  # deflate looks back this far, into the block before
_READ_NBYTES: Final = 1 << 20
_RAW: Final = -15
_GZIP: Final = 31


class GzipWriter:
    """Compresses what is written to it and hands it to `write`, a function that takes a sequence of buffers.

    `level` is 0 (stored) to 9. `close()` ends the member; `cancel()` drops it. Neither closes what is
    behind `write`.
    """

    def __init__(self, write: Callable[[Sequence[Buffer]], None], level: int = 0) -> None:
        self._write = write
        self._level = level
        self._block_nbytes = _STORED_NBYTES if level == 0 else _BLOCK_NBYTES
        self._pending = bytearray()
        self._crc = 0
        self._nbytes = 0
        self._window = b""
        self._workers = min(8, os.cpu_count() or 1)
        self._executor = ThreadPoolExecutor(self._workers) if level else None
        self._futures: deque[Future[bytes]] = deque()
        write([_HEADER])

    def write(self, chunk: Buffer) -> None:
        """Add bytes. `chunk` may be reused afterwards."""
        view = memoryview(chunk).cast("B")
        self._crc = crc32(view, self._crc)
        self._nbytes += len(view)
        if self._pending:
            missing = self._block_nbytes - len(self._pending)
            self._pending += view[:missing]
            view = view[missing:]
            if len(self._pending) < self._block_nbytes:
                return
            self._add_blocks(memoryview(bytes(self._pending)))
            self._pending.clear()
        whole = len(view) - len(view) % self._block_nbytes
        self._add_blocks(view[:whole])
        self._pending += view[whole:]

    def close(self) -> None:
        """Write what is left, the end mark and the checksum."""
        if self._executor is None:
            length = len(self._pending)
            self._write([b"\x01", length.to_bytes(2, "little"), (length ^ 0xFFFF).to_bytes(2, "little"), self._pending])
        else:
            if self._pending:
                self._submit(bytes(self._pending))
            self._drain(0)
            self._write([b"\x03\x00"])  # an empty last block
            self._executor.shutdown()
        self._write([self._crc.to_bytes(4, "little"), (self._nbytes & 0xFFFFFFFF).to_bytes(4, "little")])

    def cancel(self) -> None:
        """Stop the threads and forget what was not written."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def _add_blocks(self, view: memoryview) -> None:
        step = self._block_nbytes
        blocks = [view[start : start + step] for start in range(0, len(view), step)]
        if self._executor is None:
            self._write([buffer for block in blocks for buffer in (_STORED_HEADER, block)])
            return
        for block in blocks:
            self._submit(bytes(block))

    def _submit(self, block: bytes) -> None:
        assert self._executor is not None
        self._futures.append(self._executor.submit(_deflate, block, self._window, self._level))
        self._window = block[-_WINDOW_NBYTES:]
        self._drain(2 * self._workers)

    def _drain(self, left: int) -> None:
        while len(self._futures) > left:
            self._write([self._futures.popleft().result()])


def _deflate(block: bytes, window: bytes, level: int) -> bytes:
    options = {"zdict": window} if window else {}
    compressor = zlib.compressobj(level, zlib.DEFLATED, _RAW, **options)  # type: ignore[arg-type]
    # A sync flush ends on a whole byte and leaves the stream open: such pieces can be put one after another.
    return compressor.compress(block) + compressor.flush(zlib.Z_SYNC_FLUSH)


class GzipReader:
    """Reads the single member of a gzip file forward, never more than it was asked for in memory.

    Raises ArchiveError for a damaged or truncated stream, for bytes after the first member, and for a stream that
    inflates to more than `max_nbytes` bytes: a small file can go on for hours.
    """

    def __init__(self, file: BinaryIO, what: str, max_nbytes: int | None = None) -> None:
        self._file = file
        self._what = what
        self._max_nbytes = max_nbytes
        self._nbytes = 0
        self._inflater = zlib.decompressobj(_GZIP)

    def read(self, nbytes: int) -> bytes:
        """Return `nbytes` bytes, fewer only at the end of the member."""
        parts: list[bytes] = []
        while nbytes > 0:
            part = self._some(nbytes)
            if not part:
                break
            parts.append(part)
            nbytes -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def skip(self, nbytes: int) -> None:
        """Pass over `nbytes` bytes."""
        while nbytes > 0:
            part = self._some(min(nbytes, _READ_NBYTES))
            if not part:
                raise ArchiveError(f"{self._what} is truncated: {nbytes} bytes of a member are missing")
            nbytes -= len(part)

    def finish(self) -> None:
        """Pass over the rest of the member, so that its checksum is compared, and look for bytes after it."""
        while self._some(_READ_NBYTES):
            pass
        if self._inflater.unused_data or self._file.read(1):
            raise ArchiveError(f"{self._what} has bytes after its first gzip member, which tract does not read")

    def _some(self, nbytes: int) -> bytes:
        while not self._inflater.eof:
            data = self._inflater.unconsumed_tail or self._file.read(_READ_NBYTES)
            try:
                part = self._inflater.decompress(data, nbytes)
            except zlib.error as error:
                raise ArchiveError(f"{self._what} is damaged: {error}") from error
            if part:
                self._nbytes += len(part)
                if self._max_nbytes is not None and self._nbytes > self._max_nbytes:
                    raise ArchiveError(f"{self._what} inflates to more than {self._max_nbytes} bytes; that is no model")
                return part
            if not data and not self._inflater.eof:
                raise ArchiveError(f"{self._what} is truncated: its gzip stream does not end")
        return b""
