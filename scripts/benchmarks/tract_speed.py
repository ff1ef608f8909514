"""Load a causal-LM archive in tract and time single-token steps at several lengths of the past. Prints one JSON object.

    tract_speed.py ARCHIVE --heads 3 --head-dim 64 --dtype f32 --past 0 512 2000

tract runs on one thread. Times are CPU seconds of this process: `load_cpu_s` from file to runnable, `step_cpu_s` for
each length of the past.
"""

import argparse
import json
import statistics
import sys
import time

import numpy as np
import tract


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive")
    parser.add_argument("--heads", type=int, required=True)
    parser.add_argument("--head-dim", type=int, required=True)
    parser.add_argument("--dtype", choices=("f32", "f16"), default="f32")
    parser.add_argument("--past", type=int, nargs="+", default=[0, 512, 2000])
    parser.add_argument("--steps", type=int, default=7)
    arguments = parser.parse_args()

    start = time.process_time()
    loader = tract.nnef().with_tract_transformers().with_tract_extra()
    model = loader.with_extended_identifier_syntax().load(arguments.archive)
    count = model.input_count()
    runnable = model.into_runnable()
    result: dict = {"load_cpu_s": time.process_time() - start, "step_cpu_s": {}}

    dtype = np.float16 if arguments.dtype == "f16" else np.float32
    generator = np.random.default_rng(0)
    for past in arguments.past:
        shape = (1, arguments.heads, past, arguments.head_dim)
        cache = (generator.standard_normal(shape) * 0.1).astype(dtype)
        inputs = [tract.Tensor.from_numpy(np.array([[17]], dtype=np.int64))]
        inputs += [tract.Tensor.from_numpy(cache) for _ in range(count - 1)]
        times = []
        for step in range(arguments.steps + 2):  # the first steps resolve the symbols and warm up
            state = runnable.spawn_state()
            begin = time.process_time()
            state.run(inputs)
            if step >= 2:
                times.append(time.process_time() - begin)
        result["step_cpu_s"][str(past)] = statistics.median(times)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
