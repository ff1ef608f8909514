"""What people do with a model once it is loaded, held to the same model with plain parameters."""

import copy
import threading

import models
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, TextIteratorStreamer

from t2n_hf import T2NConfig, materialize
from t2n_hf.errors import InPlaceError
from t2n_hf.hf.hooks import leases_of
from t2n_hf.tensor.offload import OffloadedTensor
from t2n_hf.tensor.opaque import OpaqueTensor

# Names of transformers that peft still uses, and what it says of adapters that are not to start at zero.
# For the whole module: filters that threads change are restored in the wrong order.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Passing `generation_config`"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*(tie_word_embeddings|gradient checkpointing|Merge).*:UserWarning"),
]
MEMORY, DISK = {"": "cpu"}, {"": "disk"}
# Two thirds of the matrices of one layer, or the tied table: everything else has to come and go.
BUDGET = 70_000
WAYS = [("none", DISK), ("q4_0", MEMORY), ("q4_0", DISK)]
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return models.saved(models.m1(num_hidden_layers=3), tmp_path_factory.mktemp("users"))


def load(folder, weights, device_map, **options):
    budget = BUDGET if device_map is DISK else None
    config = T2NConfig(weights, max_resident_bytes=budget, **options)
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", quantization_config=config, device_map=device_map)


@pytest.fixture(params=WAYS, ids=lambda way: f"{way[0]}-{'-'.join(way[1].values())}")
def pair(request, folder):
    """The model under test, and a plain one of the same values."""
    return load(folder, *request.param), materialize(load(folder, request.param[0], MEMORY))


def is_idle(model):
    pools = {p.pool for p in model.parameters() if isinstance(p, OffloadedTensor)} - {None}
    return all(pool.lease_count == 0 for pool in pools)


def generated(model, ids=None, **options):
    ids = models.prompt(10) if ids is None else ids
    mask = options.pop("attention_mask", torch.ones_like(ids))
    return model.generate(ids, attention_mask=mask, **{**GREEDY, **options})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3},
        {"prompt_lookup_num_tokens": 3},
        {"cache_implementation": "static"},
        {"num_return_sequences": 2, "num_beams": 2},
        {"use_cache": False},
    ],
    ids=str,
)
def test_every_way_to_decode_gives_the_tokens_of_a_plain_model(pair, options):
    model, plain = pair
    assert torch.equal(generated(model, **options), generated(plain, **options))
    assert is_idle(model)


def test_sampling_draws_the_tokens_of_a_plain_model(pair):
    drawn = []
    for model in pair:
        torch.manual_seed(3)
        drawn.append(generated(model, do_sample=True, top_k=20))
    assert torch.equal(*drawn)


def test_a_padded_batch_gives_the_tokens_of_a_plain_model(pair):
    model, plain = pair
    ids = models.prompt(10, batch=3)
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[2, :7] = 0
    assert torch.equal(generated(model, ids, attention_mask=mask), generated(plain, ids, attention_mask=mask))


def test_an_assistant_that_lives_on_disk_speeds_up_a_model_without_changing_its_tokens(pair, tmp_path):
    model, plain = pair
    draft = load(models.saved(models.m1(num_hidden_layers=1), tmp_path), "q4_0", DISK)
    assert torch.equal(generated(model, assistant_model=draft), generated(plain))
    assert is_idle(model)
    assert is_idle(draft)


def test_threads_that_generate_at_once_get_what_each_would_get_alone(pair):
    model, plain = pair
    prompts = [models.prompt(6 + i, seed=i) for i in range(3)]
    found = [None] * len(prompts)

    def run(place):
        found[place] = generated(model, prompts[place])

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ids, tokens in zip(prompts, found, strict=True):
        assert torch.equal(tokens, generated(plain, ids))
    assert is_idle(model)


class _Numbers:
    """The least a streamer needs of a tokenizer: each token is its number."""

    def decode(self, tokens, **_):
        return "".join(f"{int(token)} " for token in tokens)


def test_a_streamer_in_a_thread_says_each_token_as_it_is_made(pair):
    model, plain = pair
    ids = models.prompt(10)
    streamer = TextIteratorStreamer(_Numbers(), skip_prompt=True, timeout=60)
    thread = threading.Thread(target=generated, args=(model, ids), kwargs={"streamer": streamer})
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert [int(word) for word in text.split()] == generated(plain, ids)[0, ids.shape[1] :].tolist()


def adapted(model, **options):
    torch.manual_seed(1)  # of the adapters, which are random here: zero ones would change nothing
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False, **options)
    return peft.get_peft_model(model, config)


def gradients(model):
    ids = models.prompt(10)
    model.train()
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_learn_on_top_of_weights_that_are_packed_or_on_disk(pair, checkpointing):
    model, plain = (adapted(one) for one in pair)
    if checkpointing:
        for one in (model, plain):
            one.enable_input_require_grads()
            one.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            one.config.use_cache = False
    (loss, found), (wanted_loss, wanted) = gradients(model), gradients(plain)
    assert loss == pytest.approx(wanted_loss, rel=1e-6)
    assert found
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6)
    assert is_idle(model.base_model.model)


@pytest.mark.parametrize("device_map", [MEMORY, DISK], ids=["memory", "disk"])
def test_gradients_flow_to_adapters_whichever_path_computes(folder, device_map):
    fast = adapted(load(folder, "q4_0", device_map, compute="fast"))
    exact = adapted(load(folder, "q4_0", MEMORY))
    (loss, found), (wanted_loss, wanted) = gradients(fast), gradients(exact)
    assert loss == pytest.approx(wanted_loss, rel=0.05)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        cosine = torch.cosine_similarity(gradient.flatten(), wanted[name].flatten(), dim=0)
        assert cosine > 0.98, name


def test_a_step_of_an_optimizer_changes_adapters_and_nothing_else(pair):
    model = adapted(pair[0])
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    ids = models.prompt(10)
    frozen = pair[1](ids).logits
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    gradients(model)
    optimizer.step()
    assert all(not torch.equal(model.get_parameter(name), old) for name, old in before.items())
    model.eval()
    with model.disable_adapter():
        torch.testing.assert_close(model(ids).logits, frozen)


def test_an_adapter_is_merged_into_values_on_disk_but_packed_ones_say_what_to_do(pair):
    model, plain = (adapted(one).eval() for one in pair)
    ids = models.prompt(10)
    wanted = plain.merge_and_unload()(ids).logits
    if any(isinstance(p, OpaqueTensor) and getattr(p, "inner_class", type(p)) for p in model.parameters()):
        with pytest.raises(InPlaceError, match=r"q_proj.*materialize"):
            model.merge_and_unload()
        return
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(ids).logits, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("embeddings", [None, "q4_0"])
@pytest.mark.parametrize("device_map", [MEMORY, DISK], ids=["memory", "disk"])
@pytest.mark.parametrize("count", [251, 288])
def test_token_embeddings_can_be_resized(folder, device_map, embeddings, count):
    model = load(folder, "q4_0", device_map, embeddings=embeddings)
    plain = materialize(load(folder, "q4_0", MEMORY, embeddings=embeddings))
    kept = min(count, 256)
    for one in (model, plain):
        one.resize_token_embeddings(count, mean_resizing=False)
        assert one.config.vocab_size == count
        assert one.get_output_embeddings().weight is one.get_input_embeddings().weight
    assert model.get_input_embeddings().weight.shape == (count, 64)
    ids = models.prompt(10) % kept
    with torch.no_grad():
        found, wanted = model(ids).logits, plain(ids).logits
    torch.testing.assert_close(found[..., :kept], wanted[..., :kept], rtol=1e-5, atol=1e-5)


def test_a_deep_copy_works_on_when_its_original_is_gone(pair):
    model, plain = pair
    copied = copy.deepcopy(model)
    if leases_of(model) is not None:
        leases_of(model).detach(model)
    assert torch.equal(generated(copied), generated(plain))


def test_dequantize_and_materialize_give_a_plain_model_that_can_be_cast_and_saved(pair, tmp_path):
    model, plain = pair
    ids = models.prompt(10)
    back = model.dequantize()
    assert not any(isinstance(p, OpaqueTensor) for p in back.parameters())
    assert back.lm_head.weight is back.model.embed_tokens.weight
    assert torch.equal(back(ids).logits, plain(ids).logits)
    back.save_pretrained(tmp_path / "plain")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype="auto")
    assert torch.equal(again(ids).logits, plain(ids).logits)
    assert back.to(torch.bfloat16)(ids).logits.dtype == torch.bfloat16
