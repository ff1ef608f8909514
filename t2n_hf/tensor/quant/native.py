"""Optional native code: C files of this package, each compiled for this machine when it is first asked for, and kept.

Nothing depends on it: where there is no compiler, or what it made gives other numbers than torch, there is a reason
instead of a library, and everything is computed by torch.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Generic, TypeVar, final

import torch

__all__ = ["MOST_THREADS", "Compiled", "NativeDense", "cache_folder", "native_dense", "native_library"]

_DENSE: Final = Path(__file__).with_name("q4_0_dense.c")
_T = TypeVar("_T")
_COMPILERS: Final = ("cc", "gcc", "clang")
# Numbers must be those of torch: no product may be fused with a sum. Nobody asks whether one overflowed.
_OPTIONS: Final = ("-std=c11", "-O3", "-ffp-contract=off", "-fno-trapping-math", "-fPIC", "-shared")
_TIMEOUT_S: Final = 120
MOST_THREADS: Final = 4
"""The code runs on one thread; with more than these, torch's own operators, which use all of them, are as fast."""


class NativeDense:
    """Makes rows of a weight in the layout of torch's int4 kernel dense. The library lives as long as this."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions: dict[tuple[torch.dtype, torch.dtype], Any] = {}
        for scales, kind in ((torch.bfloat16, "pairs"), (torch.float16, "halves")):
            for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "f32")):
                function = getattr(library, f"dense_{name}_{kind}")
                function.argtypes = [*[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 5, ctypes.c_void_p]
                function.restype = None
                self._functions[scales, dtype] = function

    def takes(self, dtype: torch.dtype) -> bool:
        """Say whether it gives values of `dtype`, and faster than torch with as many threads as there are now."""
        return (torch.float16, dtype) in self._functions and torch.get_num_threads() <= MOST_THREADS

    def dense(self, packed: torch.Tensor, scales: torch.Tensor, rows: range, dtype: torch.dtype) -> torch.Tensor:
        """Give `rows` of the weight, which start at a group of rows and end anywhere: (rows, K), columns contiguous.

        `packed` is uint8 (N, K/2), `scales` bf16 (K/32, N, 2) or f16 (K/32, N), both contiguous; `rows.step` is the
        rows in a group.
        """
        count, columns = len(rows) * rows.step, packed.shape[1] * 2
        values = torch.empty(columns, count, dtype=dtype)
        sizes = (columns, packed.shape[0], rows.step // 2, rows.start, count)
        self._functions[scales.dtype, dtype](packed.data_ptr(), scales.data_ptr(), *sizes, values.data_ptr())
        return values.T[: rows.stop - rows.start]


@final
class Compiled(Generic[_T]):
    """What compiled code offers, for one process: from the start where it was compiled before, else after much work.

    `load` is asked without and with leave to compile, at most once each; None is what it gives when there is nothing.
    """

    def __init__(self, load: Callable[[bool], _T | None], patience: int) -> None:
        self._left = patience
        self._load = lru_cache(maxsize=2)(load)

    def after(self, work: int) -> _T | None:
        """Count so much more work, and give what is compiled, None when there is nothing, or nothing yet."""
        self._left -= work
        return self._load(False) or (self._load(True) if self._left < 0 else None)


def cache_folder() -> Path:
    """Where compiled code is kept: beside what torch keeps for this user."""
    return Path(torch.hub.get_dir()).parent / "t2n_hf"


def native_dense(folder: Path | None = None) -> tuple[NativeDense | None, str]:
    """Give the code that makes rows dense, and where it is, or None, and why there is none. See `native_library`."""
    library, report = native_library(_DENSE, folder)
    try:
        return None if library is None else NativeDense(library), report
    except AttributeError as error:
        return None, f"AttributeError: {error}"


def native_library(
    source: Path, folder: Path | None = None, *, may_compile: bool = True
) -> tuple[ctypes.CDLL | None, str]:
    """Load what `source` is compiled to, compiling it into `folder` (None: `cache_folder()`) unless it is there.

    Returns the library, or None, and where it is, or why there is none. Takes less than a second with a compiler, and
    next to nothing from then on.
    """
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if sys.platform == "win32" or compiler is None:
        return None, f"no C compiler ({', '.join(_COMPILERS)}) is on the PATH"
    folder = folder or cache_folder()
    try:
        name = f"{source.stem}-{_key(source, compiler)}"
        path = _kept(folder, name)
        if path is None:
            if not may_compile:
                return None, f"{name} was not compiled yet in {folder}"
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = _compile(compiler, source, folder, name)
        for trusted in (folder, path):
            if not _is_ours(trusted):
                return None, f"{trusted} belongs to, or can be written by, another user; remove it"
        return ctypes.CDLL(str(path)), str(path)
    except subprocess.CalledProcessError as error:
        return None, f"{compiler} cannot compile {source.name}: {error.stderr.strip()[-300:]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"{type(error).__name__}: {error}"


def _key(source: Path, compiler: str) -> str:
    """Tell apart what may give other machine code: the source, the options, the compiler and the processor."""
    status = os.stat(compiler)
    parts = (*_OPTIONS, os.path.realpath(compiler), status.st_size, status.st_mtime_ns, _processor())
    digest = hashlib.sha256(source.read_bytes())
    for part in parts:
        digest.update(b"\0" + str(part).encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    described = Path("/proc/cpuinfo")
    lines = described.read_text(errors="replace").splitlines() if described.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {platform.processor()} {flags}"


def _kept(folder: Path, name: str) -> Path | None:
    """Code that was compiled before, and is whole: a part of it may end the process that loads it."""
    for path in sorted(folder.glob(f"{name}-*.so")):
        if path.is_file() and path.stem == f"{name}-{_digest(path)}":
            return path
    return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _compile(compiler: str, source: Path, folder: Path, name: str) -> Path:
    """Compile to a file in `folder`, named after what is in it. Another process sees all of it or nothing."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / f"{name}.so"
        command = [compiler, *_OPTIONS, "-o", str(made), str(source)]
        # Not every compiler knows this word for every processor.
        native = _run([*command, "-march=native"], check=False)
        if native.returncode:
            _run(command, check=True)
        made.chmod(0o700)
        path = folder / f"{name}-{_digest(made)}.so"
        os.replace(made, path)
    return path


def _run(command: list[str], *, check: bool) -> subprocess.CompletedProcess[str]:
    # What a compiler says may be in any encoding.
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=check)


def _is_ours(path: Path) -> bool:
    status = path.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022
