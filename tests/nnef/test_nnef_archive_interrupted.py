"""A full disk and a killed process: nothing at the final name but a complete archive."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from light_process import light_command

from t2n_hf.nnef.archive import ArchiveReader, ArchiveWriter

_IMPORTS = """
import random, resource, signal, sys
from t2n_hf.errors import StorageError
from t2n_hf.nnef.archive import ArchiveWriter
from t2n_hf.nnef.dat import dense_payload
BLOCK = random.Random(0).randbytes(1 << 16)
"""

# A limit on the size of files stands in for a full disk: it needs no mount, and fails in the middle of a write as well.
_FULL = """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    with ArchiveWriter(sys.argv[1], sys.argv[2], level=int(sys.argv[3])) as writer:
        writer.add_text("graph.nnef", "new")
        writer.add_dat("w", dense_payload((64, 1 << 16), "u8", lambda: (BLOCK for _ in range(64))))
except StorageError as error:
    print(error)
else:
    sys.exit("the disk was not full")
"""

_ENDLESS = """
print("ready", flush=True)
while True:
    with ArchiveWriter(sys.argv[1], sys.argv[2]) as writer:
        writer.add_text("graph.nnef", "new")
        for number in range(20):
            writer.add_dat(f"w{number}", dense_payload((1 << 16,), "u8", lambda: [BLOCK]))
"""


def write_older(path: Path, form: str) -> None:
    with ArchiveWriter(path, form) as writer:
        writer.add_text("graph.nnef", "old")


@pytest.mark.parametrize("older", [True, False], ids=["over an older one", "first"])
@pytest.mark.parametrize(("form", "level"), [("tgz", "0"), ("tgz", "6"), ("tar", "0"), ("dir", "0")])
def test_a_full_disk_is_an_error_that_leaves_what_was_there(tmp_path: Path, form: str, level: str, older: bool):
    if older:
        write_older(tmp_path / "m", form)
    done = subprocess.run(
        light_command(_IMPORTS + _FULL, tmp_path / "m", form, level), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "free some space" in done.stdout
    assert os.listdir(tmp_path) == (["m"] if older else [])
    if older:
        assert ArchiveReader(tmp_path / "m").text() == "old"


@pytest.mark.parametrize("form", ["tgz", "tar", "dir"])
def test_a_writer_killed_at_any_point_leaves_a_complete_archive(tmp_path: Path, form: str):
    write_older(tmp_path / "m", form)
    for number in range(8):
        with subprocess.Popen(
            light_command(_IMPORTS + _ENDLESS, tmp_path / "m", form), stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.003 + 0.0071 * number)
            process.send_signal(signal.SIGKILL)
        reader = ArchiveReader(tmp_path / "m")
        assert reader.text() == "old" or set(reader.labels()) == {f"w{n}" for n in range(20)}
        assert set(os.listdir(tmp_path)) <= {"m", ".m.t2n-partial"}
    write_older(tmp_path / "m", form)
    assert os.listdir(tmp_path) == ["m"]
