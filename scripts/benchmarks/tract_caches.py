"""Keys and values as inputs and outputs, as an export has them, beside tract's own caches that stay in the model.

    tract_caches.py ARCHIVE --prompt 512

`transformers_detect_all` is tract's transform that takes the first into the second. Each generates greedily from the
same prompt, on one thread, in turn. Prints one JSON object: CPU milliseconds (medians) of the prompt and of a token
after it, and whether both chose the same tokens.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tract


def archive(path: str, *, own: bool) -> Any:
    loader = tract.nnef().with_tract_transformers().with_tract_extra().with_extended_identifier_syntax()
    model = loader.load(path)
    if own:
        model.transform("transformers_detect_all")
    return model


def empty_caches(model: Any) -> list[Any]:
    """Caches of no positions, in the order of the inputs after the tokens."""
    facts = [str(model.input_fact(index)).split(",") for index in range(1, model.input_count())]
    shapes = [[int(dim) if dim.isdigit() else int(dim == "B") for dim in dims] for *dims, _ in facts]
    types = [np.float16 if fact[-1].lower() == "f16" else np.float32 for fact in facts]
    return [tract.Tensor.from_numpy(np.zeros(shape, dtype)) for shape, dtype in zip(shapes, types, strict=True)]


def generator(runnable: Any, caches: list[Any]) -> Callable[[np.ndarray], np.ndarray]:
    """A function from tokens [1,S] to logits [1,S,V], which goes on where its last call ended."""
    state = runnable.spawn_state()
    kept = list(caches)

    def step(tokens: np.ndarray) -> np.ndarray:
        logits, *new = state.run([tract.Tensor.from_numpy(tokens), *kept])
        kept[:] = new
        return logits.to_numpy()

    return step


def timed(step: Callable[[np.ndarray], np.ndarray], prompt: np.ndarray, tokens: int) -> dict:
    chosen, seconds, given = [], [], prompt
    for _ in range(tokens + 1):
        begin = time.process_time()
        logits = step(given)
        seconds.append(time.process_time() - begin)
        given = logits[:, -1:].argmax(-1).astype(np.int64)
        chosen.append(int(given[0, 0]))
    return {"prompt_ms": 1e3 * seconds[0], "token_ms": 1e3 * statistics.median(seconds[1:]), "chosen": chosen}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    prompt = np.random.default_rng(1).integers(0, 1000, (1, arguments.prompt))
    models = {side: archive(arguments.archive, own=side == "own") for side in ("exported", "own")}
    caches = {side: empty_caches(model) for side, model in models.items()}
    runnables = {side: model.into_runnable() for side, model in models.items()}
    rows: dict[str, list[dict]] = {side: [] for side in models}
    for _ in range(arguments.rounds):
        for side, runnable in runnables.items():
            rows[side].append(timed(generator(runnable, caches[side]), prompt, arguments.tokens))
    result = {
        side: {key: round(statistics.median(run[key] for run in runs), 2) for key in ("prompt_ms", "token_ms")}
        for side, runs in rows.items()
    }
    same = len({tuple(run["chosen"]) for runs in rows.values() for run in runs}) == 1
    print(json.dumps({**result, "inputs_of_own": 1 + len(caches["own"]), "same_tokens": same}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
