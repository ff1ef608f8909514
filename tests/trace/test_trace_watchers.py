"""Hooks that collect what layers give are run in the graph of the model, for each layer, pieces or not."""

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

from t2n_hf.export.module_interface import module_interface
from t2n_hf.trace.capture import capture
from t2n_hf.trace.captured import Captured
from t2n_hf.trace.pieces import LAYER_OP


class HiddenStates(nn.Module):
    """The hidden states of a model of transformers, which its layers' hooks collect."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 11}
        self.model = BertModel(BertConfig(**sizes, num_hidden_layers=3, max_position_embeddings=16))

    def forward(self, ids: torch.Tensor) -> list[torch.Tensor]:
        return list(self.model(ids, output_hidden_states=True).hidden_states)


def captured_of(module: nn.Module, mode: str) -> Captured:
    ids = torch.ones(1, 5, dtype=torch.int64)
    return capture(module_interface(module, args=(ids,)), torch.float32, mode)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["pieces", "auto"])
def test_hidden_states_of_layers_that_are_pieces_are_the_results_of_the_layers(mode: str) -> None:
    captured = captured_of(HiddenStates(), mode)
    calls = [node for node in captured.graph.nodes if node.target is LAYER_OP]
    results = [node for node, _ in captured.outputs]
    assert len(calls) == 3
    assert len(captured.pieces) == 1
    assert len(set(results)) == 4
    assert [node.args[0] for node in results[1:]] == calls


def test_a_capture_leaves_a_model_that_still_collects_hidden_states() -> None:
    module = HiddenStates()
    captured_of(module, "pieces")
    assert len(module(torch.ones(1, 5, dtype=torch.int64))) == 4


def test_hooks_that_come_in_pairs_run_inside_of_the_layer() -> None:
    module = HiddenStates()
    seen: list[str] = []
    layer = module.model.encoder.layer[0]
    layer.register_forward_pre_hook(lambda *_: seen.append("before"))
    layer.register_forward_hook(lambda *_: seen.append("after"))
    module.forward = lambda ids: module.model(ids).last_hidden_state  # type: ignore[method-assign]
    captured_of(module, "pieces")
    assert seen[:2] == ["before", "after"]
    assert seen.count("before") == seen.count("after")
