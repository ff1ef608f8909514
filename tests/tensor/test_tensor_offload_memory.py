"""The byte budget of a pool is also that of the process."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, threading, torch
from safetensors.torch import save_file
from t2n_hf.store.checkpoint import CheckpointIndex
from t2n_hf.tensor import OffloadedTensor, ResidencyStrategy, TensorResidencyPool

torch.set_num_threads(1)

def anonymous_nbytes():
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10

path = sys.argv[1] + "/model.safetensors"
save_file({f"{i:03}": torch.full((1024, 512 + 256 * (i % 3)), float(i)) for i in range(48)}, path)
index = CheckpointIndex.open(path)
weights = [OffloadedTensor.from_byte_range(index[name], name) for name in sorted(index)]
total = sum(weight.nbytes_loaded for weight in weights)
pool = TensorResidencyPool(total // 4, strategy=ResidencyStrategy.LEARNED)
before, peak = anonymous_nbytes(), 0

def work():
    global peak
    for _ in range(4):
        for place, weight in enumerate(weights):
            handles = [pool.prefetch(ahead) for ahead in weights[place + 1 : place + 3]]
            with pool.acquire(weight) as value:
                assert float(value[-1, -1]) == place
            peak = max(peak, anonymous_nbytes() - before)

threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
pool.close()
print(total, peak, anonymous_nbytes() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_memory_follows_the_budget_with_threads_and_prefetch(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    total, peak, left = map(int, done.stdout.split())
    # 2 threads with 1 lease and 2 prefetched values each, 48 MiB that wait to be used again, and some for the threads.
    assert peak < total // 4 + 6 * (4 << 20) + (48 << 20)
    assert peak < 0.9 * total
    assert left < 80 << 20
