"""What a model costs does not grow with its depth, but for the lines of its weights and calls."""

import time

import pytest
import torch
import transformers as hf

from t2n_hf.export.config import ExportConfig
from t2n_hf.export.graph import make_graph
from t2n_hf.hf.tasks import interface_of


def llama(layers):
    config = hf.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        max_position_embeddings=128,
    )
    return hf.LlamaForCausalLM(config).eval()


def text_of(layers):
    return make_graph(interface_of(llama(layers)), ExportConfig(dtype="f32", capture="pieces")).text


def lines_with(text, words):
    return [line for line in text.splitlines() if words in line]


def test_a_layer_adds_its_weights_its_caches_and_one_call_to_the_text():
    short, long = text_of(2), text_of(6)
    assert len(lines_with(long, "variable<scalar>(")) - len(lines_with(short, "variable<scalar>(")) == 4 * 9
    assert len(lines_with(long, "external(")) - len(lines_with(short, "external(")) == 4 * 2
    assert len(lines_with(long, "= llama_decoder_layer(")) - len(lines_with(short, "= llama_decoder_layer(")) == 4
    body = short.partition("fragment llama_decoder_layer")[2].partition("graph network")[0]
    assert body == long.partition("fragment llama_decoder_layer")[2].partition("graph network")[0]
    assert long.count("\n") - short.count("\n") == 4 * (9 + 2 + 1)


def test_the_text_of_32_layers_has_fewer_than_500_lines():
    assert text_of(32).count("\n") < 500


@pytest.mark.slow
def test_the_graph_of_64_layers_costs_little_more_than_that_of_16():
    def cost(layers):
        model = llama(layers)
        start = time.process_time()
        make_graph(interface_of(model), ExportConfig(dtype="f32", capture="pieces"))
        return time.process_time() - start

    text_of(1)
    torch.set_num_threads(1)
    few, many = (min(cost(layers) for _ in range(3)) for layers in (16, 64))
    assert many < 3 * few  # a process that exports pays twice the smaller of them for its imports, once
