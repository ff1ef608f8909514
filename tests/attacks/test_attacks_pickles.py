"""A pickle in the place of a state or a checkpoint is refused, and no code of it runs."""

import os
import pickle  # noqa: TID251 - the attack
import zipfile
from pathlib import Path

import pytest
import torch

from t2n_hf.errors import FormatError, StorageError
from t2n_hf.store.checkpoint import CheckpointFile, CheckpointIndex
from t2n_hf.store.state import read_state


class Exploit:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def write_plain(path: Path, exploit: Exploit, protocol: int = 4) -> None:
    path.write_bytes(pickle.dumps(exploit, protocol=protocol))


def write_zipped(path: Path, exploit: Exploit) -> None:
    torch.save({"w": torch.ones(2), "x": exploit}, path)  # noqa: TID251 - the attack
    assert zipfile.is_zipfile(path)


def write_behind_a_header(path: Path, exploit: Exploit) -> None:
    """A file that is a good safetensors file of no tensors, followed by a pickle."""
    path.write_bytes((2).to_bytes(8, "little") + b"{}" + pickle.dumps(exploit))


MAKERS = {"pickle": write_plain, "torch.save": write_zipped, "appended": write_behind_a_header}
MAKERS |= {f"protocol {n}": lambda path, exploit, n=n: write_plain(path, exploit, n) for n in range(6)}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize(
    "reader",
    [read_state, CheckpointFile, lambda path: CheckpointIndex.open(path.parent)],
    ids=["state", "file", "folder"],
)
def test_no_code_of_a_pickle_runs(tmp_path: Path, maker: str, reader):
    MAKERS[maker](tmp_path / "model.safetensors", Exploit(tmp_path / "ran"))
    with pytest.raises((FormatError, StorageError)):
        reader(tmp_path / "model.safetensors")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("maker", ["pickle", "torch.save", "protocol 2", "protocol 5"])
def test_a_pickle_is_called_what_it_is(tmp_path: Path, maker: str):
    MAKERS[maker](tmp_path / "s", Exploit(tmp_path / "ran"))
    with pytest.raises(FormatError, match="looks like a pickle"):
        read_state(tmp_path / "s")


def test_the_exploit_would_have_worked(tmp_path: Path):
    pickle.loads(pickle.dumps(Exploit(tmp_path / "ran")))  # noqa: S301 - the attack
    assert (tmp_path / "ran").is_dir()
