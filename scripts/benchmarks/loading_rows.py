"""The lines of the loading benchmark's table, from its results."""

from benchmarks.table import Goal, Line

MARGIN = 150_000_000
LEAST_DECODE = {"1.1 B": 2.5, "SmolLM2": 2.2}
LEAST_PREFILL = {"fast": {"128": 0.5, "512": 0.75}, "compiled": {"128": 0.7, "512": 0.9}}
COLD = {"warm": "files in the page cache", "cold": "cold before each run", "cold, each token": "cold before each token"}


def lines_of(results: dict) -> list[Line]:
    """Every comparison whose measurement is in `results`, in reading order."""
    parts = (_decode, _prefill, _offload, _dispatch, _load, _pool, _export, _seven_b)
    return [line for part in parts for line in part(results)]


def _at_least(number: float | None) -> Goal | None:
    return None if number is None else Goal(">=", number)


def _decode(results: dict) -> list[Line]:
    lines = []
    for model, sides in results.get("decode", {}).items():
        dense = sides["dense"]["tokens_per_s"]
        for mode in (mode for mode in sides if mode != "dense"):
            goal = _at_least(LEAST_DECODE.get(model)) if mode == "fast" else None
            what = f"{model}: decode, resident Q4_0 ({mode}) against dense bf16"
            lines.append(Line(what, sides[mode]["tokens_per_s"], dense, "tokens/s", goal))
        fast, packed = sides["fast"], sides["fast"]["packed_bytes"]
        # Caches, activations, modules and what malloc keeps are there for a dense model as well.
        beside = max(sides["dense"]["rss"] - sides["dense"]["footprint"], 0)
        for nbytes, words, goal in (
            (fast["footprint"], "bytes of the resident weights", Goal("<=", 1.1)),
            (fast["rss"] - beside, "memory over the interpreter's own and what dense takes beside weights", None),
            (fast["rss"], "memory over the interpreter's own", None),
        ):
            what = f"{model}: {words}, Q4_0 (fast) after decoding, against its packed bytes"
            lines.append(Line(what, nbytes / 1e6, packed / 1e6, "MB", goal))
    return lines


def _prefill(results: dict) -> list[Line]:
    lines = []
    for model, lengths in results.get("prefill", {}).items():
        for length, sides in lengths.items():
            for mode in (mode for mode in sides if mode != "dense"):
                goal = _at_least(LEAST_PREFILL.get(mode, {}).get(length))
                what = f"{model}: prefill of {length} tokens, Q4_0 ({mode}) against dense bf16"
                speeds = (sides[mode]["tokens_per_s"], sides["dense"]["tokens_per_s"])
                lines.append(Line(what, *speeds, "tokens/s", goal))
    return lines


def _offload(results: dict) -> list[Line]:
    if (found := results.get("offload")) is None:
        return []
    lines = []
    least = {"q4_0": 4.0, "bf16": 1.5}
    for cold, words in COLD.items():
        other = found[cold]["accelerate"]["tokens_per_s"]
        for side in ("q4_0", "q4_0, no readahead", "bf16", "bf16, no readahead"):
            goal = _at_least(least.get(side)) if cold != "cold, each token" else None
            what = f"offloaded {side}, {words}, against accelerate"
            lines.append(Line(what, found[cold][side]["tokens_per_s"], other, "tokens/s", goal))
    bound = found["limit"] + MARGIN
    for side, memory in found["memory"].items():
        goal = None if side == "accelerate" else Goal("<=", 1.0)
        lines.append(Line(f"peak while loading and generating, {side}", memory["peak"] / 1e6, bound / 1e6, "MB", goal))
    return lines


def _dispatch(results: dict) -> list[Line]:
    if (found := results.get("dispatch")) is None or "offload" not in results:
        return []
    other = results["offload"]["warm"]["accelerate"]["tokens_per_s"]
    what = "accelerate's load_checkpoint_and_dispatch against its from_pretrained, one run"
    bound = (results["offload"]["limit"] + MARGIN) / 1e6
    return [
        Line(what, found["tokens_per_s"], other, "tokens/s"),
        Line("peak of accelerate's load_checkpoint_and_dispatch", found["peak"] / 1e6, bound, "MB"),
    ]


def _load(results: dict) -> list[Line]:
    if (found := results.get("load")) is None:
        return []
    bound = (found["packed_bytes"] + MARGIN) / 1e6
    fly, stored = found["on the fly"], found["checkpoint"]
    lines = []
    if (quanto := found.get("quanto")) is not None:
        goal = Goal("<=", 0.5)
        lines += [
            Line("load, Q4_0 on the fly, against quanto int4", fly["load_s"], quanto["load_s"], "s", goal),
            Line("load to first token, Q4_0 on the fly, against quanto int4", fly["first_s"], quanto["first_s"], "s"),
            Line("peak of loading, quanto int4", quanto["peak"] / 1e6, bound, "MB"),
        ]
    return [
        *lines,
        Line("load, quantized checkpoint, against on the fly", stored["load_s"], fly["load_s"], "s", Goal("<=", 0.5)),
        Line("load to first token, quantized checkpoint, against on the fly", stored["first_s"], fly["first_s"], "s"),
        Line("peak of loading, Q4_0 on the fly", fly["peak"] / 1e6, bound, "MB", Goal("<=", 1.0)),
        Line("peak of loading, quantized checkpoint", stored["peak"] / 1e6, bound, "MB", Goal("<=", 1.0)),
        Line("the same, and the first token", stored["peak_first"] / 1e6, bound, "MB"),
    ]


def _pool(results: dict) -> list[Line]:
    if (found := results.get("pool")) is None:
        return []
    scans = {
        "scan": "cyclic scan of 60 weights, half may stay: read per pass, of all bytes",
        "scan, reading ahead": "the same, reading ahead",
        "model": "generation, half of the model may stay: read per token, of all bytes",
        "model, no readahead": "the same, readahead off",
    }
    return [
        Line("pool: acquire and release of a resident value", found["hit_us"], 10.0, "us", Goal("<=", 1.0)),
        *(Line(words, found[name], 0.55, "", Goal("<=", 1.0)) for name, words in scans.items()),
    ]


def _export(results: dict) -> list[Line]:
    if (found := results.get("export")) is None:
        return []
    bound = (found["limit"] + MARGIN) / 1e6
    return [
        Line("export to Q4_0 under the limit, peak", found["peak"] / 1e6, bound, "MB", Goal("<=", 1.0)),
        Line("export to Q4_0 under the limit, wall, one run", found["seconds"], 0, "s"),
    ]


def _seven_b(results: dict) -> list[Line]:
    if (found := results.get("seven_b")) is None:
        return []
    goal = Goal("<=", 1.0)
    return [
        Line("7 B: `t2n-hf quantize`, peak of the process", found["quantize_peak"] / 1e6, 8000, "MB", goal),
        Line("7 B: loading and 10 tokens, peak of the process", found["generate_peak"] / 1e6, 8000, "MB", goal),
    ]
