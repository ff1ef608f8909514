"""Capture of a model as graphs of ATen calls, by torch.export under fake tensors: no weight is read.

`interface` says what is captured (made by `hf.tasks` or `export.module_interface`), `capture` does it, `captured` is
what comes of it. On the way: `fakes` stand in for weights, `flat` lays arguments flat, `pieces` traces each kind of
repeated layer once (`layers` tells kinds apart, `tracing` traces one, `piece_by_piece_serialize` makes calls flat and
back, with structures as text: `tree_text`), `passes` simplify the graphs.

`dispatching` makes a graph from one run instead: `python_tensor` wraps what flows through the function,
`dispatch_tracer` builds the graph, `trace_memory` keeps what was given as it is.
"""

from t2n_hf.trace.dispatch_tracer import DispatchTracer
from t2n_hf.trace.dispatching import dispatch_trace
from t2n_hf.trace.piece_by_piece_serialize import (
    choose_kwargs_for_dynamic_shapes,
    deserialize_args,
    deserialize_args_kwargs,
    extract_names_from_schema,
    make_copy,
    serialize_args,
    serialize_one,
    type_as_str_with_info,
)
from t2n_hf.trace.python_tensor import PythonTensor
from t2n_hf.trace.tree_text import tree_spec_as_name, tree_spec_from_name

__all__ = [
    "DispatchTracer",
    "PythonTensor",
    "choose_kwargs_for_dynamic_shapes",
    "deserialize_args",
    "deserialize_args_kwargs",
    "dispatch_trace",
    "extract_names_from_schema",
    "make_copy",
    "serialize_args",
    "serialize_one",
    "tree_spec_as_name",
    "tree_spec_from_name",
    "type_as_str_with_info",
]
