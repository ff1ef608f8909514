"""A language model that reads images, in tract, with the `generate()` of transformers."""

import os
from typing import Any, ClassVar, Final, final

import numpy as np
import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
from transformers.generation import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from t2n_hf.errors import ConfigError
from t2n_hf.tract.encoder_decoder import Encoded
from t2n_hf.tract.generating import TractGenerator, refuse_unknown_tokens
from t2n_hf.tract.loading import export_folder, generation_config_of, manifest_of
from t2n_hf.tract.multimodal import Multimodal
from t2n_hf.tract.pipelines import open_multimodal

__all__ = ["TractModelForImageTextToText"]

_PLACEHOLDERS: Final = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index")


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
        self._given: tuple[torch.Tensor, Encoded] | None = None

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
        **_ignored: Any,  # noqa: ANN401 - whatever generate() passes to every model
    ) -> CausalLMOutputWithPast:
        """Logits after the whole sequence `input_ids` [1, T] i64: of the last position, [1, 1, V].

        `pixel_values` are [I, ...] images (`input_features` sounds), those of the whole conversation, in its order.
        With `use_cache`, positions that agree with what the worker has seen are not computed again.

        Raises ConfigError for a batch, padding, tokens that the model lacks, placeholders and features that differ in
        number, or a sequence longer than the archive's context.
        """
        self._check(input_ids, attention_mask)
        if not use_cache:
            self._pipeline.reset()
        encoded = self._encoded(pixel_values if pixel_values is not None else input_features)
        logits = self._pipeline.logits(encoded, input_ids.to("cpu", torch.int64).numpy())
        return CausalLMOutputWithPast(logits=torch.from_numpy(logits))

    def close(self) -> None:
        """End the worker processes."""
        self._pipeline.close()

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        use_cache: bool | None = True,
        pixel_values: torch.Tensor | None = None,
        input_features: torch.Tensor | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> dict[str, Any]:
        """Pass everything on every step: `forward` knows what is new."""
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "use_cache": use_cache,
            "pixel_values": pixel_values,
            "input_features": input_features,
        }

    def _encoded(self, given: torch.Tensor | None) -> Encoded:
        """Features of the images, made once for the same tensor."""
        if given is None:
            return self._pipeline.nothing()
        if self._given is None or self._given[0] is not given:
            ((name, spec),) = self._pipeline.encoder.inputs.items()
            array = given.detach().to("cpu", getattr(torch, spec.dtype)).numpy()
            if array.ndim != len(spec.shape) or array.shape[1:] != spec.shape[1:]:
                raise ConfigError(f"{name} has shape {list(array.shape)}; this archive takes [I, {_text(spec.shape)}]")
            self._given = (given, self._pipeline.encode({name: np.ascontiguousarray(array)}))
        return self._given[1]

    def _check(self, tokens: torch.Tensor, mask: torch.Tensor | None) -> None:
        if tokens.ndim != 2 or tokens.shape[0] != 1 or tokens.numel() == 0:
            raise ConfigError(f"input_ids of shape {list(tokens.shape)}: these archives run one sequence, [1, T]")
        if mask is not None and not bool(mask.all()):
            raise ConfigError("attention_mask has zeros: these archives take one sequence without padding")
        self._check_length(tokens.shape[1])
        words = tokens[tokens != self._pipeline.placeholder]
        if words.numel():
            refuse_unknown_tokens("input_ids", words, self._vocabulary)


def _text(shape: tuple[int | str, ...]) -> str:
    return ", ".join(map(str, shape[1:]))
