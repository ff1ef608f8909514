"""The residency pool by itself: what a hit costs, and what a cyclic scan reads. Prints one JSON object."""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from benchmarks.loading_memory import bytes_read

from t2n_hf.tensor import OffloadedTensor
from t2n_hf.tensor.residency import ResidencyStrategy, TensorResidencyPool

HITS = 10_000


def hit_us(tensor: OffloadedTensor, rounds: int) -> float:
    """Microseconds of acquire and release of a value that is resident: the median of `rounds`."""
    with TensorResidencyPool(strategy=ResidencyStrategy.LEARNED) as pool:
        tensor.bind_pool(pool)
        with pool.acquire(tensor):
            pass
        found = []
        for _ in range(rounds):
            start = time.perf_counter()
            for _ in range(HITS):
                with pool.acquire(tensor):
                    pass
            found.append((time.perf_counter() - start) / HITS * 1e6)
        return statistics.median(found)


def scan_share(tensors: list[OffloadedTensor], passes: int, readahead_nbytes: int) -> float:
    """Bytes read per pass, of the bytes of all tensors, when half of them may stay. The first pass is not counted."""
    total = sum(tensor.source.nbytes for tensor in tensors)
    strategy = ResidencyStrategy.LEARNED
    begin = 0
    with TensorResidencyPool(total // 2, strategy=strategy, readahead_nbytes=readahead_nbytes) as pool:
        for turn in range(passes + 1):
            if turn == 1:
                pool.flush()  # waits for what is being read ahead
                begin = bytes_read()[0]
            for tensor in tensors:
                with pool.acquire(tensor):
                    pass
        pool.flush()
    return round((bytes_read()[0] - begin) / passes / total, 4)  # what reading /proc adds is less than that


def measure(given: list[str]) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--elements", type=int, default=1 << 20)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args(given)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        tensors = [
            OffloadedTensor.from_original_tensor(torch.full((arguments.elements,), float(i)), f"w{i}", Path(folder))
            for i in range(arguments.count)
        ]
        result = {"hit_us": hit_us(tensors[0], arguments.rounds)}
        window = 4 * tensors[0].source.nbytes
        for name, ahead in (("scan", 0), ("scan, reading ahead", window)):
            result[name] = scan_share(tensors, arguments.passes, ahead)
    return result


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1:])))
