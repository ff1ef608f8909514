"""Passes: functions from a graph to (graph, changed); one per file; run twice they change nothing the second time."""

from collections.abc import Callable, Iterable
from typing import Any, Final

from torch import fx

from t2n_hf.trace.captured import CapturedGraph
from t2n_hf.trace.passes.aliases import drop_aliases, drop_idle_dropouts, drop_whole_copies
from t2n_hf.trace.passes.asserts import drop_asserts
from t2n_hf.trace.passes.dead_code import drop_dead_code
from t2n_hf.trace.passes.float_mask import float_masks
from t2n_hf.trace.passes.order import order_by_use
from t2n_hf.trace.passes.result import PassResult
from t2n_hf.trace.passes.rms_norm import fuse_rms_norm
from t2n_hf.trace.passes.rope import fuse_rope
from t2n_hf.trace.passes.views import join_views
from t2n_hf.trace.passes.vmaps import expand_vmaps
from t2n_hf.trace.passes.writes import replace_writes

__all__ = ["PASSES", "make_pure", "simplify"]

PASSES: Final[tuple[Callable[[fx.Graph], PassResult], ...]] = (
    drop_asserts,
    expand_vmaps,
    drop_idle_dropouts,
    replace_writes,
    drop_whole_copies,
    drop_aliases,
    drop_dead_code,  # what nobody uses must not keep others from being joined
    fuse_rms_norm,
    fuse_rope,
    float_masks,
    join_views,
    drop_dead_code,
    order_by_use,
)


def make_pure(captured: CapturedGraph) -> None:
    """Run the passes after which no call changes a tensor, gives one back, or only checks something."""
    writes = (drop_idle_dropouts, replace_writes, drop_whole_copies)
    _run(captured, (drop_asserts, expand_vmaps, *writes, drop_aliases, drop_dead_code))


def simplify(captured: CapturedGraph) -> None:
    """Run all passes over a captured graph, in place, and drop weights and constants that nothing uses any more."""
    _run(captured, PASSES)
    graph = captured.graph
    alive = set(graph.nodes)
    for stored in (captured.weights, captured.constants):
        for node in [node for node in stored if node not in alive or not node.users]:
            del stored[node]
            if node in alive:
                graph.erase_node(node)


def _run(captured: CapturedGraph, passes: Iterable[Callable[[fx.Graph], PassResult]]) -> None:
    graph = captured.graph
    changed = [run(graph).changed for run in passes]
    if any(changed):  # torch's check walks the whole graph
        graph.lint()
    results: Any = next(node for node in graph.nodes if node.op == "output").args[0]
    captured.outputs[:] = zip(results, [name for _, name in captured.outputs], strict=True)
