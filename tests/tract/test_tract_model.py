import shutil

import numpy as np
import pytest
import torch
import transformers
from tiny_archive import greedy, logits_of, write_archive

from t2n_hf.errors import ArchiveError, ConfigError, HubError, StorageError, TractError
from t2n_hf.store.manifest import ExportManifest, list_files
from t2n_hf.tract.model import TractModelForCausalLM

pytestmark = pytest.mark.tract

LENGTH = 48


def config(**options):
    return transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        eos_token_id=None,
        bos_token_id=1,
        **options,
    )


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    write_archive(folder / "model")
    config().save_pretrained(folder)
    transformers.GenerationConfig(max_new_tokens=5, bos_token_id=1, pad_token_id=0).save_pretrained(folder)
    manifest = ExportManifest(
        archive="model", dtype="f32", weights="none", max_context=LENGTH, files=list_files(folder)
    )
    manifest.write(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(export):
    with TractModelForCausalLM.from_pretrained(export, timeout_s=60) as model:
        yield model


@pytest.fixture
def model(loaded):
    loaded.reset()
    return loaded


@pytest.fixture
def steps(model, monkeypatch):
    """Lengths of what is computed, call by call."""
    lengths = []
    step = model._decoder.step
    monkeypatch.setattr(
        model._decoder,
        "step",
        lambda inputs, feedback: lengths.append(inputs["input_ids"].shape[1]) or step(inputs, feedback),
    )
    return lengths


def ids(*tokens):
    return torch.tensor([tokens])


class Streamer:
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, tokens):
        self.tokens += tokens.flatten().tolist()

    def end(self):
        self.ended = True


def test_greedy_generation_gives_the_likeliest_tokens_one_step_each(model, steps):
    result = model.generate(ids(1, 2, 3), max_new_tokens=10, do_sample=False)
    assert result[0].tolist() == greedy([1, 2, 3], 10)
    assert steps == [3] + [1] * 9


def test_the_folder_says_how_to_generate(model):
    assert model.generate(ids(1, 2)).shape == (1, 7)
    assert model.generation_config.pad_token_id == 0
    assert model.config.vocab_size == 16


def test_sampling_follows_the_seed_and_the_distribution(model):
    options = {"max_new_tokens": 12, "do_sample": True, "temperature": 1.5, "top_k": 0}
    first, second, other = (
        (torch.manual_seed(seed), model.generate(ids(1, 2), **options))[1].tolist() for seed in (1, 1, 2)
    )
    assert first == second
    assert first != other
    likeliest = model.generate(ids(1, 2), max_new_tokens=12, do_sample=True, top_k=1)
    assert likeliest[0].tolist() == greedy([1, 2], 12)


def test_a_longer_conversation_computes_only_what_is_new(model, steps):
    first = model.generate(ids(1, 2, 3), max_new_tokens=4, do_sample=False)
    longer = torch.cat([first, ids(7, 8)], dim=1)
    steps.clear()
    second = model.generate(longer, max_new_tokens=2, do_sample=False)
    assert second[0].tolist() == greedy(longer[0].tolist(), 2)
    assert steps == [3, 1]  # the last token of the first answer was only predicted


def test_a_conversation_that_branches_off_is_cut_back_to_what_is_common(model, steps):
    model.generate(ids(1, 2, 3, 4, 5), max_new_tokens=4, do_sample=False)
    steps.clear()
    result = model.generate(ids(1, 2, 3, 9), max_new_tokens=3, do_sample=False)
    assert result[0].tolist() == greedy([1, 2, 3, 9], 3)
    assert steps == [1, 1, 1]


def test_another_conversation_begins_afresh(model, steps):
    model.generate(ids(1, 2, 3), max_new_tokens=4, do_sample=False)
    steps.clear()
    result = model.generate(ids(5, 6), max_new_tokens=3, do_sample=False)
    assert result[0].tolist() == greedy([5, 6], 3)
    assert steps == [2, 1, 1]


def test_the_same_prompt_again_computes_its_last_token_only(model, steps):
    first = model.generate(ids(1, 2, 3), max_new_tokens=4, do_sample=False)
    steps.clear()
    assert torch.equal(model.generate(ids(1, 2, 3), max_new_tokens=4, do_sample=False), first)
    assert steps == [1, 1, 1, 1]


def test_without_a_cache_everything_is_computed_again(model, steps):
    result = model.generate(ids(1, 2, 3), max_new_tokens=3, do_sample=False, use_cache=False)
    assert result[0].tolist() == greedy([1, 2, 3], 3)
    assert steps == [3, 4, 5]


def test_calling_the_model_gives_the_logits_of_the_last_position(model, steps):
    for _ in range(2):
        logits = model(ids(4, 5, 6)).logits
        assert logits.shape == (1, 1, 16)
        np.testing.assert_allclose(logits[0, 0], logits_of([4, 5, 6]), rtol=1e-5, atol=1e-5)
    assert steps == [3, 3]
    assert logits.dtype == model.dtype == torch.float32
    assert model.device.type == "cpu"
    assert model.can_generate()


def test_an_error_of_tract_in_the_middle_leaves_the_next_call_right(model, monkeypatch):
    model.generate(ids(1, 2, 3), max_new_tokens=2, do_sample=False)
    with monkeypatch.context() as patch:
        patch.setattr(model._decoder, "step", fail)
        with pytest.raises(TractError, match="on purpose"):
            model.generate(ids(1, 2, 3, 4), max_new_tokens=2, do_sample=False)
    result = model.generate(ids(1, 2, 3, 4), max_new_tokens=2, do_sample=False)
    assert result[0].tolist() == greedy([1, 2, 3, 4], 2)


def fail(*_):
    raise TractError("on purpose")


def test_streamers_and_details_of_transformers_work(model):
    streamer = Streamer()
    result = model.generate(
        ids(1, 2),
        max_new_tokens=3,
        do_sample=False,
        streamer=streamer,
        return_dict_in_generate=True,
        output_logits=True,
    )
    assert result.sequences[0].tolist() == streamer.tokens == greedy([1, 2], 3)
    assert streamer.ended
    assert len(result.logits) == 3
    np.testing.assert_allclose(result.logits[0][0], logits_of([1, 2]), rtol=1e-5, atol=1e-5)


def test_generation_stops_at_the_end_token(model):
    expected = greedy([1, 2, 3], 10)
    stop = expected[5]
    result = model.generate(ids(1, 2, 3), max_new_tokens=10, do_sample=False, eos_token_id=stop, pad_token_id=0)
    assert result[0].tolist() == expected[: expected.index(stop, 3) + 1]


@pytest.mark.parametrize(
    ("inputs", "options", "text"),
    [
        (torch.ones(2, 3, dtype=torch.int64), {}, "one sequence at a time"),
        (ids(1, 2), {"num_return_sequences": 2, "do_sample": True}, "one sequence at a time"),
        (ids(1, 2), {"num_beams": 2}, "beam_search.*num_beams=1"),
        (ids(1, 2), {"prompt_lookup_num_tokens": 2}, "assisted_generation"),
        (ids(1, 2), {"attention_mask": ids(0, 1)}, "without padding"),
        (ids(1, -1), {}, "holds -1; expected tokens from 0"),
        (ids(1, 10**6), {}, "holds 1000000; expected tokens from 0"),
        (torch.ones(1, LENGTH + 1, dtype=torch.int64), {}, f"{LENGTH + 1} tokens is longer than the {LENGTH}"),
    ],
    ids=["batch", "several-answers", "beams", "assisted", "padding", "negative token", "unknown token", "too-long"],
)
def test_what_an_archive_cannot_do_is_refused_with_a_reason(model, inputs, options, text):
    with pytest.raises(ConfigError, match=text):
        model.generate(inputs, **{"max_new_tokens": 3, **options})


def test_generation_ends_at_the_context_of_the_archive(model):
    result = model.generate(ids(*[1] * (LENGTH - 2)), max_new_tokens=20, do_sample=False)
    assert result.shape == (1, LENGTH + 1)
    assert result[0].tolist() == greedy([1] * (LENGTH - 2), 3)


def test_both_sides_of_a_longrope_switch_are_not_mixed(model, steps, monkeypatch):
    monkeypatch.setattr(model._past, "_switch", 4)
    model.generate(ids(1, 2, 3), max_new_tokens=4, do_sample=False)
    assert steps == [3, 1, 5, 1]
    model(ids(1, 2), use_cache=True)
    assert steps[4:] == [2]


def test_the_switch_is_read_off_the_config(export, tmp_path):
    shutil.copytree(export, tmp_path / "export", ignore=shutil.ignore_patterns("t2n_export.json"))
    rope = {"rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0]}
    rope |= {"original_max_position_embeddings": 9, "factor": 2.0, "rope_theta": 1e4}
    config(rope_parameters=rope).save_pretrained(tmp_path / "export")
    with TractModelForCausalLM.from_pretrained(tmp_path / "export") as model:
        assert model._past._switch == 9
        assert model.max_context is None


def test_a_changed_archive_is_refused_unless_it_is_not_to_be_verified(export, tmp_path):
    folder = tmp_path / "export"
    shutil.copytree(export, folder)
    path = folder / "model" / "head.dat"
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\0")
    with pytest.raises(ArchiveError, match=r"head\.dat"):
        TractModelForCausalLM.from_pretrained(folder)
    TractModelForCausalLM.from_pretrained(folder, verify=False).close()


def test_a_folder_without_an_export_is_refused(tmp_path):
    config().save_pretrained(tmp_path)
    with pytest.raises(StorageError, match="holds no export"):
        TractModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(StorageError, match="no such folder"):
        TractModelForCausalLM.from_pretrained(tmp_path / "nothing")


def test_an_archive_of_another_task_is_refused_and_its_worker_ended(export, tmp_path):
    shutil.copytree(export, tmp_path / "export", ignore=shutil.ignore_patterns("t2n_export.json"))
    graph = tmp_path / "export" / "model" / "graph.nnef"
    graph.write_text(graph.read_text().replace("outputs", "last_hidden_state"))
    with pytest.raises(ConfigError, match=r"no causal language model.*output last_hidden_state"):
        TractModelForCausalLM.from_pretrained(tmp_path / "export")


def test_an_export_on_the_hub_is_fetched_by_its_manifest(export, monkeypatch):
    asked = []

    def fetch(repository, name, *, revision, token):
        asked.append((repository, name, revision, token))
        if name == "t2n_export.json" and repository == "who/missing":
            raise OSError("404")
        return str(export / name)

    monkeypatch.setattr("t2n_hf.tract.loading.cached_file", fetch)
    with TractModelForCausalLM.from_pretrained("who/what", revision="main", token="secret") as model:
        assert model.generate(ids(1, 2)).shape == (1, 7)
    assert asked[0] == ("who/what", "t2n_export.json", "main", "secret")
    assert {name for _, name, revision, _ in asked[1:] if revision == export.name} >= {"config.json", "model/head.dat"}
    with pytest.raises(HubError, match="404"):
        TractModelForCausalLM.from_pretrained("who/missing")
