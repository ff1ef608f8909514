"""Language models that read images, as three archives: they generate in tract what PyTorch does."""

import multimodal_models
import pytest
import torch
from transformers import GenerationMixin

from t2n_hf import export_nnef
from t2n_hf.errors import ConfigError
from t2n_hf.store.manifest import ExportManifest
from t2n_hf.tract.image_text import TractModelForImageTextToText

# Heights and widths in features of the pictures of each prompt.
PROMPTS = ([(2, 3)], [(4, 1), (3, 5)], [])
QUICK = ("qwen3_vl", "gemma3")


def generated(model, inputs):
    # Placeholders that nobody wrote would stand for nothing.
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "suppress_tokens": [multimodal_models.PLACEHOLDER]}
    return GenerationMixin.generate(model, **inputs, **options, do_sample=False)


def check_generation(name, folder):
    model = multimodal_models.MODELS[name]()
    report = export_nnef(model, folder)
    assert report.check == "passed"
    listens = name == "voxtral"
    assert list(report.archives) == ["audio" if listens else "vision", "embedding", "decoder"]
    with TractModelForImageTextToText.from_pretrained(folder) as loaded:
        for number, grids in enumerate(PROMPTS):
            inputs = multimodal_models.asked(name, model, grids, seed=number)
            torch.testing.assert_close(generated(loaded, inputs), generated(model, inputs))
    manifest = ExportManifest.read(folder)
    assert manifest.task == ("audio-text-to-text" if listens else "image-text-to-text")
    return {part["name"]: part for part in manifest.parts}


def names(values):
    return [value["name"] for value in values]


def test_pictures_of_any_size_are_read_with_three_positions_and_features_for_inner_layers(tmp_path):
    parts = check_generation("qwen3_vl", tmp_path / "out")
    features = ["image_features", "deep_image_features_0", "deep_image_features_1"]
    placed = ["placed_deep_image_features_0", "placed_deep_image_features_1"]
    (picture,) = parts["vision"]["inputs"]
    assert picture["shape"] == ["H", "W", 4, 96]
    assert names(parts["vision"]["outputs"]) == features
    assert names(parts["embedding"]["inputs"]) == ["input_ids", *features]
    assert names(parts["embedding"]["outputs"]) == ["inputs_embeds", *placed]
    assert set(placed) <= set(names(parts["decoder"]["inputs"]))
    (positions,) = (value for value in parts["decoder"]["inputs"] if value["name"] == "position_ids")
    assert positions["shape"] == [3, 1, "S"]
    with TractModelForImageTextToText.from_pretrained(tmp_path / "out") as loaded:
        ids = torch.tensor([[1, *[255] * 6, 2]])
        patches, sizes = torch.zeros(24, 96), torch.tensor([[1, 4, 6]])
        with pytest.raises(ConfigError, match="image_grid_thw is missing"):
            loaded(input_ids=ids, pixel_values=patches)
        with pytest.raises(ConfigError, match="pixel_values_videos: these archives read pictures"):
            loaded(input_ids=ids, pixel_values_videos=patches)
        with pytest.raises(ConfigError, match="pictures of one moment"):
            loaded(input_ids=ids, pixel_values=patches, image_grid_thw=torch.tensor([[2, 4, 3]]))
        with pytest.raises(ConfigError, match=r"has shape \[20, 96\]; image_grid_thw asks for \[24, 96\]"):
            loaded(input_ids=ids, pixel_values=patches[:20], image_grid_thw=sizes)
        interrupted = torch.tensor([[1, *[255] * 5, 2, 255]])
        with pytest.raises(ConfigError, match="in one piece"):
            loaded(input_ids=interrupted, pixel_values=patches, image_grid_thw=sizes)


def test_tokens_of_an_image_see_each_other_also_when_its_beginning_was_seen_before(tmp_path):
    parts = check_generation("gemma3", tmp_path / "out")
    assert names(parts["embedding"]["outputs"]) == ["inputs_embeds", "token_type_ids"]
    assert "token_type_ids" in names(parts["decoder"]["inputs"])
    model = multimodal_models.gemma3()
    apart = multimodal_models.asked("gemma3", model, [(1, 1), (1, 1)])
    # The same pictures without a word between them are one block, whose first half the worker has seen as a whole.
    ids = torch.tensor([[1, 5, 253, *[255] * 8, 252, 9]])
    with TractModelForImageTextToText.from_pretrained(tmp_path / "out") as loaded, torch.no_grad():
        loaded(**apart, use_cache=True)
        with pytest.raises(ConfigError, match="token_type_ids say otherwise"):
            loaded(**{**apart, "token_type_ids": 1 - apart["token_type_ids"]})
        together = {"input_ids": ids, "pixel_values": apart["pixel_values"]}
        got = loaded(**together, use_cache=True).logits
        expected = model(**together, token_type_ids=(ids == 255).long()).logits[:, -1:]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in multimodal_models.MODELS if name not in (*QUICK, "llava")])
def test_a_model_of_images_and_text_generates_in_tract_what_pytorch_does(name, tmp_path):
    check_generation(name, tmp_path / "out")


@pytest.mark.slow
def test_a_longer_prompt_of_a_model_that_sees_all_of_it_is_computed_anew(tmp_path):
    model = multimodal_models.paligemma()
    export_nnef(model, tmp_path / "out", check=False)
    with TractModelForImageTextToText.from_pretrained(tmp_path / "out") as loaded:
        first = multimodal_models.asked("paligemma", model, [(4, 4)])
        said = generated(loaded, first)
        again = torch.cat([said, torch.tensor([[8, 6]])], dim=1)
        second = {
            "input_ids": again,
            "attention_mask": torch.ones_like(again),
            "token_type_ids": torch.zeros_like(again),
            "pixel_values": first["pixel_values"],
        }
        torch.testing.assert_close(generated(loaded, second), generated(model, second))


@pytest.mark.slow
def test_a_prompt_that_sees_all_of_itself_is_the_same_when_it_is_given_again(tmp_path):
    model = multimodal_models.paligemma2()
    export_nnef(model, tmp_path / "out", check=False)
    asked = multimodal_models.asked("paligemma2", model, [(4, 4)])
    ids = asked["input_ids"][:, :-1]
    shorter = {
        **asked,
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": torch.zeros_like(ids),
    }
    with TractModelForImageTextToText.from_pretrained(tmp_path / "out") as loaded, torch.no_grad():
        for given in (asked, asked, shorter):
            got = loaded(**given, use_cache=True).logits
            expected = model(**given).logits[:, -1:]
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
