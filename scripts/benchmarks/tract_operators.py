"""tract's own operators beside what they can be written with: time of each, and how far their values are apart.

Both are loaded by one process and run in turn, so that what else the machine does meets both; medians are compared.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tract

HEAD = """version 1.0;

extension tract_registry tract_core;
extension tract_registry tract_transformers;

graph network({names}) -> (y)
{{
{externals}
{body}
}}
"""
SHAPE = [1, 64, 1536]
KEYS = [1, 9, 576, 64]


@dataclass(frozen=True)
class Pair:
    """Two bodies that give `y` from inputs a, b, c, d of these shapes."""

    name: str
    shapes: list[list[int]]
    own: str
    written: str


ROTATED = """h = slice(a, axes=[3], begin=[0], end=[32]);
    r = concat([neg(slice(a, axes=[3], begin=[32], end=[64])), h], axis=3);"""
SDPA = 'tract_transformers_sdpa(a, b, c, d, scale=0.125, datum_type="f32", acc_datum_type="f32", is_causal=false)'
PAIRS = [
    Pair("silu", [SHAPE], "y = tract_core_silu(a);", "y = mul(a, sigmoid(a));"),
    Pair(
        "gelu, by tanh",
        [SHAPE],
        "y = tract_core_gelu_approx(a, fast_impl=false);",
        "t = tanh(mul(0.7978845608, add(a, mul(0.044715, mul(a, mul(a, a)))))); y = mul(mul(0.5, a), add(t, 1.0));",
    ),
    Pair(
        "rms_norm",
        [SHAPE],
        "y = tract_core_rms_norm(a, axis=2, eps=0.00001);",
        "y = mul(a, rsqrt(add(mean_reduce(mul(a, a), axes=[2]), 0.00001)));",
    ),
    Pair(
        "softmax",
        [[1, 9, 64, 576]],
        "y = softmax(a, axes=[3]);",
        "e = exp(sub(a, max_reduce(a, axes=[3]))); y = div(e, sum_reduce(e, axes=[3]));",
    ),
    *(
        Pair(
            f"rope of {rows} positions",
            [[1, 9, rows, 64], [1, 1, rows, 64], [1, 1, rows, 64]],
            "y = tract_transformers_apply_rope(a, b, c);",
            ROTATED + " y = add(mul(a, b), mul(r, c));",
        )
        for rows in (1, 64, 512)
    ),
    *(
        Pair(
            f"attention of {rows} to {KEYS[2]} positions",
            [[1, 9, rows, 64], KEYS, KEYS, [1, 1, rows, KEYS[2]]],
            f"y = {SDPA};",
            "s = add(matmul(mul(a, 0.125), b, transposeB=true), d); y = matmul(softmax(s, axes=[3]), c);",
        )
        for rows in (1, 64)
    ),
]


def loaded(shapes: list[list[int]], body: str, folder: Path):
    names = "abcd"[: len(shapes)]
    lines = [f'    {n} = tract_core_external(shape={s}, datum_type="f32");' for n, s in zip(names, shapes, strict=True)]
    folder.mkdir()
    text = HEAD.format(names=", ".join(names), externals="\n".join(lines), body=body)
    (folder / "graph.nnef").write_text(text)
    return tract.nnef().with_tract_transformers().load(str(folder)).into_runnable()


def measured(runs, inputs, times: int) -> tuple[list[float], list[np.ndarray]]:
    """Median milliseconds of each, run in turn, and what they gave."""
    taken: list[list[float]] = [[] for _ in runs]
    results = [run.run(inputs)[0].to_numpy() for run in runs]
    for _ in range(times):
        for run, mine in zip(runs, taken, strict=True):
            begin = time.perf_counter()
            run.run(inputs)
            mine.append(1000 * (time.perf_counter() - begin))
    return [statistics.median(mine) for mine in taken], results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=25)
    options = parser.parse_args()
    random = np.random.default_rng(0)
    print(f"tract {tract.version()}\n\n| | tract's own, ms | written out, ms | ratio | apart |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        for number, pair in enumerate(PAIRS):
            inputs = [random.normal(size=shape).astype("float32") for shape in pair.shapes]
            bodies = (pair.own, pair.written)
            runs = [loaded(pair.shapes, body, Path(scratch) / f"{number}{i}") for i, body in enumerate(bodies)]
            (own, written), (first, second) = measured(runs, inputs, options.times)
            apart = float(np.abs(first - second).max() / np.abs(second).max())
            print(f"| {pair.name} | {own:.2f} | {written:.2f} | {written / own:.2f} | {apart:.0e} |")


if __name__ == "__main__":
    main()
