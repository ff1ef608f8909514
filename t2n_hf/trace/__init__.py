"""Capture of a model as graphs of ATen calls, by torch.export under fake tensors: no weight is read.

`interface` says what is captured (made by `hf.tasks` or `export.module_interface`), `capture` does it, `captured` is
what comes of it. What goes in: `fakes` stand in for weights, `flat` lays arguments flat and `alike` joins equal ones,
`lengths`, `tensor_lengths` and `distances` keep what is free, `recurrent` and `rewrites` let modules run other code.
For that `swap` puts tensors and methods in the place of a module's own, `function_variants` changes functions, `shapes`
runs a module without values, `undo` puts back what a forward changed.

Layers: `pieces` traces each kind once (`layers` tells kinds apart, `tracing` traces one, `watchers` are hooks around
it, `direct_call` remembers a call, `late_calls` keeps those like it beside the graph, `piece_by_piece_serialize` makes
calls flat and back, with structures as text: `tree_text`); `outline` finds them in a graph of the whole model instead,
with `call_names`; `same_graph` says which are one, of constants by their `digest`. `passes` simplify the graphs,
`inline_constants` names what is left.

`dispatching` makes a graph from one run instead (`capture_dispatch` of an interface): `python_tensor` wraps what flows
through the function, `dispatch_tracer` builds the graph, with lengths by `number_nodes`, and `trace_memory` keeps what
was given as it is.
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
