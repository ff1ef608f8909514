"""The lines of the export benchmark's table, from its results."""

from benchmarks.table import Goal, Row

SPEEDS = {"f32": 10, "q4_0": 18}


def rows_of(results: dict) -> list[Row]:
    """Every comparison whose measurement is in `results`, in reading order."""
    rows: list[Row] = []
    for kind in SPEEDS:
        rows += _export(results, kind) + _graph(results, kind) + _tract(results, kind)
    return rows + _half(results) + _scale(results) + _quality(results) + _torch(results)


def _at_most(ratio: float) -> Goal:
    return Goal("<=", ratio)


def _export(results: dict, kind: str) -> list[Row]:
    if (found := results.get(f"export {kind}")) is None:
        return []
    peak = [found[side]["peak_rss_bytes"] / 1e6 for side in ("ours", "theirs")]
    wall, times = [found[side]["wall_s"] for side in ("ours", "theirs")], SPEEDS[kind]
    return [
        Row(f"export {kind}, wall", *wall, "s", f">= {times}x faster", _at_most(1 / times)),
        Row(f"export {kind}, peak RSS", *peak, "MB", "<= 480 MB", most=480),
    ]


def _graph(results: dict, kind: str) -> list[Row]:
    if (found := results.get(f"graph ours {kind}")) is None:
        return []
    other, own = results[f"graph theirs {kind}"], results["weight_bytes"][kind]
    return [
        Row(f"graph.nnef {kind}, lines", found["lines"], other["lines"], "", "<= 500", most=500),
        Row(f"graph.nnef {kind}, size", found["bytes"] / 1e3, other["bytes"] / 1e3, "kB", "<= 70 kB", most=70),
        Row(
            f"archive {kind} against its weights",
            found["archive_bytes"] / 1e6,
            own / 1e6,
            "MB",
            "within 1 %",
            _at_most(1.01),
        ),
    ]


def _tract(results: dict, kind: str) -> list[Row]:
    if (found := results.get(f"tract ours {kind}")) is None:
        return []
    other = results[f"tract theirs {kind}"]
    rows = [Row(f"tract load {kind}, CPU", found["load_cpu_s"], other["load_cpu_s"], "s", "<= 0.9x", _at_most(0.9))]
    for past, seconds in found["step_cpu_s"].items():
        what, pair = f"tract step {kind} P={past}, CPU", (seconds * 1e3, other["step_cpu_s"][past] * 1e3)
        times = 0.95 if past == "0" else 1.1
        goal = (f"speed >= {times}x", _at_most(1 / times)) if kind == "q4_0" else ("",)
        rows.append(Row(what, *pair, "ms", *goal))
    return rows


def _half(results: dict) -> list[Row]:
    if "tract ours f16" not in results:
        return []
    pair = [results[f"tract ours {kind}"]["step_cpu_s"]["0"] * 1e3 for kind in ("f16", "f32")]
    return [Row("tract step f16 against our f32, P=0", *pair, "ms", "f16 >= 1.5x faster", _at_most(1 / 1.5))]


def _scale(results: dict) -> list[Row]:
    rows = []
    if "depth" in results:
        by_depth = {int(layers): found for layers, found in results["depth"].items()}
        seconds = {layers: found["seconds"][len(found["seconds"]) // 2] for layers, found in by_depth.items()}
        rows += [
            Row(
                "graph of a Llama of 64 layers against 16, without weights",
                seconds[64],
                seconds[16],
                "s",
                "<= 1.3x",
                _at_most(1.3),
            ),
            Row("graph.nnef of a Llama of 32 layers, lines", by_depth[32]["lines"], 520, "", "< 1x", most=519),
            Row(
                "lines of a further layer, its variables, inputs and a call",
                *_line_growth(by_depth),
                "",
                "1x",
                _at_most(1),
            ),
            Row("t2n-hf --help", results["help_s"], 3, "s", "< 1x", _at_most(1)),
        ]
    for kind in ("q4_0", "f16"):
        if (found := results.get(f"size {kind}")) is not None:
            allowed = found["capture_s"] + 2 * found["copy_s"]
            what, goal = f"export of a 1.1 B Llama to {kind}", ("<= 1x", _at_most(1))
            rows += [
                Row(f"{what}, against capture and twice cp of both sides", found["export_s"], allowed, "s", *goal),
                Row(f"{what}, peak RSS", found["peak_rss_bytes"] / 1e6, 550, "MB", *goal),
            ]
    return rows + _zoo(results)


def _line_growth(by_depth: dict[int, dict]) -> tuple[float, float]:
    """Lines that a layer adds, and those of its variables, the inputs of its cache and one call."""
    few, many = by_depth[16], by_depth[64]
    return (many["lines"] - few["lines"]) / 48, (many["variables"] - few["variables"]) / 48 + 1


def _zoo(results: dict) -> list[Row]:
    if (found := results.get("zoo")) is None:
        return []
    done = {side: {name for name, seconds in found[side].items() if seconds} for side in ("ours", "theirs")}
    both = sorted(done["ours"] & done["theirs"])
    mean = [sum(found[side][name] for name in both) / len(both) for side in ("ours", "theirs")]
    total = len(found["ours"])
    return [
        Row(
            f"export of a decoder, mean over the {len(both)} of {total} that both export",
            *mean,
            "s",
            "<= 0.5x",
            _at_most(0.5),
        ),
        Row(f"decoders of the zoo that are exported, of {total}", *map(len, done.values()), "", "published"),
    ]


def _quality(results: dict) -> list[Row]:
    if "cosine" not in results:
        return []
    kl = [results[f"kl {side}"]["kl"] for side in ("ours", "theirs")]
    cosine = [results["cosine"][side] for side in ("ours", "theirs")]
    exact, fast = results["exact tokens"], results["kl fast"]
    return [
        Row("KL of Q4_0 to the source, SmolLM2", *kl, "nats", "<= 0.85x", _at_most(0.85)),
        Row("embedding cosine distance, MiniLM", *cosine, "", "<= 0.85x", _at_most(0.85)),
        Row("exact path, prompts with equal greedy tokens", exact["equal"], exact["prompts"], "", "all", Goal(">=", 1)),
        Row("KL of the fast path to the exact one, f32 model", fast["kl"], 1e-3, "nats", "<= 1e-3", _at_most(1)),
        Row("fast path, top-1 agreement with exact, f32 model", fast["top1"], 1.0, "", "published"),
    ]


def _torch(results: dict) -> list[Row]:
    dense = results.get("torch dense bf16")
    rows = []
    for name, model in (("q4_0 fast", "bf16"), ("q4_0 fast f32", "f32")):
        if dense and (found := results.get(f"torch {name}")):
            pair = (found["tokens_per_s"], dense["tokens_per_s"])
            what = f"PyTorch decode, fast path in a {model} model, against dense bf16"
            rows.append(Row(what, *pair, "tokens/s", ">= 2x", Goal(">=", 2)))
    return rows
