"""What an exported model generates is what the model generates in PyTorch."""

import pytest
import torch
from models import m1, m3, m4, m5, m6, m10, prompt

from t2n_hf.export import export_nnef
from t2n_hf.tract.model import TractModelForCausalLM

pytestmark = pytest.mark.tract

# Tokens generated: enough to leave a sliding window of 8, and to cross a LongRoPE switch at 32.
CASES = {"m1": (m1, 8), "m3": (m3, 8), "m4": (m4, 8), "m5": (m5, 16), "m6": (m6, 30), "m10": (m10, 8)}


def louder(model):
    # Random logits are nearly equal: without this the likeliest token hangs on rounding.
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4)
    return model


def greedy(model, ids, count):
    return model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)


@pytest.mark.parametrize(("make", "count"), CASES.values(), ids=CASES)
def test_greedy_tokens_equal_those_of_pytorch(make, count, tmp_path):
    model = louder(make())
    export_nnef(model, tmp_path / "export", check=False, format="dir")
    with TractModelForCausalLM.from_pretrained(tmp_path / "export", timeout_s=120) as exported:
        ids = prompt(11)
        expected = greedy(model, ids, count)
        assert torch.equal(greedy(exported, ids, count), expected)
        longer = torch.cat([expected, prompt(3, seed=2)], dim=1)
        assert torch.equal(greedy(exported, longer, 4), greedy(model, longer, 4))
