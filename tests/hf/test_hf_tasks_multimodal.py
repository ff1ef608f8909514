"""Models of images and text before they are captured: features, masks, positions, and which are refused."""

import multimodal_models
import pytest
import torch
import transformers as hf
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model, get_block_sequence_ids_for_mask

from t2n_hf.errors import ConfigError
from t2n_hf.hf.tasks import pipeline_of
from t2n_hf.hf.tasks.grids import GridEncoder, GridModel
from t2n_hf.hf.tasks.rows import AllRows
from t2n_hf.hf.tasks.seen_ahead import image_masks, prefix_masks

WINDOW = 3
LIKE = torch.zeros(1, 1)


def sees(mask):
    return mask if mask.dtype == torch.bool else mask == 0


def masks_of_transformers(make, length, **options):
    kinds = ["sliding_attention", "full_attention"]
    config = hf.Gemma3TextConfig(sliding_window=WINDOW, num_hidden_layers=2, layer_types=kinds)
    config._attn_implementation = "sdpa"
    common = {"config": config, "inputs_embeds": torch.zeros(1, length, 4), "attention_mask": None, "cache": None}
    return make(**common, position_ids=None, **options)


MARKS = torch.tensor([[0, 1, 1, 1, 1, 0, 0, 1, 1, 0, 1]])


@pytest.mark.parametrize("past", [0, 5, 6, 9])
def test_tokens_of_one_image_see_each_other_as_in_transformers_at_any_past(past):
    blocks = get_block_sequence_ids_for_mask(MARKS)
    expected = masks_of_transformers(create_masks_for_vision_model, MARKS.shape[1], block_sequence_ids=blocks)
    masks = image_masks(MARKS[:, past:], past, WINDOW, LIKE)
    for kind, mask in masks.items():
        torch.testing.assert_close(sees(mask), sees(expected[kind])[:, :, past:])


def test_a_prompt_sees_all_of_itself_and_later_tokens_what_is_before_them_as_in_transformers():
    length, prompt = 11, 7
    blocks = torch.where(torch.arange(length) < prompt, 0, -1)[None]
    expected = {
        "full_attention": masks_of_transformers(create_causal_mask, length, block_sequence_ids=blocks),
        "sliding_attention": masks_of_transformers(
            create_sliding_window_causal_mask, length, block_sequence_ids=blocks
        ),
    }
    first, later = prefix_masks(prompt, 0, WINDOW, LIKE), prefix_masks(length - prompt, prompt, WINDOW, LIKE)
    for kind, mask in expected.items():
        torch.testing.assert_close(sees(first[kind]), sees(mask)[:, :, :prompt, :prompt])
        torch.testing.assert_close(sees(later[kind]), sees(mask)[:, :, prompt:])


def test_models_without_windows_have_one_mask():
    assert set(prefix_masks(3, 0, None, LIKE)) == {"full_attention"}
    assert set(image_masks(MARKS, 0, None, LIKE)) == {"full_attention"}


def test_an_index_of_all_rows_reads_and_writes_them_and_is_its_own_inverse():
    values, rows = torch.arange(6.0).reshape(3, 2), AllRows()
    torch.testing.assert_close(values[rows, :], values)
    values[rows.to("cpu"), :] = values[torch.argsort(rows), :] + 1
    assert values.flatten().tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    with pytest.raises(TypeError, match="stands for an index only"):
        torch.abs(rows)


@pytest.mark.parametrize("name", multimodal_models.GRIDS)
@pytest.mark.parametrize("grid", [(1, 1), (2, 3), (5, 4)], ids=str)
def test_features_of_a_grid_are_those_of_transformers(name, grid):
    model = multimodal_models.MODELS[name]()
    given = multimodal_models.asked(name, model, [grid])
    height, width = grid
    picture = given["pixel_values"].reshape(height, width, 4, -1)
    with torch.no_grad():
        expected = model.model.get_image_features(given["pixel_values"], given["image_grid_thw"], return_dict=True)
        got = GridEncoder(model)(picture)
    deep = getattr(expected, "deepstack_features", None) or ()
    torch.testing.assert_close(got, (torch.cat(expected.pooler_output), *map(torch.cat, deep)), rtol=1e-4, atol=1e-4)
    whole = GridModel(model)
    assert whole.shape_of(picture) == tuple(got[0].shape)
    prompt = whole.prompt(picture, given["input_ids"])
    assert {key: value.tolist() for key, value in prompt.items()} == {
        key: given[key].tolist() for key in ("pixel_values", "image_grid_thw", "mm_token_type_ids")
    }


def test_windows_need_an_attention_that_takes_a_mask():
    model = multimodal_models.qwen2_5_vl()
    model.set_attn_implementation("eager")
    with pytest.raises(ConfigError, match="in windows by 'eager' attention"):
        GridEncoder(model)(torch.zeros(1, 1, 4, 96))


REFUSED = {
    "PaddleOCRVL": "known of .*qwen2_vl.* only, not of paddleocr_vl_vision",
    "LlavaNext": "number of tiles that depends on its size",
    "Mllama": "attends to images through layers of its own",
    "Kosmos2": "image_embeds_position_mask",
    "Florence2": "reads images among tokens",
    "GraniteSpeech": "masks the last one by what is left",
    "Qwen2Audio": "has no method that makes features",
    "Lfm2Vl": "spatial_shapes, pixel_attention_mask",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_three_graphs_do_not_express_is_refused_with_the_reason(name):
    config = getattr(hf, f"{name}Config")()
    with torch.device("meta"):
        model = getattr(hf, f"{name}ForConditionalGeneration")(config)
    with pytest.raises(ConfigError, match=REFUSED[name]):
        pipeline_of(model, task="image-text-to-text")
