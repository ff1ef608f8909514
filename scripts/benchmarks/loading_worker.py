"""One side of the loading benchmark: a process that holds one model and answers commands, one JSON object a line.

The parent has all sides of a comparison alive at once and asks them in turn, so that a drifting machine is fair to all.
The first line is the side's specification (see loading_models.py); the answer to it says how loading went. Memory
figures are bytes over those of the interpreter with its libraries, which ran a tiny model before.
"""

import gc
import json
import os
import sys
import time
from typing import Any

import torch
from benchmarks import loading_memory as memory
from benchmarks.loading_models import load, warm_interpreter

PROMPT = 8


class Worker:
    """Holds a model; each public method is a command."""

    def __init__(self, spec: dict[str, Any]) -> None:
        torch.set_num_threads(spec.get("threads", 1))
        torch.manual_seed(0)
        self.spec = spec
        warm_interpreter(spec)
        gc.collect()
        self.baseline = memory.resident()
        memory.reset_peak()
        self.model: torch.nn.Module | None = None
        self._trace = memory.Trace(self._pool_bytes) if spec.get("trace") else None
        self.model, self.load_s = load(spec)

    def loaded(self) -> dict[str, Any]:
        """Seconds and peak of loading, and the model's bytes as it says itself."""
        footprint = self.model.get_memory_footprint()
        return {"load_s": self.load_s, "footprint": footprint, **self.memory()}

    def memory(self) -> dict[str, Any]:
        """What is in memory now, and the peak since it was last reset, over the interpreter's own."""
        gc.collect()
        now = memory.resident()
        over = {name: now[name] - self.baseline[name] for name in ("rss", "anon", "file")}
        return {**over, "peak": now["peak"] - self.baseline["rss"], "interpreter": self.baseline["rss"]}

    def decode(self, tokens: int) -> dict[str, Any]:
        """Single-token steps after a prompt; the prompt is not timed."""
        past = self.model(torch.arange(100, 132)[None], use_cache=True).past_key_values
        token = torch.tensor([[7]])
        start = time.perf_counter()
        for _ in range(tokens):
            out = self.model(token, cache=past, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
        return {"tokens_per_s": tokens / (time.perf_counter() - start)}

    def prefill(self, length: int) -> dict[str, Any]:
        """One forward of a whole prompt, whose last logits are asked for."""
        ids = torch.randint(3, 500, (1, length), generator=torch.Generator().manual_seed(0))
        start = time.perf_counter()
        self.model(ids, use_cache=True, logits_to_keep=1)
        return {"tokens_per_s": length / (time.perf_counter() - start)}

    def generate(self, tokens: int, cold: str = "no") -> dict[str, Any]:
        """`model.generate`, prompt included. `cold`: drop the files' pages before the "run", or before "each" token."""
        folders = [self.spec["folder"], *filter(None, [self.spec.get("offload_folder")])]
        ids = torch.arange(100, 100 + PROMPT)[None]
        paused = 0.0
        if cold != "no":
            memory.drop_page_cache(folders)

        def drop(*_: Any) -> bool:
            nonlocal paused
            begin = time.perf_counter()
            memory.drop_page_cache(folders)
            paused += time.perf_counter() - begin
            return False

        options = {"stopping_criteria": [drop]} if cold == "each" else {}
        asked, disk = memory.bytes_read()
        start, cpu = time.perf_counter(), time.process_time()
        out = self.model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, **options)
        seconds, cpu = time.perf_counter() - start - paused, time.process_time() - cpu
        asked, disk = (now - then for now, then in zip(memory.bytes_read(), (asked, disk), strict=True))
        return {
            "tokens_per_s": (out.shape[1] - PROMPT) / seconds,
            "cpu_per_token": cpu / tokens,
            "asked_per_token": asked / tokens,
            "disk_per_token": disk / tokens,
            "ids": out[0].tolist(),
        }

    def packed(self) -> dict[str, Any]:
        """Bytes that the weights take as Q4_0 blocks (18 bytes for 32 values), vectors and buffers as they are."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        sizes = [one.numel() * 18 // 32 if one.dim() > 1 else one.numel() * one.element_size() for one in tensors]
        return {"bytes": sum(sizes)}

    def save(self, folder: str) -> dict[str, Any]:
        """Save the model as it is."""
        self.model.save_pretrained(folder)
        return {}

    def trace(self) -> dict[str, Any]:
        """Memory over time since before loading, over the interpreter's own. Ends the tracing."""
        samples = self._trace.stop()
        for sample in samples:
            sample["anon"] -= self.baseline["anon"]
            sample["file"] -= self.baseline["file"]
        return {"samples": samples}

    def _pool_bytes(self) -> int:
        from t2n_hf.hf.hooks import resident_nbytes

        return 0 if self.model is None else resident_nbytes(self.model)


def main() -> int:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    worker: Worker | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        if worker is None:
            worker = Worker(asked)  # as users load: weights made in inference mode are multiplied in other ways
            answer = worker.loaded()
        else:
            with torch.no_grad():
                answer = getattr(worker, asked.pop("do"))(**asked)
        print(json.dumps(answer), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
