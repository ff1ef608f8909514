"""Memory that is used again, or given back, once no tensor refers to it."""

import gc
import os
import subprocess
import threading

import pytest
import torch
from light_process import light_command

from t2n_hf.store import recycled
from t2n_hf.store.recycled import SMALL_NBYTES, recycled_buffer

LARGE = SMALL_NBYTES + 4096

pytestmark = pytest.mark.skipif(recycled._MAP_FLAGS is None, reason="no anonymous mappings here")


@pytest.fixture(autouse=True)
def free(monkeypatch):
    maps = recycled._FreeMaps()
    monkeypatch.setattr(recycled, "_FREE", maps)
    return maps


def test_small_buffers_are_left_to_the_allocator():
    assert recycled_buffer(SMALL_NBYTES - 1) is None


def test_memory_is_used_again_only_when_its_last_view_is_gone(free):
    buffer = recycled_buffer(LARGE)
    place = buffer.data_ptr()
    view = buffer.view(torch.float32)[10:20]
    view.fill_(7)
    del buffer
    other = recycled_buffer(LARGE)
    assert other.data_ptr() != place
    assert view.tolist() == [7] * 10
    del view
    gc.collect()
    assert recycled_buffer(LARGE).data_ptr() == place
    assert recycled_buffer(LARGE + 4096).data_ptr() != place


def test_little_is_kept(free, monkeypatch):
    monkeypatch.setattr(recycled, "_KEPT_NBYTES", 3 * LARGE)
    buffers = [recycled_buffer(LARGE) for _ in range(5)]
    buffers.clear()
    assert free._nbytes == 3 * LARGE
    larger = recycled_buffer(2 * LARGE)
    del larger
    assert free._nbytes == 3 * LARGE
    assert sorted(size for size, maps in free._maps.items() for _ in maps) == [LARGE, 2 * LARGE]
    too_large = recycled_buffer(4 * LARGE)
    del too_large
    assert free._nbytes <= 3 * LARGE


def test_a_value_that_dies_while_the_list_is_in_use_does_not_wait(free):
    buffer = recycled_buffer(LARGE)
    with free._lock:
        del buffer
    assert free._nbytes == 0


def test_threads_never_share_a_buffer():
    failures = []

    def work(number):
        for _ in range(200):
            buffer = recycled_buffer(LARGE)
            buffer[:64] = number
            if buffer[:64].unique().tolist() != [number]:
                failures.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures


FORKING = """
import os, signal, threading, time
from t2n_hf.store import recycled

taken, inside = [], threading.Event()

def busy():
    with recycled._FREE._lock:
        inside.set()
        time.sleep(0.2)

thread = threading.Thread(target=busy)
thread.start()
inside.wait()
child = os.fork()
if child == 0:
    signal.alarm(60)  # a lock that nobody gives back
    recycled.recycled_buffer(1 << 20)
    os._exit(0)
thread.join()
assert os.waitpid(child, 0)[1] == 0
recycled.recycled_buffer(1 << 20)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_forked_while_another_thread_is_inside_gets_memory():
    subprocess.run(light_command(FORKING), check=True, timeout=60)
