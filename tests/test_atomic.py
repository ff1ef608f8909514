"""Final names appear only when complete, whatever ends the process."""

import errno
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from light_process import light_command

from t2n_hf import atomic
from t2n_hf.atomic import check_replaceable, kept_folder, partial_path, staged_file, staged_folder
from t2n_hf.errors import OutputExistsError, StorageError


def write_and_fail(path: Path) -> None:
    path.write_text("new")
    raise RuntimeError("half way")


def test_a_file_appears_when_it_is_complete(tmp_path: Path):
    with staged_file(tmp_path / "f") as partial:
        partial.write_text("new")
        assert not (tmp_path / "f").exists()
    assert (tmp_path / "f").read_text() == "new"
    assert os.listdir(tmp_path) == ["f"]


def test_a_failure_leaves_the_older_file(tmp_path: Path):
    (tmp_path / "f").write_text("old")
    with pytest.raises(RuntimeError), staged_file(tmp_path / "f") as partial:
        write_and_fail(partial)
    assert (tmp_path / "f").read_text() == "old"
    assert os.listdir(tmp_path) == ["f"]


def test_a_file_gets_the_rights_that_the_user_asks_for(tmp_path: Path):
    previous = os.umask(0o027)
    try:
        with staged_file(tmp_path / "f"):
            pass
    finally:
        os.umask(previous)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o640


def test_a_leftover_of_a_killed_run_is_emptied(tmp_path: Path):
    partial_path(tmp_path / "f").write_text("left over, and longer than what comes")
    with staged_file(tmp_path / "f") as partial:
        assert partial.read_text() == ""
        partial.write_text("new")
    assert (tmp_path / "f").read_text() == "new"
    assert os.listdir(tmp_path) == ["f"]


def test_a_planted_link_is_not_followed(tmp_path: Path):
    (tmp_path / "precious").write_text("old")
    partial_path(tmp_path / "f").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"), staged_file(tmp_path / "f"):
        pass
    assert (tmp_path / "precious").read_text() == "old"


def test_two_writers_of_one_file_are_told_apart(tmp_path: Path):
    with staged_file(tmp_path / "f") as partial:
        with pytest.raises(StorageError, match="another process is writing"), staged_file(tmp_path / "f"):
            pass
        partial.write_text("first")
    assert (tmp_path / "f").read_text() == "first"


def test_a_folder_appears_when_it_is_complete(tmp_path: Path):
    with staged_folder(tmp_path / "d") as partial:
        (partial / "sub").mkdir()
        (partial / "sub" / "f").write_text("new")
        assert not (tmp_path / "d").exists()
    assert (tmp_path / "d" / "sub" / "f").read_text() == "new"
    assert os.listdir(tmp_path) == ["d"]


def _older(folder: Path) -> None:
    folder.mkdir()
    (folder / "f").write_text("old")
    (folder / "marker").write_text("")


def test_a_folder_that_exists_is_refused_at_once(tmp_path: Path):
    _older(tmp_path / "d")
    with pytest.raises(OutputExistsError, match="exists already"), staged_folder(tmp_path / "d"):
        pytest.fail("the block must not run")
    assert (tmp_path / "d" / "f").read_text() == "old"


@pytest.mark.parametrize("exchange", [True, False], ids=["one step", "two renames"])
def test_an_older_folder_is_replaced_when_asked(tmp_path: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch):
    if not exchange:
        monkeypatch.setattr(atomic, "_exchange", lambda first, second: False)
    _older(tmp_path / "d")
    with staged_folder(tmp_path / "d", overwrite=True, marker="marker") as partial:
        (partial / "g").write_text("new")
        assert (tmp_path / "d" / "f").read_text() == "old"
    assert os.listdir(tmp_path / "d") == ["g"]
    assert os.listdir(tmp_path) == ["d"]


def test_a_failure_leaves_the_older_folder(tmp_path: Path):
    _older(tmp_path / "d")
    with pytest.raises(RuntimeError), staged_folder(tmp_path / "d", overwrite=True) as partial:
        write_and_fail(partial / "g")
    assert sorted(os.listdir(tmp_path / "d")) == ["f", "marker"]
    assert os.listdir(tmp_path) == ["d"]


def test_a_folder_without_the_marker_is_never_replaced(tmp_path: Path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years")
    with (
        pytest.raises(OutputExistsError, match="not an older output"),
        staged_folder(tmp_path / "home", overwrite=True, marker="marker"),
    ):
        pytest.fail("the block must not run")
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years"


def test_a_file_is_never_replaced_by_a_folder(tmp_path: Path):
    (tmp_path / "d").write_text("a file")
    with pytest.raises(OutputExistsError, match="is not a folder"), staged_folder(tmp_path / "d", overwrite=True):
        pytest.fail("the block must not run")
    assert (tmp_path / "d").read_text() == "a file"


def test_a_folder_that_appears_meanwhile_is_not_lost(tmp_path: Path):
    with pytest.raises(OutputExistsError), staged_folder(tmp_path / "d") as partial:
        _older(partial.with_name("d"))
    assert (tmp_path / "d" / "f").read_text() == "old"
    assert os.listdir(tmp_path) == ["d"]


def test_a_folder_caught_between_two_renames_comes_back(tmp_path: Path):
    _older(tmp_path / ".d.t2n-old")
    with pytest.raises(OutputExistsError, match="exists already"), staged_folder(tmp_path / "d"):
        pass
    assert (tmp_path / "d" / "f").read_text() == "old"


def test_a_leftover_folder_of_a_killed_run_is_emptied(tmp_path: Path):
    leftover = partial_path(tmp_path / "d")
    (leftover / "sub").mkdir(parents=True)
    (leftover / "sub" / "f").write_text("left over")
    (leftover / "link").symlink_to(tmp_path)
    with staged_folder(tmp_path / "d") as partial:
        assert os.listdir(partial) == []
    assert os.listdir(tmp_path) == ["d"]


def test_two_writers_of_one_folder_are_told_apart(tmp_path: Path):
    with staged_folder(tmp_path / "d") as partial:
        (partial / "f").write_text("first")
        with pytest.raises(StorageError, match="another process is writing"), staged_folder(tmp_path / "d"):
            pass
    assert (tmp_path / "d" / "f").read_text() == "first"


def test_a_full_disk_is_a_storage_error_that_says_what_to_do(tmp_path: Path):
    (tmp_path / "f").write_text("old")
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(StorageError, match=r"No space left .* free some space") as caught, staged_file(tmp_path / "f"):
        raise full
    assert caught.value.errno == errno.ENOSPC
    assert (tmp_path / "f").read_text() == "old"


def test_other_errors_pass_through_as_they_are(tmp_path: Path):
    with pytest.raises(FileNotFoundError), staged_file(tmp_path / "f"):
        (tmp_path / "nowhere").read_text()


_ENDLESS = """
import sys
from pathlib import Path
from t2n_hf.atomic import staged_file, staged_folder
kind, target = sys.argv[1:]
print("ready", flush=True)
while True:
    if kind == "file":
        with staged_file(target) as partial, open(partial, "w") as file:
            for number in range(50):
                file.write("new")
                file.flush()
    else:
        with staged_folder(target, overwrite=True) as partial:
            for number in range(3):
                (partial / str(number)).write_text("new")
"""


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_process_killed_at_any_point_leaves_a_complete_output(tmp_path: Path, kind: str):
    target = tmp_path / "x"
    for number in range(12):
        with subprocess.Popen(light_command(_ENDLESS, kind, target), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.002 + 0.0037 * number)
            process.send_signal(signal.SIGKILL)
        if kind == "file":
            assert not target.exists() or target.read_text() == "new" * 50
        elif target.exists():
            assert sorted(os.listdir(target)) == ["0", "1", "2"]
        assert set(os.listdir(tmp_path)) <= {"x", ".x.t2n-partial"}
    context = staged_file(target) if kind == "file" else staged_folder(target, overwrite=True)
    with context:
        pass
    assert os.listdir(tmp_path) == ["x"]


def may_be_made(target: Path) -> None:
    check_replaceable(target, overwrite=False, marker=None)


def fail_with_work_done(partial: Path) -> None:
    (partial / "f").write_text("half")
    raise RuntimeError("half way")


def test_a_kept_folder_appears_when_it_is_complete(tmp_path: Path):
    with kept_folder(tmp_path / "d", may_be_made) as partial:
        (partial / "f").write_text("new")
        assert not (tmp_path / "d").exists()
    assert (tmp_path / "d" / "f").read_text() == "new"
    assert os.listdir(tmp_path) == ["d"]


def test_a_kept_folder_keeps_its_work_when_the_block_fails(tmp_path: Path):
    with pytest.raises(RuntimeError), kept_folder(tmp_path / "d", may_be_made) as partial:
        fail_with_work_done(partial)
    assert os.listdir(tmp_path) == [partial_path("d").name]
    with kept_folder(tmp_path / "d", may_be_made) as partial:
        assert (partial / "f").read_text() == "half"
    assert os.listdir(tmp_path) == ["d"]


def test_a_kept_folder_without_work_is_removed(tmp_path: Path):
    with pytest.raises(RuntimeError), kept_folder(tmp_path / "d", may_be_made):
        raise RuntimeError("at once")
    assert os.listdir(tmp_path) == []


def test_a_kept_folder_asks_again_before_it_replaces(tmp_path: Path):
    def work_while_another_makes_it(partial: Path) -> None:
        (partial / "f").write_text("new")
        (tmp_path / "d").mkdir()

    with pytest.raises(OutputExistsError), kept_folder(tmp_path / "d", may_be_made) as partial:
        work_while_another_makes_it(partial)
    assert os.listdir(tmp_path / "d") == []
    assert (partial / "f").read_text() == "new"


def test_a_kept_folder_replaces_an_older_one_in_one_step(tmp_path: Path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "old").write_text("old")
    with kept_folder(tmp_path / "d", lambda target: None) as partial:
        (partial / "f").write_text("new")
        assert os.listdir(tmp_path / "d") == ["old"]
    assert os.listdir(tmp_path / "d") == ["f"]
    assert os.listdir(tmp_path) == ["d"]


def test_two_writers_of_one_kept_folder_are_told_apart(tmp_path: Path):
    with kept_folder(tmp_path / "d", may_be_made) as partial:
        with pytest.raises(StorageError, match="another process is writing"):
            kept_folder(tmp_path / "d", may_be_made).__enter__()
        (partial / "f").write_text("first")
    assert os.listdir(tmp_path / "d") == ["f"]
