"""Archives of RWKV, MiniMax and xLSTM: checked, generated from, of packed weights, and the model as it was."""

import numpy as np
import pytest
import torch
from models import build
from recurrent_models import quieter, recurrent
from transformers import AutoModelForCausalLM, OpenAIGPTConfig, OpenAIGPTLMHeadModel, xLSTMConfig, xLSTMForCausalLM

from t2n_hf import T2NConfig, TractModelForCausalLM, export_nnef
from t2n_hf.errors import InPlaceError
from t2n_hf.tract.runner import TractRunner

pytestmark = pytest.mark.tract

GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
IDS = torch.randint(3, 256, (1, 7), generator=torch.Generator().manual_seed(3))


def xlstm():
    """Wide enough that the config of transformers, which makes the cache of generate(), knows the size of a head."""
    config = {"vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 2, "num_heads": 4, "chunk_size": 4}
    return build(xLSTMForCausalLM, xLSTMConfig(**config, pad_token_id=0, bos_token_id=1, eos_token_id=2))


MODELS = {"rwkv": lambda: recurrent("rwkv"), "minimax": lambda: recurrent("minimax"), "xlstm": xlstm}


@pytest.mark.parametrize("name", MODELS)
def test_an_export_is_checked_leaves_the_model_alone_and_generates_what_transformers_does(name, tmp_path):
    model = MODELS[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    report = export_nnef(model, tmp_path / "export", format="dir")
    assert report.check == "passed"
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not getattr(model.base_model, "layers_are_rescaled", False)
    wanted = model.generate(IDS, **GREEDY)
    with TractModelForCausalLM.from_pretrained(report.folder, timeout_s=120) as exported:
        assert torch.equal(exported.generate(IDS, **GREEDY), wanted)
        # It goes on from what it has seen, and begins anew with another text.
        assert torch.equal(exported.generate(wanted, **GREEDY), model.generate(wanted, **GREEDY))
        other = IDS.flip(1)
        assert torch.equal(exported.generate(other, **GREEDY), model.generate(other, **GREEDY))


def test_a_model_that_keeps_nothing_takes_the_whole_text_at_each_call(tmp_path):
    config = OpenAIGPTConfig(vocab_size=256, n_embd=64, n_layer=2, n_head=4, n_positions=64)
    model = build(OpenAIGPTLMHeadModel, config)
    report = export_nnef(model, tmp_path / "export", batch=True, mask=True)
    assert report.check == "passed"
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[1, :3] = 0
    with TractModelForCausalLM.from_pretrained(report.folder, timeout_s=120) as exported:
        got = exported.generate(torch.cat([IDS, IDS * mask[1:]]), attention_mask=mask, **GREEDY)
    assert torch.equal(got[:1], model.generate(IDS, **GREEDY))
    assert torch.equal(got[1:, 3:], model.generate(IDS[:, 3:], **GREEDY))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"weights": "q4_0"}, {"dtype": "float16"}], ids=["q4_0", "f16"])
@pytest.mark.parametrize("name", MODELS)
def test_packed_and_half_weights_are_right_too(name, options, tmp_path):
    assert export_nnef(quieter(MODELS[name]()), tmp_path / "export", **options).check == "passed"


@pytest.mark.slow
def test_states_of_half_archives_see_small_changes(tmp_path):
    """What was seen decays by 1e-4 at each step, which f16 cannot say: the text would be remembered for ever."""
    model = quieter(recurrent("rwkv"))
    for block in model.rwkv.blocks:
        block.attention.time_decay.detach().fill_(-9.0)
    report = export_nnef(model, tmp_path / "export", dtype="float16", check=False)
    ids = np.random.default_rng(0).integers(3, 256, (1, 300))
    with TractRunner(report.archive, timeout_s=120) as runner:
        feedback = {name: name.replace("out_", "in_", 1) for name in runner.outputs if name.startswith("out_cache_")}
        wanted = runner.step({"input_ids": ids}, feedback)["outputs"]
        runner.reset()
        for at in range(ids.shape[1]):
            got = runner.step({"input_ids": ids[:, at : at + 1]}, feedback)["outputs"]
    assert np.abs(got.astype(float) - wanted).max() <= 1e-3 * np.abs(wanted).max()


@pytest.mark.slow
def test_weights_that_stay_on_disk_are_exported_undivided(tmp_path):
    model = recurrent("rwkv")
    model.save_pretrained(tmp_path / "model")
    wanted = model.generate(IDS, **GREEDY)  # now its weights are divided
    for source, name in ((tmp_path / "model", "from_disk"), (model, "divided")):
        report = export_nnef(source, tmp_path / name)
        assert report.check == "passed"
        with TractModelForCausalLM.from_pretrained(report.folder, timeout_s=120) as exported:
            assert torch.equal(exported.generate(IDS, **GREEDY), wanted)


def test_rwkv_in_bfloat16_is_neither_divided_nor_taken_to_be(tmp_path):
    model = recurrent("rwkv").to(torch.bfloat16)
    weight = model.rwkv.blocks[2].attention.output.weight
    before = weight.clone()
    assert export_nnef(model, tmp_path / "export").check == "passed"
    assert torch.equal(weight, before)
    assert not model.rwkv.layers_are_rescaled


@pytest.mark.slow
def test_packed_rwkv_is_exported_although_transformers_cannot_run_it(tmp_path):
    recurrent("rwkv").save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", quantization_config=T2NConfig())
    with pytest.raises(InPlaceError, match=r"would write to rwkv\.blocks\.0\.attention\.output\.weight"):
        model(input_ids=IDS)
    assert export_nnef(model, tmp_path / "export").check == "passed"
