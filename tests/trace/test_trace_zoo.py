"""dispatch_trace over models of transformers: its graph gives what the model gives, exactly."""

import pytest
import torch
from torch import nn
from zoo import ZOO
from zoo.entry import Encoder, Generator, token_ids

from t2n_hf.trace import dispatch_trace

pytestmark = pytest.mark.filterwarnings("ignore")
QUICK = ("llama", "bert", "resnet", "mamba")


class Tensors(nn.Module):
    """A model that gives the tensors of its outputs by name."""

    def __init__(self, model, names, **options):
        super().__init__()
        self.model = model
        self.names = names
        self.options = options

    def forward(self, **inputs):
        result = self.model(**inputs, **self.options, return_dict=True)
        return {name: result[name] for name in self.names}


def called(subject):
    """A module and two sets of inputs of the same shapes."""
    if isinstance(subject, Generator | Encoder):
        size = subject.model.config.get_text_config().vocab_size
        ids = token_ids(2, 12, size)
        mask = torch.ones(2, 12, dtype=torch.int64)
        mask[1, -3:] = 0
        inputs = [{"input_ids": given, "attention_mask": mask} for given in (ids, ids.flip(1))]
        options = {"use_cache": False} if isinstance(subject, Generator) else {}
        output = "logits" if isinstance(subject, Generator) else subject.output
        return Tensors(subject.model, [output], **options), *inputs
    other = subject.inputs(subject.traced)
    changed = {k: v.flip(0) if v.shape and v.is_floating_point() else v for k, v in other.items()}
    return Tensors(subject.model, subject.outputs, **subject.options), other, changed


def check(name):
    module, inputs, others = called(ZOO[name].make())
    module.eval()
    with torch.inference_mode():
        traced = dispatch_trace(module, (), inputs)
        # A graph that was told values (how many tokens an expert takes) holds for the inputs that give them.
        for given in (inputs,) if traced.meta["reads"] else (inputs, others):
            torch.manual_seed(0)  # some draw at random
            expected = module(**given)
            torch.manual_seed(0)
            torch.testing.assert_close(traced(**given), expected, rtol=1e-5, atol=1e-5)
    assert dict(traced.named_parameters()).keys() <= dict(module.named_parameters(remove_duplicate=False)).keys()
    assert not any("constant" in name for name, _ in traced.named_parameters())


@pytest.mark.parametrize("name", QUICK)
def test_the_graph_of_a_model_gives_what_the_model_gives(name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ZOO if name not in QUICK])
def test_the_graph_of_any_model_gives_what_the_model_gives(name):
    check(name)
