"""Draw memory over time as PNG: `loading_plots.py RESULTS.json FOLDER`.

Needs matplotlib, which is in the environment of scripts/baselines/environment_loading.
"""

import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

MB = 1e6
MARGIN = 150


def draw(name: str, samples: list[dict[str, float]], limit: int, out: Path) -> None:
    figure, axes = plt.subplots(figsize=(8, 4.4), dpi=110)
    times = [one["t"] for one in samples]
    axes.plot(times, [(one["anon"] + one["file"]) / MB for one in samples], label="RSS over the interpreter's own")
    axes.plot(times, [one["anon"] / MB for one in samples], label="of that anonymous", linewidth=0.8)
    axes.plot(times, [one["pool"] / MB for one in samples], label="the pool's counter")
    axes.axhline(limit / MB, color="black", linewidth=1, label="max_memory")
    axes.axhline(limit / MB + MARGIN, color="black", linewidth=1, linestyle=":", label=f"and {MARGIN} MB")
    axes.set(xlabel="seconds, from before loading", ylabel="MB", title=f"1.1 B Llama, {name}, 25 % of its bf16 bytes")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncol=3)
    figure.tight_layout()
    figure.savefig(out)


def main() -> int:
    traced = json.loads(Path(sys.argv[1]).read_text())["plots"]
    for name in ("q4_0", "bf16"):
        draw(name, traced[name], traced["limit"], Path(sys.argv[2]) / f"memory-{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
