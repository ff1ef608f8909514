"""Memory of this process as the kernel counts it, its high-water mark, and the page cache of files that it reads."""

import os
import stat
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

PERIOD_S = 0.02


def resident() -> dict[str, int]:
    """Bytes in memory now: anonymous, mapped from files (shared memory is in none of both), and the peak of the sum."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in {"RssAnon", "RssFile", "VmHWM", "VmRSS"}:
            found[name] = int(rest.split()[0]) * 1024
    return {"rss": found["VmRSS"], "anon": found["RssAnon"], "file": found["RssFile"], "peak": found["VmHWM"]}


def reset_peak() -> None:
    """Let the high-water mark start again at what is in memory now."""
    Path("/proc/self/clear_refs").write_text("5")


def bytes_read() -> tuple[int, int]:
    """Bytes that this process asked files for by now, and of those what came from the disk itself."""
    found = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(found["rchar"]), int(found["read_bytes"])


def drop_page_cache(folders: Iterable[str]) -> None:
    """Have the kernel forget the pages of all files in the folders and of those that this process holds open.

    Pages that are mapped into a process stay.
    """
    for path in (path for folder in folders for path in Path(folder).rglob("*") if path.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        _forget(descriptor)
        os.close(descriptor)
    for number in Path("/proc/self/fd").iterdir():
        try:
            if stat.S_ISREG(number.stat().st_mode):
                _forget(int(number.name))
        except OSError:
            continue  # closed meanwhile, such as the one that lists this folder


def _forget(descriptor: int) -> None:
    os.fsync(descriptor)  # pages that are not written yet would stay
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


class Trace:
    """Samples memory, and a counter, in a thread until it is stopped."""

    def __init__(self, counter: Callable[[], int]) -> None:
        self.samples: list[dict[str, float]] = []
        self._counter = counter
        self._start = time.perf_counter()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_S):
            now = resident()
            at = time.perf_counter() - self._start
            self.samples.append({"t": round(at, 3), "anon": now["anon"], "file": now["file"], "pool": self._counter()})

    def stop(self) -> list[dict[str, float]]:
        self._stop.set()
        self._thread.join()
        return self.samples
