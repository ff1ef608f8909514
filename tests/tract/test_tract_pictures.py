"""What models of images are given: positions in three directions, and pictures one by one."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

from t2n_hf.errors import ConfigError
from t2n_hf.tract.pictures import one_by_one, patches_by_picture
from t2n_hf.tract.three_positions import three_positions


def positions_of_transformers(tokens, grids):
    model = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)))
    model.get_vision_position_ids = lambda *args, **kwargs: Qwen2VLModel.get_vision_position_ids(model, *args, **kwargs)
    sizes = torch.tensor([[1, 2 * height, 2 * width] for height, width in grids]).reshape(-1, 3)
    types = (tokens == 255).int()
    return Qwen2VLModel.get_rope_index(model, tokens, types, image_grid_thw=sizes)[0].numpy()


@pytest.mark.parametrize("grids", [[], [(2, 3)], [(2, 3), (4, 1)], [(1, 1), (3, 3), (1, 7)]], ids=len)
def test_positions_are_those_of_transformers(grids):
    tokens = [1, 5]
    for height, width in grids:
        tokens += [*[255] * (height * width), 7]
    ids = torch.tensor([[*tokens, 9, 11]])
    np.testing.assert_array_equal(three_positions(ids.numpy(), 255, grids), positions_of_transformers(ids, grids))


@pytest.mark.parametrize(
    ("tokens", "grids"),
    [([255, 255, 7], [(1, 3)]), ([255, 7, 255], [(1, 2)]), ([255, 255], [(1, 1)]), ([7], [(1, 1)])],
    ids=["too few", "interrupted", "too many", "none"],
)
def test_placeholders_that_do_not_fit_the_pictures_are_refused(tokens, grids):
    with pytest.raises(ConfigError, match="placeholders"):
        three_positions(np.array([tokens]), 255, grids)


def encoder_of(*shape):
    return SimpleNamespace(inputs={"pixel_values": SimpleNamespace(shape=shape, dtype="float32")})


def test_patches_are_given_picture_by_picture_as_squares():
    patches = torch.arange(40.0).reshape(20, 2)
    first, second = patches_by_picture(encoder_of("H", "W", 4, 2), patches, torch.tensor([[1, 2, 6], [1, 4, 2]]))
    assert first["pixel_values"].shape == (1, 3, 4, 2)
    assert second["pixel_values"].shape == (2, 1, 4, 2)
    np.testing.assert_array_equal(second["pixel_values"].reshape(8, 2), patches[12:].numpy())
    with pytest.raises(ConfigError, match="multiples of 2"):
        patches_by_picture(encoder_of("H", "W", 4, 2), patches, torch.tensor([[1, 5, 4]]))


def test_pictures_of_any_size_are_cut_to_theirs():
    padded = torch.arange(2 * 3 * 4 * 6.0).reshape(2, 3, 4, 6)
    encoder = encoder_of(1, 3, "2*H", "2*W")
    first, second = one_by_one(encoder, padded, torch.tensor([[2, 6], [4, 2]]))
    np.testing.assert_array_equal(first["pixel_values"], padded[:1, :, :2].numpy())
    np.testing.assert_array_equal(second["pixel_values"], padded[1:, :, :, :2].numpy())
    with pytest.raises(ConfigError, match="image_sizes are of 1 pictures; pixel_values are 2"):
        one_by_one(encoder, padded, torch.tensor([[2, 6]]))


def test_tiles_of_zeros_are_left_out_but_for_the_only_one():
    tiles = torch.ones(1, 3, 1, 2, 2)
    tiles[0, 1] = 0
    assert len(one_by_one(encoder_of(1, 1, 2, 2), tiles)) == 2
    assert len(one_by_one(encoder_of(1, 1, 2, 2), torch.zeros_like(tiles))) == 1
    with pytest.raises(ConfigError, match=r"takes \[I, 1, 2, 2\]"):
        one_by_one(encoder_of(1, 1, 2, 2), torch.ones(1, 1, 3, 2))
