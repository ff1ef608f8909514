"""The real SmolLM2-135M-Instruct, through loading, generating, saving and reloading."""

import copy

import pytest
import torch
import transformers as hf

from t2n_hf import T2NConfig, materialize
from t2n_hf.hf.hooks import leases_of
from t2n_hf.hf.report import coverage_of

pytestmark = pytest.mark.model


def greedy(model, tokenizer, prompt, tokens=20):
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return out[0, ids.shape[1] :].tolist()


PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "Once upon a time, there was a",
    "def fibonacci(n):",
    "The opposite of hot is",
    "In 1969, humans first",
    "My favourite colour is blue because",
    "To bake bread, you need",
    "The largest planet in our solar system",
    "A triangle has three",
    "Dear Sir or Madam,",
    "The quick brown fox",
    "Photosynthesis is the process by which",
    "She opened the door and",
    "2 + 2 =",
    "The Pacific Ocean is",
    "An interpreter reads a program and",
    "Shakespeare wrote",
    "The first step in solving a problem is",
    "Good morning! How are",
]


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return hf.AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def packed(smollm2):
    quantization = T2NConfig("q4_0", embeddings="q4_0")
    return hf.AutoModelForCausalLM.from_pretrained(smollm2, dtype="auto", quantization_config=quantization)


def agreement(packed, tokenizer, prompts):
    dense = materialize(copy.deepcopy(packed))
    return [prompt for prompt in prompts if greedy(packed, tokenizer, prompt) != greedy(dense, tokenizer, prompt)]


def test_tokens_are_those_of_the_dequantized_weights(packed, tokenizer):
    assert agreement(packed, tokenizer, PROMPTS[:2]) == []


@pytest.mark.slow
def test_tokens_are_those_of_the_dequantized_weights_on_twenty_prompts(packed, tokenizer):
    assert agreement(packed, tokenizer, PROMPTS) == []


def test_it_takes_an_eighth_of_its_memory_and_comes_back_from_disk(packed, tokenizer, tmp_path):
    assert coverage_of(packed).share == 1.0
    assert packed.get_memory_footprint() < 76_500_000 < packed.num_parameters() * 4 / 7
    expected = greedy(packed, tokenizer, PROMPTS[0])
    packed.save_pretrained(tmp_path)
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert greedy(again, tokenizer, PROMPTS[0]) == expected
    budget = 20_000_000
    on_disk = hf.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype="auto", device_map={"": "disk"}, quantization_config=T2NConfig(max_resident_bytes=budget)
    )
    assert greedy(on_disk, tokenizer, PROMPTS[0]) == expected
    assert leases_of(on_disk).pool.resident_bytes <= budget
    assert on_disk.get_memory_footprint() <= budget + 1_000_000
