"""Pictures of any size, cut into patches, as the Qwen-VL family reads them.

transformers takes the patches of all pictures in one list, and computes from the values of `image_grid_thw` where each
lies: positions, windows, weights of an interpolation. Here a picture is [H, W, M*M, values]: H by W squares of M by M
patches, each square one feature. What depends on the size is then computed from lengths, inside the graph.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Final, final

import torch
from torch import nn
from transformers import PreTrainedModel

from t2n_hf.errors import ConfigError
from t2n_hf.hf.tasks.patch_places import PatchPlaces, cubic_samples
from t2n_hf.hf.tasks.rows import AllRows
from t2n_hf.hf.tasks.settings import takes
from t2n_hf.trace.swap import FunctionReplaced

__all__ = ["GridEncoder", "GridModel", "reads_grids"]

# Encoders whose forward is known to compute nothing else from `grid_thw`.
_ENCODERS: Final = frozenset(
    {
        "exaone4_5_vision",
        "glm4v_moe_vision",
        "glm4v_vision",
        "glm_ocr_vision",
        "qwen2_5_vl",
        "qwen2_5_vl_vision",
        "qwen2_vl",
        "qwen2_vl_vision",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_vision",
        "qwen3_5_vision",
        "qwen3_vl",
        "qwen3_vl_moe",
        "qwen3_vl_moe_vision",
        "qwen3_vl_vision",
    }
)
# Height and width of the example, in features: they rarely equal a dimension of a model.
_HEIGHT: Final = 3
_WIDTH: Final = 5


def reads_grids(model: PreTrainedModel) -> bool:
    """Whether `model` takes pictures as patches with `image_grid_thw`.

    Raises ConfigError for one that does, of which it is not known what it computes from that.
    """
    if not takes(model.forward, "image_grid_thw"):
        return False
    visual = getattr(model.base_model, "visual", None)
    kind = getattr(getattr(visual, "config", None), "model_type", None)
    if kind not in _ENCODERS or getattr(visual, "interpolation_mode", "bilinear") != "bilinear":
        raise ConfigError(
            f"{type(model).__name__} computes positions in pictures from the values of image_grid_thw, in a way that "
            f"is known of {', '.join(sorted(_ENCODERS))} only, not of {kind}; its text alone exports with "
            "task='text-generation'"
        )
    return True


def _visual_of(model: PreTrainedModel) -> Any:  # noqa: ANN401 - a module of the family
    return model.base_model.visual


@final
class GridModel:
    """A model whose images are patches, of any height and width: its encoder, an example, the inputs of the whole."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._visual = _visual_of(model)
        self._token: int = model.config.image_token_id
        self._merge = int(self._visual.spatial_merge_size)
        self.encoder = GridEncoder(model)
        self.depth = self.encoder.depth
        linear = [layer for layer in self._visual.merger.modules() if isinstance(layer, nn.Linear)]
        self._width = linear[-1].out_features
        values = prod(self._visual.patch_embed.proj.weight.shape[1:])
        self.example = torch.zeros(_HEIGHT, _WIDTH, self._merge**2, values)
        least = 1 if self._merge > 1 else 2
        self.dims: Mapping[int, Any] = {0: torch.export.Dim("H", min=least), 1: torch.export.Dim("W", min=least)}

    def shape_of(self, picture: torch.Tensor) -> tuple[int, int]:
        """Shape of the features of `picture` [H, W, M*M, values]."""
        return picture.shape[0] * picture.shape[1], self._width

    def prompt(self, picture: torch.Tensor, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the whole model takes for `tokens` [1, T] about one picture, as its processor writes it."""
        height, width, squares, values = picture.shape
        return {
            "pixel_values": picture.reshape(height * width * squares, values),
            "image_grid_thw": torch.tensor([[1, height * self._merge, width * self._merge]]),
            "mm_token_type_ids": (tokens == self._token).to(torch.int64),
        }


@final
class GridEncoder(nn.Module):
    """A picture of any size to features: those of the tokens, then those that are added inside the decoder."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    @property
    def depth(self) -> int:
        """How many layers of the decoder take features of their own."""
        return len(getattr(_visual_of(self.model), "deepstack_visual_indexes", ()))

    def forward(self, picture: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Give features [H*W, width] of `picture` [H, W, M*M, values], as many tensors as the model uses."""
        visual = _visual_of(self.model)
        height, width, squares, values = picture.shape
        place = PatchPlaces(height, width, int(visual.spatial_merge_size))
        segment = _OneSegment(place.count)
        known: dict[str, Any] = {"position_ids": place.pairs(), "cu_seqlens": segment}
        with ExitStack() as stack:
            if hasattr(visual, "fullatt_block_indexes"):
                # All in the order of the picture: instead of a segment each, windows have a mask.
                known |= {"window_index": AllRows(), "cu_window_seqlens": segment}
                side = visual.window_size // visual.spatial_merge_size // visual.patch_size
                stack.enter_context(_masked_blocks(visual, place.same_window(side)))
            if hasattr(visual, "num_grid_per_side"):
                ends = bool(visual.interpolation_align_corners)
                taps, weights = place.interpolation(int(visual.num_grid_per_side), ends)
                known |= {"interp_indices": taps, "interp_weights": weights}
            if hasattr(visual, "embeddings"):
                stack.enter_context(FunctionReplaced(nn.functional.grid_sample, cubic_samples))
            patches = picture.reshape(height * width * squares, values)
            found = visual(patches, grid_thw=place.sizes(), return_dict=True, **known)
        return (found.pooler_output, *(getattr(found, "deepstack_features", None) or ()))


@final
@dataclass(frozen=True)
class _OneSegment:
    """Ends of segments, of which there is one: all patches of the picture. Attention asks for its lengths."""

    count: int

    def __getitem__(self, _ends: slice) -> "_OneSegment":
        return self

    def __sub__(self, _starts: "_OneSegment") -> "_OneSegment":
        return self

    def cumsum(self, _axis: int) -> torch.Tensor:
        """The end of the segment, [1] i64."""
        return torch.arange(self.count).amax(0, True) + 1

    def tolist(self) -> list[int]:
        """Lengths of the segments."""
        return [self.count]


@contextmanager
def _masked_blocks(visual: Any, mask: torch.Tensor) -> Iterator[None]:  # noqa: ANN401 - a module of the family
    """Let those blocks of `visual` that attend in windows do so by a mask, until the block is left in any way."""
    if visual.config._attn_implementation != "sdpa":
        raise ConfigError(
            f"{type(visual).__name__} attends in windows by {visual.config._attn_implementation!r} attention, which "
            "takes no mask of them; load the model with attn_implementation='sdpa'"
        )
    attention = nn.functional.scaled_dot_product_attention
    mode = FunctionReplaced(attention, lambda *args, **kwargs: attention(*args, **{**kwargs, "attn_mask": mask}))

    def begin(*_call: Any) -> None:  # noqa: ANN401 - what a hook is given
        mode.__enter__()

    def end(*_call: Any) -> None:  # noqa: ANN401
        mode.__exit__(None, None, None)

    with ExitStack() as stack:
        for number, block in enumerate(visual.blocks):
            if number not in visual.fullatt_block_indexes:
                stack.callback(block.attn.register_forward_pre_hook(begin).remove)
                stack.callback(block.attn.register_forward_hook(end, always_call=True).remove)
        yield
