"""What an exported model generates is what the model generates in PyTorch."""

import pytest
import torch
from models import m1, m3, m4, m5, m6, m10, prompt

from t2n_hf.errors import ConfigError
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


def test_batches_with_padding_on_the_left_equal_those_of_pytorch_and_on_the_right_they_are_refused(tmp_path):
    model = louder(m1())
    export_nnef(model, tmp_path / "export", check=False, format="dir", batch=True, mask=True)
    ids, mask = torch.cat([prompt(9), prompt(9, seed=1), prompt(9, seed=2)]), torch.ones(3, 9, dtype=torch.int64)
    mask[0, :4] = mask[1, :7] = 0
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with TractModelForCausalLM.from_pretrained(tmp_path / "export", timeout_s=120) as exported:
        expected = model.generate(ids, attention_mask=mask, **options)
        assert torch.equal(exported.generate(ids, attention_mask=mask, **options), expected)
        with pytest.raises(ConfigError, match=r"0 at the last token of rows \[0, 1\].*padding_side='left'"):
            exported.generate(ids, attention_mask=mask.flip(1), **options)
