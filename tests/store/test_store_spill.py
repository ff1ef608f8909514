"""The private spill file."""

import copy
import errno
import gc
import os
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from light_process import light_command

from t2n_hf.errors import FormatError, StorageError
from t2n_hf.store import spill as spill_module
from t2n_hf.store.spill import Spill


@pytest.fixture
def spill(tmp_path: Path):
    with Spill(tmp_path / "made" / "on demand") as made:
        yield made


@pytest.mark.parametrize(
    "value",
    [torch.randn(5, 7), torch.randn(5, 7).T, torch.ones(3).bfloat16(), torch.tensor(True), torch.empty(0, 3)],
    ids=["plain", "turned", "bf16", "scalar", "empty"],
)
def test_a_tensor_comes_back_in_fresh_aligned_memory(spill: Spill, value: torch.Tensor):
    kept = spill.put(value)
    back = kept.read()
    assert back.dtype == value.dtype
    assert torch.equal(back, value)
    assert back.data_ptr() % 64 == 0
    assert kept.nbytes == value.nbytes
    back.view(torch.uint8).zero_() if back.ndim else None
    assert torch.equal(kept.read(), value)


def test_a_state_comes_back_part_by_part(spill: Spill):
    state = {
        "tag": "a.b.v1",
        "tensors": {"q": torch.arange(7, dtype=torch.uint8), "d": torch.randn(3)},
        "meta": {"k": [1]},
    }
    kept = spill.put(state)
    back = kept.read()
    assert (back["tag"], back["meta"]) == ("a.b.v1", {"k": [1]})
    assert all(torch.equal(back["tensors"][name], tensor) for name, tensor in state["tensors"].items())
    assert all(tensor.data_ptr() % 64 == 0 for tensor in back["tensors"].values())
    assert kept.nbytes == 7 + 12


def test_nothing_is_visible_in_the_folder(spill: Spill, tmp_path: Path):
    spill.put(torch.ones(1000))
    assert os.listdir(tmp_path / "made" / "on demand") == []


def test_space_is_used_again_when_ranges_end(spill: Spill):
    kept = [spill.put(torch.full((1000,), float(i))) for i in range(4)]
    size = spill.nbytes
    del kept[1]
    gc.collect()
    kept.append(spill.put(torch.full((500,), 8.0)))
    kept.append(spill.put(torch.full((480,), 9.0)))
    assert spill.nbytes == size
    values = [0.0, 2.0, 3.0, 8.0, 9.0]
    assert [range_.read()[-1].item() for range_ in kept] == values
    kept.clear()
    gc.collect()
    spill.put(torch.ones(4000))
    assert spill.nbytes <= size


def test_many_values_of_changing_sizes_stay_whole(spill: Spill):
    generator = torch.Generator().manual_seed(0)
    kept: dict[int, tuple] = {}
    for number in range(300):
        size = int(torch.randint(1, 2000, (1,), generator=generator))
        value = torch.randint(0, 255, (size,), dtype=torch.uint8, generator=generator)
        kept[number % 17] = (spill.put(value), value)
        assert all(torch.equal(stored.read(), truth) for stored, truth in list(kept.values())[:3])
    assert all(torch.equal(stored.read(), truth) for stored, truth in kept.values())
    assert spill.nbytes < 17 * 2000 * 4


def test_threads_use_one_spill(spill: Spill):
    errors = []

    def work(number: int) -> None:
        for step in range(50):
            value = torch.full((number * 100 + 1,), float(number * 1000 + step))
            if not torch.equal(spill.put(value).read(), value):
                errors.append((number, step))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_closed_spill_is_an_error(spill: Spill):
    kept = spill.put(torch.ones(2))
    spill.close()
    with pytest.raises(StorageError, match="was closed"):
        kept.read()
    with pytest.raises(StorageError, match="was closed"):
        spill.put(torch.ones(2))


def test_copies_share_the_spill(spill: Spill):
    assert copy.deepcopy(spill) is spill


def test_a_subclass_is_refused_and_its_space_comes_back(spill: Spill):
    with pytest.raises(FormatError, match="expected a plain"):
        spill.put(torch.ones(1000, device="meta"))
    spill.put(torch.ones(10))
    assert spill.nbytes < 4000


def test_a_full_disk_says_where_and_what_next(spill: Spill, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(spill_module.os, "pwrite", full)
    with pytest.raises(StorageError, match=r"cannot spill 400 bytes in .*No space left .*another folder") as caught:
        spill.put(torch.ones(100))
    assert caught.value.errno == errno.ENOSPC
    with Spill() as unnamed, pytest.raises(StorageError, match=r"name another folder \(spill_dir .*TMPDIR"):
        unnamed.put(torch.ones(100))


def test_a_system_without_a_folder_for_temporary_files_says_what_next(monkeypatch: pytest.MonkeyPatch):
    def none(**_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(spill_module.tempfile, "TemporaryFile", none)
    with pytest.raises(StorageError, match=r"in the system's folder for temporary files: No usable .*TMPDIR"):
        Spill()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot make a spill file"):
        Spill(tmp_path / "file" / "x")


def test_a_process_that_just_ends_leaves_nothing(tmp_path: Path):
    code = "import os, torch; from t2n_hf.store.spill import Spill; s = Spill(sys.argv[1]); "
    code += "k = s.put(torch.ones(10)); assert k.read()[0] == 1; os._exit(0)"
    subprocess.run(light_command(code, tmp_path), check=True)
    assert os.listdir(tmp_path) == []


def blocks(spill: Spill) -> int:
    return os.fstat(spill._fd).st_blocks * 512


def test_disk_space_goes_back_when_ranges_end(spill: Spill):
    mib = 1 << 20
    kept = [spill.put(torch.full((mib // 4,), float(i))) for i in range(6)]
    if not blocks(spill):
        pytest.skip("this filesystem does not say what a file takes")
    assert 6 * mib <= blocks(spill) <= 6 * mib + 65536
    del kept[2]
    if blocks(spill) > 5 * mib + 65536:
        pytest.skip("this filesystem has no holes; the space is used again")
    kept.pop()
    assert blocks(spill) <= 4 * mib + 65536
    assert os.fstat(spill._fd).st_size == 5 * mib
    assert [kept_range.read()[0].item() for kept_range in kept] == [0, 1, 3, 4]
    kept.append(spill.put(torch.full((mib // 4,), 9.0)))
    assert os.fstat(spill._fd).st_size == 5 * mib
    assert [kept_range.read()[-1].item() for kept_range in kept] == [0, 1, 3, 4, 9]
    kept.clear()
    assert (blocks(spill), os.fstat(spill._fd).st_size) == (0, 0)


def test_ranges_that_end_in_any_thread_give_their_space_back(spill: Spill):
    def work():
        for number in range(30):
            ring = [spill.put(torch.full((4096,), float(number)))]
            ring.append(ring)  # only the garbage collector ends it
            assert ring[0].read()[0].item() == number
            gc.collect(0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    spill.put(torch.ones(1))
    assert os.fstat(spill._fd).st_size <= 64 + 4 * 4096 * 4


def test_a_read_error_says_where(spill: Spill, monkeypatch: pytest.MonkeyPatch):
    kept = spill.put(torch.ones(8))

    def failing(*args: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(spill_module, "read_at", failing)
        with pytest.raises(StorageError, match=r"cannot read 32 bytes of the spill file in .*on demand: Input/output"):
            kept.read()
    assert torch.equal(kept.read(), torch.ones(8))


FORKING = """
import os, sys, time
import torch
from t2n_hf.errors import StorageError
from t2n_hf.store.spill import Spill, shared_spill

spill = shared_spill(sys.argv[1])
kept = [spill.put(torch.full((4096,), float(i))) for i in range(4)]
asked, told = os.pipe()
child = os.fork()
if child == 0:
    os.close(told)
    os.read(asked, 1)  # until the parent has ended its ranges and written others
    right = [kept_range.read().unique().item() for kept_range in kept] == [0, 1, 2, 3]
    try:
        spill.put(torch.ones(1))
        right = False
    except StorageError as error:
        right = right and "is that of process" in str(error)
    own = shared_spill(sys.argv[1])
    mine = own.put(torch.full((4096,), 7.0))
    del kept[0]
    right = right and own is not spill and mine.read().unique().item() == 7
    os._exit(0 if right else 1)
os.close(asked)
del kept[1:]
more = [spill.put(torch.full((4096,), 10.0 + i)) for i in range(4)]
os.write(told, b".")
assert os.waitpid(child, 0)[1] == 0, "the child reads what there was"
assert kept[0].read().unique().item() == 0
assert [m.read().unique().item() for m in more] == [10, 11, 12, 13]
size = os.fstat(spill._fd).st_size
del more[:]
more = [spill.put(torch.full((4096,), 20.0 + i)) for i in range(4)]
assert os.fstat(spill._fd).st_size == size, "what was written after the fork is used again"
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_reads_on_while_its_parent_writes(tmp_path: Path):
    subprocess.run(light_command(FORKING, str(tmp_path)), check=True, timeout=60)
    assert os.listdir(tmp_path) == []


KILLED = """
import os, signal, sys, threading
import torch
from t2n_hf.store.spill import Spill

spill = Spill(sys.argv[1])
kept = [spill.put(torch.ones(1 << 18)) for _ in range(3)]
print("writing", flush=True)
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
while True:
    kept.append(spill.put(torch.ones(1 << 18)))
    kept.pop(0)
"""


def test_a_process_killed_while_it_writes_leaves_nothing_and_disturbs_no_other(tmp_path: Path):
    with Spill(tmp_path) as other:
        kept = other.put(torch.arange(1000))
        processes = [subprocess.Popen(light_command(KILLED, str(tmp_path)), stdout=subprocess.PIPE) for _ in range(2)]
        for process in processes:
            assert process.communicate()[0] == b"writing\n"
            assert process.returncode == -9
        assert os.listdir(tmp_path) == []
        assert torch.equal(kept.read(), torch.arange(1000))


def test_what_an_older_process_left_is_removed_and_nothing_else(tmp_path: Path):
    for name in ("t2n-spill-old", "t2n-spill-new", "other"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "t2n-spill-folder").mkdir()
    for name in ("t2n-spill-old", "other", "t2n-spill-folder"):
        os.utime(tmp_path / name, (0, 0))
    Spill(tmp_path).close()
    assert sorted(os.listdir(tmp_path)) == ["other", "t2n-spill-folder", "t2n-spill-new"]
