"""Capture by a dispatch trace: of what torch.export refuses, at the shapes of the example and nothing else."""
# ruff: noqa: ANN401 - arguments and results are pytrees

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from t2n_hf.errors import CaptureError, T2NError
from t2n_hf.trace.captured import Captured
from t2n_hf.trace.dispatch_tracer import DispatchTracer
from t2n_hf.trace.fakes import fake_weights
from t2n_hf.trace.flat import FlatInterface
from t2n_hf.trace.interface import Interface
from t2n_hf.trace.passes.outs import copy_outs
from t2n_hf.trace.passes.writes import refuse_kept_writes
from t2n_hf.trace.recurrent import RecurrentLayersKept
from t2n_hf.trace.swap import tensors_of
from t2n_hf.trace.trace_memory import TraceMemory

__all__ = ["capture_by_dispatch", "result_by_dispatch"]


def capture_by_dispatch(interface: Interface, flat: FlatInterface, name_weight: Callable[[str], str]) -> Captured:
    """Run the interface's module once on its example, weights by their shapes, and take what it did as its graph.

    Lengths are those of the example: `Captured.fixed_shapes` is set, symbols and asserts are gone. The module may look
    at values that do not depend on a weight; `Captured.reads` says where it looked at some that depend on an input: for
    inputs that would answer otherwise the graph does not hold. What is drawn at random, and what values give a shape,
    is a constant of the graph if it depends on no input; draws begin at one seed, so that captures are alike.

    Args:
        interface: what is captured; its weights are fake while this runs.
        flat: the same, laid flat.
        name_weight: gives a weight's name from its name inside `flat.module`.

    Raises:
        CaptureError: the module needs values that depend on a weight, or does something that a graph cannot say.
    """
    tracer = DispatchTracer(fold_known=True)
    graph = _trace(tracer, flat.module, (_example(interface, flat, tracer.memory),), {})
    copy_outs(graph)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    weights, constants, names = _lifted(graph, tracer.attributes, name_weight)
    refuse_kept_writes(graph, {**weights, **names})
    results: Any = next(node for node in graph.nodes if node.op == "output").args[0]
    return Captured(
        graph=graph,
        inputs=list(zip(inputs, interface.input_names, strict=True)),
        outputs=list(zip(results, interface.output_names, strict=True)),
        weights=weights,
        constants=constants,
        constant_names=names,
        symbols={},
        fixed_shapes=True,
        reads=tuple(dict.fromkeys(map(str, tracer.reads))),
    )


def result_by_dispatch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
    """The result of a module by shapes alone, for one that looks at values: a pytree of fake tensors.

    `dtype` is that of its weights, of which no value is read. Raises CaptureError as `capture_by_dispatch`.
    """
    tracer = DispatchTracer(fold_known=True)
    with fake_weights(module, dtype):
        tracer.memory.adopt(tensors_of(module).values())
        graph = _trace(tracer, module, args, kwargs)
    results: Any = next(node for node in graph.nodes if node.op == "output").args[0]
    leaves = [leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf for leaf in results]
    return pytree.tree_unflatten(leaves, tracer.out_spec)


def _trace(tracer: DispatchTracer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Graph:
    # Operators are kept whole, as torch.export keeps them.
    with torch.inference_mode(), RecurrentLayersKept(), torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        try:
            return tracer.trace(module, args, kwargs)
        except T2NError:
            raise
        except Exception as error:
            name = type(getattr(module, "module", module)).__name__
            raise CaptureError(f"{name} cannot be traced at fixed shapes: {type(error).__name__}: {error}") from error


def _example(interface: Interface, flat: FlatInterface, memory: TraceMemory) -> list[torch.Tensor]:
    """The example's tensors, in the dtypes of the capture; those without values stay without."""
    memory.adopt(tensors_of(interface.module).values())
    given = [leaf for leaf in pytree.tree_leaves((interface.args, dict(interface.kwargs))) if _is_tensor(leaf)]
    tensors = []
    for leaf, like in zip(given, flat.tensors, strict=True):
        if isinstance(leaf, FakeTensor) or leaf.is_meta:
            tensors.append(memory.described(like))
        else:
            tensors.append(leaf.detach().cpu().to(like.dtype))
    return tensors


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor)


def _lifted(
    graph: fx.Graph, attributes: dict[str, Any], name_weight: Callable[[str], str]
) -> tuple[dict[fx.Node, str], dict[fx.Node, torch.Tensor], dict[fx.Node, str]]:
    """Make placeholders of the graph's attributes: weights by name, constants with their values, names of these."""
    weights: dict[fx.Node, str] = {}
    constants: dict[fx.Node, torch.Tensor] = {}
    names: dict[fx.Node, str] = {}
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        target = str(node.target)
        with graph.inserting_before(first):
            lifted = graph.placeholder(node.name)
        lifted.meta = node.meta
        value = attributes[target]
        if isinstance(value, FakeTensor):
            weights[lifted] = name_weight(target)
        else:
            constants[lifted], names[lifted] = value, name_weight(target)
        node.replace_all_uses_with(lifted)
        if node is first:
            first = node.next
        graph.erase_node(node)
    return weights, constants, names
