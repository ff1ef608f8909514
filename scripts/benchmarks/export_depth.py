"""Capture and lower random Llamas of several depths, without writing weights: what a layer more costs.

Prints one JSON object: for each depth the seconds of every round, sorted, the lines of graph.nnef, and how many of them
declare a weight or an input. The depths take turns.
"""

import argparse
import json
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from t2n_hf.export.config import ExportConfig
from t2n_hf.export.graph import Graph, make_graph
from t2n_hf.hf.tasks import interface_of


def llama(layers: int) -> LlamaForCausalLM:
    """A model of hidden size 512 whose weights are zeros that take no memory of their own."""
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=4096,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    zero = torch.zeros(())
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, torch.nn.Parameter(zero.expand(parameter.shape), requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, torch.ones(buffer.shape, dtype=buffer.dtype), persistent=False)
    return model.eval()


def graph_of(model: LlamaForCausalLM) -> Graph:
    return make_graph(interface_of(model), ExportConfig(dtype="f32"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    models = {layers: llama(layers) for layers in arguments.layers}
    graph_of(llama(2))  # what the first capture of a process loads is no part of it
    seconds: dict[int, list[float]] = {layers: [] for layers in models}
    found: dict[int, dict] = {}
    for _ in range(arguments.rounds):
        for layers, model in models.items():
            start = time.perf_counter()
            graph = graph_of(model)
            seconds[layers].append(time.perf_counter() - start)
            lines = graph.text.splitlines()
            declared = sum("= variable<" in line or "= tract_core_external(" in line for line in lines)
            found[layers] = {"lines": len(lines), "variables": declared}
    print(json.dumps({layers: {**found[layers], "seconds": sorted(seconds[layers])} for layers in models}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
