"""A language model that reads images, in tract, with the `generate()` of transformers."""

import os
from typing import Any, ClassVar, Final, final

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
from transformers.generation import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from t2n_hf.errors import ConfigError
from t2n_hf.tract.generating import TractGenerator, refuse_unknown_tokens
from t2n_hf.tract.loading import export_folder, generation_config_of, manifest_of
from t2n_hf.tract.multimodal import Features, Multimodal
from t2n_hf.tract.pictures import one_by_one, patches_by_picture
from t2n_hf.tract.pipelines import open_multimodal

__all__ = ["TractModelForImageTextToText"]

_PLACEHOLDERS: Final = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index")
# What else a processor may give, which would be left out.
_NOT_READ: Final = ("pixel_values_videos", "video_grid_thw", "input_features_mask", "feature_attention_mask")
# Models whose whole prompt is seen by each of its tokens: a longer one is another one.
_PREFIX_MODELS: Final = frozenset({"paligemma"})


@final
class TractModelForImageTextToText(TractGenerator):
    """An exported language model that reads images (or sounds): each archive in a worker process of its own.

    `generate(input_ids=..., pixel_values=...)` takes one conversation; its tokens hold as many placeholders as its
    images have features, as the model's processor writes them. Greedy search and sampling. Close it, or use it as a
    context manager.
    """

    main_input_name: ClassVar[str] = "input_ids"
    input_modalities: ClassVar[tuple[str, ...]] = ("text",)  # generate() would ask this class for features itself
    _supported_generation_modes: ClassVar[list[str]] = [GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE]

    def __init__(
        self,
        pipeline: Multimodal,
        config: PreTrainedConfig,
        generation_config: GenerationConfig,
        *,
        max_context: int | None = None,
    ) -> None:
        super().__init__(pipeline.decoder, config, generation_config, max_context)
        self._pipeline = pipeline
        self._given: tuple[torch.Tensor, Features] | None = None
        self._sees_prompt = config.model_type in _PREFIX_MODELS
        self._prompt: torch.Tensor | None = None

    @classmethod
    def from_pretrained(
        cls,
        export: str | os.PathLike[str],
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        verify: bool = True,
        timeout_s: float | None = None,
    ) -> "TractModelForImageTextToText":
        """Load an export folder, or an export on the Hub; the arguments are those of `TractModelForCausalLM`.

        Raises:
            TractError: tract is missing, or refuses an archive.
            StorageError: there is no export.
            HubError: the Hub does not give it.
            ArchiveError: a file is not what the manifest says.
            ConfigError: the export is no model of images and text.
        """
        folder = export_folder(export, revision, token)
        manifest = manifest_of(folder, verify)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        placeholder = next((p for p in (getattr(config, name, None) for name in _PLACEHOLDERS) if p is not None), None)
        if placeholder is None:
            raise ConfigError(f"the config.json of {folder} names no placeholder ({', '.join(_PLACEHOLDERS)})")
        archives = {name: folder / archive for name, archive in manifest.archives.items()}
        pipeline = open_multimodal(archives, placeholder, timeout_s=timeout_s)
        try:
            return cls(pipeline, config, generation_config_of(folder, config), max_context=manifest.max_context)
        except BaseException:
            pipeline.close()
            raise

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        use_cache: bool | None = None,
        *,
        pixel_values: torch.Tensor | None = None,
        input_features: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        image_sizes: torch.Tensor | None = None,
        pixel_attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        mm_token_type_ids: torch.Tensor | None = None,
        is_first_iteration: bool = False,
        **others: Any,  # noqa: ANN401 - whatever generate() passes to every model
    ) -> CausalLMOutputWithPast:
        """Logits after the whole sequence `input_ids` [1, T] i64: of the last position, [1, 1, V].

        `pixel_values` are [I, ...] images (`input_features` sounds), those of the whole conversation, in its order; or
        their patches, with `image_grid_thw` [I, 3]; where pictures may have any size, `image_sizes` [I, 2] says what
        of each is no padding. `token_type_ids` and `mm_token_type_ids` are what a processor makes
        of the placeholders, which the archives do themselves. With `use_cache`, positions that agree with what the
        worker has seen are not computed again, but for `is_first_iteration` of a model whose prompt sees all of itself,
        and for what is no continuation of its last prompt.

        Raises ConfigError for a batch, padding, tokens that the model lacks, placeholders and features that differ in
        number, or a sequence longer than the archive's context.
        """
        unread = [name for name in _NOT_READ if others.get(name) is not None]
        if unread:
            raise ConfigError(f"{', '.join(unread)}: these archives read pictures (or sounds) and text, nothing else")
        self._check(input_ids, attention_mask)
        self._check_types(input_ids, token_type_ids)
        if not use_cache or (self._sees_prompt and (is_first_iteration or not self._follows_prompt(input_ids))):
            self._pipeline.reset()
            self._prompt = input_ids
        if pixel_attention_mask is not None and not bool(pixel_attention_mask.all()):
            raise ConfigError("pixel_attention_mask has zeros: these archives take pictures that are full")
        given = pixel_values if pixel_values is not None else input_features
        features = self._features(given, image_grid_thw, image_sizes)
        logits = self._pipeline.logits(features, input_ids.to("cpu", torch.int64).numpy())
        return CausalLMOutputWithPast(logits=torch.from_numpy(logits))

    def close(self) -> None:
        """End the worker processes."""
        self._pipeline.close()

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        use_cache: bool | None = True,
        *,
        pixel_values: torch.Tensor | None = None,
        input_features: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        image_sizes: torch.Tensor | None = None,
        pixel_attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        is_first_iteration: bool = False,
        **kwargs: Any,  # noqa: ANN401
    ) -> dict[str, Any]:
        """Pass everything on every step: `forward` knows what is new."""
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "use_cache": use_cache,
            "pixel_values": pixel_values,
            "input_features": input_features,
            "image_grid_thw": image_grid_thw,
            "image_sizes": image_sizes,
            "pixel_attention_mask": pixel_attention_mask,
            "token_type_ids": token_type_ids if is_first_iteration else None,  # later ones are made up by generate()
            "is_first_iteration": is_first_iteration,
        }

    def _features(self, given: torch.Tensor | None, grids: torch.Tensor | None, sizes: torch.Tensor | None) -> Features:
        """Features of the images, made once for the same tensor."""
        if given is None:
            return self._pipeline.nothing()
        if self._given is None or self._given[0] is not given:
            encoder = self._pipeline.encoder
            takes_grids = self._pipeline.takes_grids
            images = patches_by_picture(encoder, given, grids) if takes_grids else one_by_one(encoder, given, sizes)
            self._given = (given, self._pipeline.encode(images))
        return self._given[1]

    def _follows_prompt(self, tokens: torch.Tensor) -> bool:
        """Whether `tokens` are the prompt that was seen, all of it at once, and others after it."""
        prompt = self._prompt
        length = 0 if prompt is None else prompt.shape[1]
        return prompt is not None and tokens.shape[1] > length and torch.equal(tokens[:, :length], prompt)

    def _check_types(self, tokens: torch.Tensor, types: torch.Tensor | None) -> None:
        """Refuse kinds of tokens that the archives do not take them to be."""
        if types is None:
            return
        stands = (tokens == self._pipeline.placeholder).to(types.dtype)
        expected = torch.zeros_like(stands) if self._sees_prompt else stands
        if types.shape != tokens.shape or not torch.equal(types, expected):
            raise ConfigError(
                f"token_type_ids say otherwise than the placeholders (token {self._pipeline.placeholder}) which tokens "
                "see those behind them; these archives go by the placeholders, or let all of a prompt see itself"
            )

    def _check(self, tokens: torch.Tensor, mask: torch.Tensor | None) -> None:
        if tokens.ndim != 2 or tokens.shape[0] != 1 or tokens.numel() == 0:
            raise ConfigError(f"input_ids of shape {list(tokens.shape)}: these archives run one sequence, [1, T]")
        if mask is not None and not bool(mask.all()):
            raise ConfigError("attention_mask has zeros: these archives take one sequence without padding")
        self._check_length(tokens.shape[1])
        words = tokens[tokens != self._pipeline.placeholder]
        if words.numel():
            refuse_unknown_tokens("input_ids", words, self._vocabulary)
