"""Archives of models with states, in tract, against transformers running whole sequences, in spans not traced."""

import numpy as np
import pytest
import torch
from models import SHAPE, build, m1
from recurrent_models import RECURRENT, WITHOUT_MASK, quieter, recurrent
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

from t2n_hf import TractModelForCausalLM, export_nnef
from t2n_hf.errors import ConfigError
from t2n_hf.hf.tasks import interface_of
from t2n_hf.trace import tracing
from t2n_hf.trace.capture import capture
from t2n_hf.tract.runner import TractRunner

pytestmark = pytest.mark.tract

IDS = torch.randint(3, 256, (1, 20), generator=torch.Generator().manual_seed(2))
# Prefill and steps, steps from nothing, prefills on a past.
SPANS = ((9, 1, 1), (1, 1, 1), (6,), (5, 4, 1, 2))
QUICK = ("mamba", "qwen3_next")


@torch.no_grad()
def compare(model, archive):
    with TractRunner(archive, timeout_s=300) as runner:
        feedback = {name: name.replace("out_", "in_", 1) for name in runner.outputs if name.startswith("out_cache_")}
        for spans in SPANS:
            runner.reset()
            at = 0
            for length in spans:
                got = runner.step({"input_ids": IDS[:, at : at + length].numpy()}, feedback)["outputs"][:, -1]
                at += length
                wanted = model(input_ids=IDS[:, :at], use_cache=False).logits[:, -1].numpy()
                assert np.abs(got - wanted).max() <= 1e-4 * np.abs(wanted).max(), (spans, at)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in RECURRENT]
)
def test_states_go_on_in_tract_as_in_one_call_of_transformers(name, tmp_path):
    model = recurrent(name)
    report = export_nnef(model, tmp_path / "export", check=False)
    compare(model, report.archive)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECURRENT)
def test_the_check_of_an_export_passes_with_batches_and_padding(name, tmp_path):
    report = export_nnef(recurrent(name), tmp_path / "export", batch=True, mask=name not in WITHOUT_MASK)
    assert report.check == "passed"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mamba2", "falcon_h1", "qwen3_next", "recurrent_gemma"])
def test_states_of_f16_archives_are_f32_and_go_on(name, tmp_path):
    """FalconH1 multiplies by numbers that are f32 in any archive: what goes into its convolution is f32 too."""
    report = export_nnef(quieter(recurrent(name)), tmp_path / "export", dtype="float16")
    assert report.check == "passed"
    with TractRunner(report.archive) as runner:
        dtypes = {name: spec.dtype for name, spec in runner.inputs.items()}
    assert {dtype for name, dtype in dtypes.items() if name.startswith("in_cache_state")} == {"float32"}
    assert {dtype for name, dtype in dtypes.items() if name.startswith("in_cache_conv")} == {"float16"}


def test_layers_that_keep_different_numbers_of_tensors_are_not_taken_for_each_other(tmp_path):
    kinds = ["conv", "conv", "full_attention", "conv", "conv", "full_attention"]
    model = build(Lfm2ForCausalLM, Lfm2Config(**SHAPE | {"num_hidden_layers": 6}, layer_types=kinds))
    captured = capture(interface_of(model), torch.float32, "pieces")
    assert [call.piece for call in captured.calls.values()] == [0, 0, 1, 0, 0, 1]
    compare(model, export_nnef(model, tmp_path / "export", check=False).archive)


def test_a_layer_of_states_is_traced_with_its_own_part_of_the_cache_at_once(monkeypatch):
    """One trace of each kind of layer; one that is given the tensors of another layer would have to be made again."""
    traces = []
    make_fx = tracing.make_fx
    monkeypatch.setattr(tracing, "make_fx", lambda *args, **options: traces.append(1) or make_fx(*args, **options))
    config = RwkvConfig(vocab_size=256, hidden_size=32, num_hidden_layers=5, rescale_every=0)
    captured = capture(interface_of(build(RwkvForCausalLM, config)), torch.float32, "pieces")
    assert [call.piece for call in captured.calls.values()] == [0, 1, 1, 1, 1]  # the first one has a norm more
    assert len(traces) == 2  # the second layer of a kind is run beside the recording of the first


def test_latent_attention_is_right_in_tract(tmp_path):
    config = DeepseekV3Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        max_position_embeddings=128,
    )
    model = build(DeepseekV3ForCausalLM, config)
    compare(model, export_nnef(model, tmp_path / "export", check=False).archive)


def padded(rows=3, length=9):
    ids = torch.randint(3, 256, (rows, length), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : 3 * row] = 0
    return ids * mask, mask


GREEDY = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.mark.parametrize(
    "make", [m1, pytest.param(lambda: recurrent("jamba"), marks=pytest.mark.slow)], ids=["llama", "jamba"]
)
def test_batches_with_padding_generate_what_pytorch_does(make, tmp_path):
    model = make()
    ids, mask = padded()
    wanted = model.generate(ids, attention_mask=mask, **GREEDY)
    export = export_nnef(model, tmp_path / "export", batch=True, mask=True, check=False).folder
    with TractModelForCausalLM.from_pretrained(export) as loaded:
        got = loaded.generate(ids, attention_mask=mask, **GREEDY)
        assert torch.equal(got, wanted)
        # Another batch, of other sequences, then one that goes on from the first.
        assert torch.equal(loaded.generate(ids[:1], **GREEDY), wanted[:1])
        more = torch.cat([mask, torch.ones(3, 10, dtype=torch.int64)], dim=1)
        assert torch.equal(
            loaded.generate(got, attention_mask=more, **GREEDY), model.generate(got, attention_mask=more, **GREEDY)
        )


def test_sequences_of_one_length_need_no_mask(tmp_path):
    model = m1()
    ids, _ = padded()
    ids = ids.clamp(min=3)
    export = export_nnef(model, tmp_path / "export", batch=True, check=False).folder
    with TractModelForCausalLM.from_pretrained(export) as loaded:
        mask = torch.ones_like(ids)
        assert torch.equal(
            loaded.generate(ids, attention_mask=mask, **GREEDY), model.generate(ids, attention_mask=mask, **GREEDY)
        )
        with pytest.raises(ConfigError, match="takes sequences without padding; export with mask=True"):
            loaded.generate(ids, attention_mask=padded()[1], **GREEDY)


def test_a_mask_serves_one_sequence_too(tmp_path):
    model = m1()
    ids, mask = padded()
    report = export_nnef(model, tmp_path / "export", mask=True, all_logits=True)
    assert report.check == "passed"
    with TractModelForCausalLM.from_pretrained(report.folder) as loaded:
        got = loaded.generate(ids[2:], attention_mask=mask[2:], **GREEDY)
        assert torch.equal(got, model.generate(ids[2:], attention_mask=mask[2:], **GREEDY))
        with pytest.raises(ConfigError, match=r"one sequence at a time, .* or export with batch=True"):
            loaded.generate(ids, attention_mask=mask, **GREEDY)


def test_batches_of_other_modules_are_said_by_their_shapes(tmp_path):
    with pytest.raises(ConfigError, match="batch and mask are for transformers models"):
        export_nnef(torch.nn.Linear(2, 2), tmp_path / "export", example_args=(torch.zeros(1, 2),), batch=True)
