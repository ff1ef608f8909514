import pytest
import torch
import transformers
from torch import nn
from transformers import BarkSemanticConfig, BarkSemanticModel, DynamicCache, MptConfig, MptForCausalLM

from t2n_hf.errors import ConfigError
from t2n_hf.hf.tasks import auto_class, capture_settings, interface_of, usable_context
from t2n_hf.trace.capture import capture

BASE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
GPT = {"vocab_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
ENCODER = {k: v for k, v in BASE.items() if k != "num_key_value_heads"}
CAUSAL = {
    "llama": ("Llama", BASE),
    "qwen3": ("Qwen3", {**BASE, "head_dim": 32}),
    "mixtral": ("Mixtral", {**BASE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma3": ("Gemma3", {**BASE, "num_hidden_layers": 6, "sliding_window": 8, "head_dim": 16}),
    "gpt2": ("GPT2", GPT),
    "gpt-neox": ("GPTNeoX", ENCODER),
    "gpt-neo": (
        "GPTNeo",
        {
            "vocab_size": 64,
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 8,
            "max_position_embeddings": 200,
        },
    ),
    "phi3": ("Phi3", {**BASE, "original_max_position_embeddings": 32, "rope_parameters": LONGROPE}),
    "dynamic-rope": ("Llama", {**BASE, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
}
ENCODERS = {
    "bert": ("BertForMaskedLM", "BertConfig", ENCODER),
    "tagger": ("BertForTokenClassification", "BertConfig", ENCODER),
    "classifier": ("BertForSequenceClassification", "BertConfig", ENCODER),
    "roberta": ("RobertaModel", "RobertaConfig", {**ENCODER, "pad_token_id": 1, "type_vocab_size": 1}),
    "distilbert": (
        "DistilBertModel",
        "DistilBertConfig",
        {"vocab_size": 64, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128, "max_position_embeddings": 128},
    ),
    "decoder": ("LlamaModel", "LlamaConfig", BASE),
}


def causal(family, options):
    torch.manual_seed(0)
    config = getattr(transformers, {"Gemma3": "Gemma3TextConfig"}.get(family, f"{family}Config"))(**options)
    model = getattr(transformers, {"GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM"))(config).eval()
    return louder(model)


def encoder(cls, config, options):
    torch.manual_seed(0)
    return louder(getattr(transformers, cls)(getattr(transformers, config)(**options)).eval())


def louder(model):
    # The usual initialisation is so quiet that a wrong mask hardly shows.
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(5)
    return model


def exported(interface):
    with interface.context():
        program = torch.export.export(
            interface.module,
            interface.args,
            dict(interface.kwargs),
            dynamic_shapes=interface.dynamic_shapes,
            strict=False,
        )
    return program.module()


def empty_caches(interface):
    return [cache[:, :, :0] for cache in interface.args[1]]


@pytest.mark.parametrize(("family", "options"), CAUSAL.values(), ids=CAUSAL)
def test_an_exported_decoder_follows_the_model_at_lengths_that_were_not_traced(family, options):
    model = causal(family, options)
    interface = interface_of(model)
    module = exported(interface)
    ids = torch.randint(1, 64, (1, 40))
    native, caches, past = DynamicCache(config=model.config), empty_caches(interface), 0
    with torch.no_grad():
        for new in (20, 1, 3, 1, 7):
            piece = ids[:, past : past + new]
            expected = model(input_ids=piece, cache=native, use_cache=True).logits[:, -1:]
            logits, *caches = module(piece, caches)
            torch.testing.assert_close(logits, expected, rtol=2e-4, atol=2e-5)
            past += new
    assert all(cache.shape[2] == past for cache in caches)


@pytest.mark.parametrize(("cls", "config", "options"), ENCODERS.values(), ids=ENCODERS)
def test_an_exported_encoder_follows_the_model_on_padded_batches(cls, config, options):
    model = encoder(cls, config, options)
    interface = interface_of(model)
    module = exported(interface)
    ids = torch.randint(2, 64, (3, 11))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": (ids > 30).long()}
    given = {name: inputs[name] for name in interface.input_names}
    with torch.no_grad():
        (result,) = module(list(given.values()))
        expected = model(**given)[interface.output_names[0]]
    real = mask.bool() if expected.ndim == 3 else slice(None)
    torch.testing.assert_close(result[real], expected[real], rtol=1e-4, atol=1e-5)


def test_names_and_asserts_are_those_of_tracts_own_tools():
    interface = interface_of(causal(*CAUSAL["llama"]))
    assert interface.input_names == (
        "input_ids",
        "in_cache_key_0",
        "in_cache_value_0",
        "in_cache_key_1",
        "in_cache_value_1",
    )
    assert interface.output_names[:3] == ("outputs", "out_cache_key_0", "out_cache_value_0")
    assert interface.asserts == ("P >= 0", "S >= 1", "S+P < 129", "tg: S==1", "pp: P==0")
    assert interface.layers == ("model.model.layers",)
    assert interface.task == "text-generation"


@pytest.mark.parametrize(
    ("family", "layers"),
    [("llama", "model.model.layers"), ("gpt2", "model.transformer.h"), ("gpt-neox", "model.gpt_neox.layers")],
)
def test_the_layers_are_found_whatever_their_name(family, layers):
    assert interface_of(causal(*CAUSAL[family])).layers == (layers,)


def test_all_logits_gives_every_new_position():
    model = causal(*CAUSAL["llama"])
    interface = interface_of(model, all_logits=True)
    ids = torch.randint(1, 64, (1, 6))
    with torch.no_grad():
        logits = interface.module(ids, empty_caches(interface))[0]
        torch.testing.assert_close(logits, model(input_ids=ids).logits)


def test_a_model_that_cannot_keep_fewer_logits_has_them_cut_before_the_head():
    class Plain(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, past_key_values=None, use_cache=None, return_dict=None):
            return super().forward(input_ids=input_ids, cache=past_key_values, use_cache=use_cache)

    model = Plain(transformers.LlamaConfig(**BASE)).eval()
    interface = interface_of(model, task="text-generation")
    seen = []
    model.lm_head.register_forward_hook(lambda _m, inputs, _o: seen.append(inputs[0].shape[1]))
    ids = torch.randint(1, 64, (1, 6))
    with torch.no_grad():
        logits = interface.module(ids, empty_caches(interface))[0]
        torch.testing.assert_close(logits, model(input_ids=ids, use_cache=False).logits[:, -1:])
    assert seen == [1, 6]


def test_caches_have_the_type_of_the_archive():
    model = causal(*CAUSAL["llama"])
    assert interface_of(model, dtype=torch.float16).args[1][0].dtype == torch.float16
    assert interface_of(model, dtype="f16").args[1][0].dtype == torch.float16


def test_max_context_bounds_the_lengths():
    interface = interface_of(causal(*CAUSAL["llama"]), max_context=100)
    assert "S+P < 101" in interface.asserts
    assert interface.extra["max_context"] == 100


@pytest.mark.parametrize("asked", [0, 129], ids=["zero", "more-than-the-model-has"])
def test_a_context_that_the_model_does_not_have_is_refused(asked):
    with pytest.raises(ConfigError, match="1 to 128"):
        interface_of(causal(*CAUSAL["llama"]), max_context=asked)


def test_the_roberta_family_has_fewer_positions_than_its_table():
    assert usable_context(encoder(*ENCODERS["roberta"])) == 126


def test_a_bound_on_positions_is_found_by_the_name_that_a_family_has_for_it():
    model = MptForCausalLM(MptConfig(d_model=64, n_heads=4, n_layers=1, max_seq_len=48, vocab_size=64))
    assert usable_context(model) == 48
    bark = BarkSemanticModel(BarkSemanticConfig(hidden_size=64, num_heads=4, num_layers=1, block_size=40))
    assert usable_context(bark) == 40


def test_token_types_are_an_input_only_where_there_are_several():
    assert interface_of(encoder(*ENCODERS["bert"])).input_names == ("input_ids", "attention_mask", "token_type_ids")
    assert interface_of(encoder(*ENCODERS["roberta"])).input_names == ("input_ids", "attention_mask")


def test_capture_settings_are_undone_even_after_an_error():
    model = causal(*CAUSAL["phi3"]).train()
    model.model.norm.eval()
    rotary = model.model.rotary_emb
    before = (rotary.rope_type, rotary.inv_freq, dict(model.named_modules()))
    within = []

    def fail():
        within.append((model.training, model.model.rotary_emb is rotary))
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"), capture_settings(model):
        fail()
    assert within == [(False, False)]
    assert model.training
    assert not model.model.norm.training
    assert (rotary.rope_type, rotary.inv_freq, dict(model.named_modules())) == before


def test_hidden_states_are_collected_once_whatever_part_of_a_model_ran_before():
    model = causal(*CAUSAL["llama"])
    ids = torch.tensor([[1, 2, 3]])
    expected = model.model(ids, output_hidden_states=True).hidden_states
    with capture_settings(model):
        pass
    found = model.model(ids, output_hidden_states=True).hidden_states
    assert len(found) == len(expected) == model.config.num_hidden_layers + 1
    torch.testing.assert_close(found, expected)


def test_hooks_that_collect_hidden_states_go_with_the_capture_but_those_that_were_there():
    model = causal(*CAUSAL["llama"])
    ids = torch.tensor([[1, 2, 3]])

    def hooks():
        return {name: list(module._forward_hooks) for name, module in model.named_modules()}, set(vars(model.model))

    before = hooks()
    with capture_settings(model.model):
        assert hooks() != before
    assert hooks() == before
    # A part that was captured by itself does not collect its states twice with the model around it.
    assert len(model(ids, output_hidden_states=True).hidden_states) == model.config.num_hidden_layers + 1
    before = hooks()
    with capture_settings(model):
        pass
    assert hooks() == before


def test_experts_are_batched_only_while_capturing():
    model = causal(*CAUSAL["mixtral"])
    before = model.get_experts_implementation()
    with capture_settings(model):
        assert model.config._experts_implementation == "batched_mm"
    assert model.get_experts_implementation() == before


@pytest.mark.parametrize(
    ("architecture", "config", "task"),
    [
        ("LlamaForCausalLM", transformers.LlamaConfig(**BASE), "text-generation"),
        ("GPT2LMHeadModel", transformers.GPT2Config(**GPT), "text-generation"),
        ("BertModel", transformers.BertConfig(**ENCODER), "feature-extraction"),
        ("BertForMaskedLM", transformers.BertConfig(**ENCODER), "fill-mask"),
        ("BertForSequenceClassification", transformers.BertConfig(**ENCODER), "text-classification"),
        ("BertForTokenClassification", transformers.BertConfig(**ENCODER), "token-classification"),
    ],
)
def test_the_task_is_read_off_the_class_of_the_model(architecture, config, task):
    assert interface_of(getattr(transformers, architecture)(config)).task == task
    assert auto_class(task).__name__.startswith("AutoModel")


def test_what_is_not_supported_is_refused_with_a_list_of_what_is():
    small = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 64}
    with pytest.raises(ConfigError, match=r"several graphs \(encoder, decoder\)"):
        interface_of(transformers.T5ForConditionalGeneration(transformers.T5Config(**small)))
    image = transformers.ViTConfig(**ENCODER, image_size=32)
    with pytest.raises(ConfigError, match=r"ViTForMaskedImageModeling.*text-generation"):
        interface_of(transformers.ViTForMaskedImageModeling(image))
    with pytest.raises(ConfigError, match="unknown task 'summarize'"):
        interface_of(causal(*CAUSAL["llama"]), task="summarize")
    with pytest.raises(ConfigError, match="gives none of start_logits, end_logits"):
        interface_of(encoder(*ENCODERS["bert"]), task="question-answering")
    with pytest.raises(ConfigError, match="all_logits"):
        interface_of(encoder(*ENCODERS["bert"]), all_logits=True)


def test_a_text_generation_model_without_a_cache_is_refused():
    class NoCache(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None):
            return super().forward(input_ids=input_ids)

    with pytest.raises(ConfigError, match="takes no key/value cache"):
        interface_of(NoCache(transformers.LlamaConfig(**BASE)), task="text-generation")


def test_nothing_of_the_model_is_touched_by_describing_it():
    model = causal(*CAUSAL["llama"])
    names = [name for name, _ in model.named_parameters()]
    interface = interface_of(model)
    assert isinstance(interface.module, nn.Module)
    assert interface.weight_owner is model
    assert [name for name, _ in model.named_parameters()] == names


@pytest.mark.parametrize(
    ("family", "kinds"), [("mixtral", 1), ("gemma3", 1), ("gpt-neo", 2), ("gpt2", 1), ("gpt-neox", 1), ("phi3", 1)]
)
def test_each_kind_of_layer_is_captured_once(family, kinds):
    captured = capture(interface_of(causal(*CAUSAL[family])), torch.float32, "pieces")
    assert len(captured.pieces) == kinds
    targets = {str(node.target) for piece in captured.pieces for node in piece.graph.nodes}
    assert not any("grouped_mm" in target or "histc" in target for target in targets)


def test_a_model_whose_tokens_see_later_ones_is_refused():
    config = transformers.BertConfig(**ENCODER)
    with pytest.raises(ConfigError, match=r"tokens of this BertLMHeadModel see those behind them.*is_decoder=True"):
        interface_of(transformers.BertLMHeadModel(config))
    config.is_decoder = True
    assert interface_of(transformers.BertLMHeadModel(config)).task == "text-generation"


def test_a_model_that_keeps_chunks_is_refused():
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "attention_head_size": 16}
    axes = {"axial_pos_shape": [4, 4], "axial_pos_embds_dim": [16, 16], "attn_layers": ["local"]}
    model = transformers.ReformerModelWithLMHead(transformers.ReformerConfig(**sizes, **axes, is_decoder=True))
    with pytest.raises(ConfigError, match="ReformerModelWithLMHead cuts a text into chunks"):
        interface_of(model)


def test_a_model_that_wants_the_whole_text_beside_its_cache_is_refused():
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "dim_head": 16, "dim_ff": 32}
    model = transformers.CpmAntForCausalLM(transformers.CpmAntConfig(**sizes, num_hidden_layers=1))
    with pytest.raises(ConfigError, match="CpmAntForCausalLM wants the whole text in each call"):
        interface_of(model)


def test_a_decoder_of_several_codebooks_is_refused_by_name():
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 16}
    model = transformers.MusicgenForCausalLM(transformers.MusicgenDecoderConfig(**sizes, num_codebooks=3))
    with pytest.raises(ConfigError, match="MusicgenForCausalLM takes a token of each of its 3 codebooks"):
        interface_of(model)


@pytest.mark.parametrize(("encoder", "decoder"), [(1, 2), (3, 1)])
def test_a_decoder_alone_has_a_cache_for_each_of_its_own_layers(encoder, decoder):
    sizes = {"vocab_size": 32, "d_model": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = transformers.BartForCausalLM(
        transformers.BartConfig(**sizes, encoder_layers=encoder, decoder_layers=decoder)
    )
    caches = [name for name in interface_of(model).input_names if name.startswith("in_cache_key")]
    assert caches == [f"in_cache_key_{number}" for number in range(decoder)]
