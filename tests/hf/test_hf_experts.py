"""Fused experts: quantized one at a time, computed one at a time, in every layout that models have."""

import gc

import models
import pytest
import torch
import transformers as hf

from t2n_hf import T2NConfig
from t2n_hf.errors import QuantizationError
from t2n_hf.tensor import OffloadedTensor, QTensorTractScaleOnly
from t2n_hf.tensor.opaque import materialised_counts, opaque_to_final_tensor
from t2n_hf.tensor.transposed import TransposedTensor

FEW = {**models.SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
ROUTED = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}


def gpt_oss():
    """Experts are (in, out), and fused in the checkpoint."""
    kinds = ["full_attention", "sliding_attention"]
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = hf.GptOssConfig(
        **{**FEW, "head_dim": 16, "intermediate_size": 64, "layer_types": kinds, "rope_parameters": rope}
    )
    return models.build(hf.GptOssForCausalLM, config)


def deepseek_v3():
    """A shared expert beside the fused ones, which a checkpoint has one by one."""
    options = {"num_key_value_heads": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, **ROUTED, **LATENT}
    return models.build(hf.DeepseekV3ForCausalLM, hf.DeepseekV3Config(**{**models.SHAPE, **options}))


def llama4():
    """Experts are (in, out), which only their shapes tell; computed by bmm."""
    options = {"num_experts_per_tok": 1, "head_dim": 16, "intermediate_size": 64, "intermediate_size_mlp": 64}
    return models.build(hf.Llama4ForCausalLM, hf.Llama4TextConfig(**{**FEW, **options}))


KINDS = {
    "mixtral": (models.m4, QTensorTractScaleOnly),
    "qwen3_moe": (models.m4_qwen3, QTensorTractScaleOnly),
    "gpt_oss": (gpt_oss, TransposedTensor),
    "deepseek_v3": (deepseek_v3, QTensorTractScaleOnly),
    "llama4": (llama4, TransposedTensor),
}


def load(source, folder, quantization=None, **options):
    options = {"dtype": "auto", **options}
    return type(source).from_pretrained(folder, quantization_config=quantization, **options).eval()


def stacks(model):
    return {name: p for name, p in model.named_parameters() if p.dim() == 3}


@pytest.fixture
def no_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("device_map", [None, {"": "disk"}], ids=["memory", "disk"])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_packed_and_computed_one_at_a_time(kind, device_map, tmp_path, no_gradients):
    make, expected = KINDS[kind]
    source = make()
    folder = models.saved(source, tmp_path)
    packed = load(source, folder, T2NConfig(), device_map=device_map)
    found = stacks(packed)
    assert len(found) == (2 if kind == "deepseek_v3" else 4)
    for stack in found.values():
        assert (stack.inner_class if isinstance(stack, OffloadedTensor) else type(stack)) is expected
    before = materialised_counts()
    logits = packed(models.prompt()).logits
    assert materialised_counts() == before
    for name, weight in packed.named_parameters():
        source.get_parameter(name).copy_(opaque_to_final_tensor(weight))
    torch.testing.assert_close(logits, source(models.prompt()).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_again_they_are_the_same(kind, tmp_path, no_gradients):
    source = KINDS[kind][0]()
    packed = load(source, models.saved(source, tmp_path), T2NConfig())
    again = load(source, models.saved(packed, tmp_path))
    assert {n: type(p) for n, p in stacks(again).items()} == {n: type(p) for n, p in stacks(packed).items()}
    assert torch.equal(again(models.prompt()).logits, packed(models.prompt()).logits)


@pytest.fixture
def only_new_objects():
    """Let gc.get_objects() give only objects that are made from now on."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_the_floats_of_one_expert_are_alive_at_a_time(kind, dtype, tmp_path, only_new_objects):
    source = KINDS[kind][0]()
    folder = models.saved(source, tmp_path)
    one_expert = max(p.nbytes // p.shape[0] for p in stacks(source).values())
    one_matrix = max(p.nbytes for p in source.parameters() if p.dim() == 2 and p.shape[0] != 256)
    stay = sum(p.nbytes for name, p in source.named_parameters() if name.endswith("_bias"))
    model_class = type(source)
    del source
    live, shapes = [], set()

    class CountingExperts(QTensorTractScaleOnly):
        OFFLOAD_STATE_TAG = "tests.counting_experts.v1"

        @classmethod
        def quantize(cls, tensor, *, dtype=None, name="", importance=None):
            tensors = [
                t for t in gc.get_objects() if type(t) is torch.Tensor and t.device.type == "cpu" and t.dim() > 1
            ]
            found = {t.untyped_storage().data_ptr(): t.nbytes for t in tensors if t.is_floating_point()}
            live.append(sum(found.values()))
            shapes.add(tuple(tensor.shape))
            return QTensorTractScaleOnly.quantize(tensor, dtype=dtype, name=name)

    model_class.from_pretrained(folder, dtype=dtype, quantization_config=T2NConfig("counting_experts"))
    assert {shape[0] for shape in shapes if len(shape) == 3} == {1}
    # Beside the expert, what it is joined from, or turned from; beside a matrix, what the loader has rounded it to.
    assert max(live) <= max(2 * one_expert, 1.5 * one_matrix) + stay


def test_an_expert_with_nan_is_refused_by_name(tmp_path):
    source = models.m4()
    with torch.no_grad():
        source.model.layers[1].mlp.experts.down_proj[2, 3, 5] = float("nan")
    folder = models.saved(source, tmp_path)
    with pytest.raises(QuantizationError, match=r"model\.layers\.1\.mlp\.experts\.down_proj has 1 values"):
        load(source, folder, T2NConfig())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_a_cast_while_loading_changes_nothing(stored, dtype, tmp_path):
    source = models.m4().to(stored)
    packed = load(source, models.saved(source, tmp_path), T2NConfig(), dtype=dtype)
    for name, stack in stacks(packed).items():
        floats = source.get_parameter(name).detach().to(dtype)
        assert stack.dtype == dtype
        assert torch.equal(stack.q4_0, QTensorTractScaleOnly.quantize(floats).q4_0)


def test_experts_that_are_stored_fused_are_read_one_by_one_before_they_are_rounded(tmp_path):
    source = gpt_oss()
    packed = load(source, models.saved(source, tmp_path), T2NConfig(), dtype=torch.bfloat16)
    for name, stack in stacks(packed).items():
        turned = source.get_parameter(name).detach().transpose(-1, -2).contiguous()
        assert stack.dtype == torch.bfloat16
        assert torch.equal(stack.inner.q4_0, QTensorTractScaleOnly.quantize(turned).q4_0)


def test_a_class_that_does_not_keep_rows_apart_quantizes_them_together(tmp_path):
    class Together(QTensorTractScaleOnly):
        OFFLOAD_STATE_TAG = "tests.together.v1"

        @classmethod
        def row_parts(cls, meta, shape):
            return frozenset()

    source = models.m4()
    packed = load(source, models.saved(source, tmp_path), T2NConfig("together"))
    for name, stack in stacks(packed).items():
        assert type(stack) is Together
        assert torch.equal(stack.q4_0, QTensorTractScaleOnly.quantize(source.get_parameter(name).detach()).q4_0)


def test_products_of_stacks_pass_gradients_on():
    experts = QTensorTractScaleOnly.quantize(torch.randn(3, 64, 32, generator=torch.Generator().manual_seed(0)))
    turned = TransposedTensor.over(experts)
    x, y = (torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    ours, theirs = torch.bmm(x, turned), torch.bmm(y, turned.to_base_tensor())
    torch.testing.assert_close(ours, theirs)
    ours.square().sum().backward()
    theirs.square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
