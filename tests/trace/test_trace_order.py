"""Graphs are in the order of use, so that the same model gives the same text in every process."""

import os
import subprocess
import sys

import pytest
import torch
from torch import fx

from t2n_hf.trace.passes.order import order_by_use

aten = torch.ops.aten


def graph_of(order):
    """exp(x) - sin(y), whose parts are made in `order`."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    made = {}
    for name in order:
        target, argument = {"exp": (aten.exp.default, x), "sin": (aten.sin.default, y), "idle": (aten.cos.default, x)}[
            name
        ]
        made[name] = graph.call_function(target, (argument,), name=name)
    graph.output((graph.call_function(aten.sub.Tensor, (made["exp"], made["sin"]), name="sub"),))
    return graph


def names(graph):
    return [node.name for node in graph.nodes]


@pytest.mark.parametrize("order", [("exp", "sin", "idle"), ("sin", "idle", "exp"), ("idle", "sin", "exp")], ids=str)
def test_what_is_needed_first_comes_first_whatever_was_made_first(order):
    graph = graph_of(order)
    order_by_use(graph)
    graph.lint()
    assert names(graph) == ["x", "y", "exp", "sin", "sub", "idle", "output"]
    assert not order_by_use(graph).changed


def test_arguments_that_are_deep_in_each_other_need_no_deep_stack():
    graph = fx.Graph()
    value = graph.placeholder("x")
    for _ in range(5000):
        value = graph.call_function(aten.exp.default, (value,))
    graph.output((value,))
    assert not order_by_use(graph).changed


EXPORTED = """
import hashlib, tarfile, warnings
warnings.simplefilter("ignore")
import torch, transformers
from t2n_hf import export_nnef
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=4, pad_token_id=0)
kinds = ["sliding_attention", "full_attention"] * 2
torch.manual_seed(0)
for make, options in (
    (transformers.Gemma3ForCausalLM, dict(num_key_value_heads=2, head_dim=8, sliding_window=8, layer_types=kinds)),
    (transformers.ModernBertModel, dict(cls_token_id=1, sep_token_id=2, layer_types=kinds)),
):
    config = make.config_class(**sizes, num_hidden_layers=4, **options)
    export_nnef(make(config).eval(), make.__name__, check=False)
    with open(f"{make.__name__}/model.nnef.tgz", "rb") as file:
        print(hashlib.sha256(file.read()).hexdigest())
"""


def test_a_model_with_layers_of_several_kinds_gives_the_same_archive_under_every_hash_seed(tmp_path):
    found = set()
    for seed in ("0", "1"):  # sets of the two names come in either order
        (tmp_path / seed).mkdir()
        environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", EXPORTED]
        run = subprocess.run(command, cwd=tmp_path / seed, env=environment, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        found.add(run.stdout)
    assert len(found) == 1, found
