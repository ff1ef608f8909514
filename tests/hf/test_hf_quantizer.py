import copy
import gc
import warnings

import models
import pytest
import torch
from torch import nn

from t2n_hf import T2NConfig
from t2n_hf.errors import QuantizationError, StorageError
from t2n_hf.tensor.opaque import OpaqueTensor
from t2n_hf.tensor.quant.q4_0 import QTensorTractScaleOnly
from t2n_hf.tensor.transposed import TransposedTensor


def load(model, folder, quantization=None, **options):
    quantization = quantization or T2NConfig()
    return type(model).from_pretrained(folder, dtype="auto", quantization_config=quantization, **options)


def logits(model, length=12):
    with torch.no_grad():
        return model(models.prompt(length)).logits


def dense_twin(make, packed):
    """The model that holds the values of `packed`, as plain parameters set by name."""
    twin = make()
    values = {name: p.to_base_tensor() for name, p in packed.named_parameters() if isinstance(p, OpaqueTensor)}
    with torch.no_grad():
        for name, value in values.items():
            twin.get_parameter(name).copy_(value)
    twin.config._experts_implementation = "eager"
    return twin


ALL = ["m1", "m2", "m3", "m4", "m4_qwen3", "m5", "m6", "m7", "m8", "m10"]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.filterwarnings("ignore:.*falling back to its reference")
def test_a_packed_model_computes_what_its_dequantized_values_give(name, tmp_path):
    make = getattr(models, name)
    source = make()
    packed = load(source, models.saved(source, tmp_path))
    planned = {n for n, choice in packed.hf_quantizer.plan.items() if choice.format is not None}
    ours = {n for n, p in packed.named_parameters() if isinstance(p, (QTensorTractScaleOnly, TransposedTensor))}
    assert planned == ours != set()
    expected = logits(dense_twin(make, packed))
    tolerance = 0.05 if source.dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(logits(packed), expected, atol=tolerance, rtol=tolerance)
    assert packed.dtype == source.dtype


def test_values_are_those_of_an_independent_implementation(tmp_path):
    import gguf
    import numpy as np

    source = models.m2()
    packed = load(source, models.saved(source, tmp_path))
    weight = source.model.layers[0].mlp.up_proj.weight.detach().numpy()
    blocks = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q4_0)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q4_0)
    ours = packed.model.layers[0].mlp.up_proj.weight.to_base_tensor().numpy()
    assert np.abs(ours - weight).max() <= np.abs(expected - weight).max() * 1.01
    assert np.mean(ours == expected) > 0.99  # where a value is half way, either neighbour is right


def test_shards_are_quantized_too(tmp_path):
    source = models.m2()
    folder = models.saved(source, tmp_path, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    whole = load(source, models.saved(source, tmp_path))
    assert torch.equal(logits(load(source, folder)), logits(whole))


def test_the_rest_has_the_dtype_that_was_asked_for(tmp_path):
    source = models.m1()
    folder = models.saved(source, tmp_path)
    packed = type(source).from_pretrained(folder, dtype=torch.bfloat16, quantization_config=T2NConfig())
    assert {p.dtype for p in packed.parameters()} == {torch.bfloat16}
    full = load(source, folder)
    for (name, ours), theirs in zip(packed.named_parameters(), full.parameters(), strict=True):
        if isinstance(ours, QTensorTractScaleOnly):
            # Quantized from the values as they are stored, not after they were rounded to bfloat16.
            mine, other = (t.to_offload_state()["tensors"]["q4_0"] for t in (ours, theirs))
            assert torch.equal(mine, other), name


def test_fast_computes_near_exact(tmp_path):
    source = models.m1()
    folder = models.saved(source, tmp_path)
    exact, fast = load(source, folder), load(source, folder, T2NConfig(compute="fast"))
    assert fast.model.layers[0].mlp.up_proj.weight.compute == "fast"
    torch.testing.assert_close(logits(fast), logits(exact), atol=0.1, rtol=0.1)


@pytest.mark.parametrize("options", [{"embeddings": "q4_0"}, {"lm_head": "q4_0"}], ids=["embeddings", "head"])
def test_a_tied_table_is_one_packed_tensor(options, tmp_path):
    source = models.m1()
    packed = load(source, models.saved(source, tmp_path), T2NConfig(**options))
    assert isinstance(packed.lm_head.weight, QTensorTractScaleOnly)
    assert packed.lm_head.weight is packed.model.embed_tokens.weight
    torch.testing.assert_close(logits(packed), logits(dense_twin(models.m1, packed)), atol=1e-4, rtol=1e-4)


def test_a_short_name_and_a_tag_mean_the_same(tmp_path):
    source = models.m1()
    folder = models.saved(source, tmp_path)
    short, tag = load(source, folder, T2NConfig("q4_0")), load(source, folder, T2NConfig("t2n_hf.q4_0.v1"))
    assert torch.equal(logits(short), logits(tag))


def test_one_source_tensor_is_alive_at_a_time(tmp_path):
    source = models.m2()
    folder = models.saved(source, tmp_path, max_shard_size="40KB")
    largest = max(p.nbytes for p in source.parameters())
    del source
    gc.collect()
    before = {id(t) for t in gc.get_objects() if issubclass(type(t), torch.Tensor)}
    live = []

    class Counting(QTensorTractScaleOnly):
        OFFLOAD_STATE_TAG = "tests.counting.v1"

        @classmethod
        def quantize(cls, tensor, *, dtype=None, name="", importance=None):
            found = {
                t.untyped_storage().data_ptr(): t.nbytes
                for t in gc.get_objects()
                if type(t) is torch.Tensor and id(t) not in before and t.is_floating_point() and t.device.type == "cpu"
            }
            live.append(sum(found.values()))
            return QTensorTractScaleOnly.quantize(tensor, dtype=dtype, name=name)

    type(models.m2()).from_pretrained(folder, dtype="auto", quantization_config=T2NConfig("counting"))
    assert len(live) == 14
    assert max(live) <= largest


def test_a_weight_with_nan_is_refused_by_name(tmp_path):
    source = models.m1()
    with torch.no_grad():
        source.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")
    folder = models.saved(source, tmp_path)
    with pytest.raises(QuantizationError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load(source, folder)
    load(source, folder, T2NConfig(modules_to_not_convert=["layers.1.mlp.up_proj"]))


def test_blocks_of_zeros_and_of_tiny_values_are_finite(tmp_path):
    source = models.m1()
    with torch.no_grad():
        weight = source.model.layers[0].mlp.up_proj.weight
        weight[0, :32] = 0
        weight[1, :32] = 1e-8
    ours = load(source, models.saved(source, tmp_path)).model.layers[0].mlp.up_proj.weight.to_base_tensor()
    assert torch.equal(ours[0, :32], torch.zeros(32))
    assert torch.isfinite(ours).all()
    assert ours[1, :32].abs().max() <= 2e-8


def test_columns_that_do_not_divide_stay_float_with_a_warning_and_a_reason(tmp_path):
    source = models.m9()
    folder = models.saved(source, tmp_path)
    with pytest.warns(UserWarning, match="only 0% of the values that could be quantized are: .*48"):
        packed = load(source, folder)
    assert torch.equal(logits(packed), logits(source))


def test_a_truncated_shard_is_named(tmp_path):
    source = models.m2()
    folder = models.saved(source, tmp_path, max_shard_size="40KB")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(StorageError, match=shard.name):
        load(source, folder)


def test_a_weight_of_another_shape_is_reported_as_transformers_does(tmp_path):
    source = models.m1()
    folder = models.saved(source, tmp_path)
    other = models.m1(intermediate_size=96)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        load(other, folder, config=other.config)


def test_adapters_beside_packed_weights_can_be_trained(tmp_path):
    source = models.m1()
    packed = load(source, models.saved(source, tmp_path))
    assert packed.hf_quantizer.is_trainable
    adapter = nn.Parameter(torch.zeros(64))
    handle = packed.model.layers[0].register_forward_pre_hook(lambda module, args: (args[0] + adapter, *args[1:]))
    loss = packed(models.prompt(), labels=models.prompt()).loss
    loss.backward()
    handle.remove()
    assert adapter.grad is not None
    assert adapter.grad.abs().max() > 0
    assert all(p.grad is None for p in packed.parameters() if isinstance(p, OpaqueTensor))


def test_a_loaded_model_can_be_copied(tmp_path):
    source = models.m1()
    packed = load(source, models.saved(source, tmp_path))
    copied = copy.deepcopy(packed)
    assert torch.equal(logits(copied), logits(packed))
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    assert copied.hf_quantizer is not packed.hf_quantizer
    assert copied.hf_quantizer.plan == packed.hf_quantizer.plan
    assert copied.get_memory_footprint() == packed.get_memory_footprint()
    saved = [models.saved(model, tmp_path) / "model.safetensors" for model in (packed, copied)]
    assert saved[0].read_bytes() == saved[1].read_bytes()


def test_the_footprint_counts_packed_bytes(tmp_path):
    source = models.m1()
    packed = load(source, models.saved(source, tmp_path))
    buffers = sum(b.nbytes for b in packed.buffers())
    values = sum(p.numel() for p in packed.parameters() if isinstance(p, QTensorTractScaleOnly))
    plain = sum(p.nbytes for p in packed.parameters() if not isinstance(p, OpaqueTensor))
    assert packed.get_memory_footprint() == values // 32 * 18 + plain + buffers
    assert packed.get_memory_footprint(return_buffers=False) == values // 32 * 18 + plain
    assert packed.num_parameters() == source.num_parameters()


def test_the_users_config_is_left_as_it_was(tmp_path):
    source = models.m1()
    config = T2NConfig(max_resident_bytes=100_000)
    before = config.to_json_string()
    packed = load(source, models.saved(source, tmp_path), config)
    models.saved(packed, tmp_path)
    assert config.to_json_string() == before
    assert config.tensors is None


def test_loading_warns_of_nothing(tmp_path):
    source = models.m1()
    folder = models.saved(source, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(source, folder)


@pytest.mark.parametrize("weights", ["q4_0", "q8_1", "ternary", "none"])
@pytest.mark.parametrize("name", ["m2", "m4"])
def test_a_model_can_be_loaded_on_meta_for_its_names_and_shapes(name, weights, tmp_path):
    source = getattr(models, name)()
    folder = models.saved(source, tmp_path)
    for given in ("meta", {"": "meta"}):
        model = load(source, folder, T2NConfig(weights), device_map=given)
        assert {n: (p.shape, p.is_meta) for n, p in model.named_parameters()} == {
            n: (p.shape, True) for n, p in source.named_parameters()
        }
        assert any(isinstance(p, OpaqueTensor) for p in model.parameters()) is (weights != "none")
