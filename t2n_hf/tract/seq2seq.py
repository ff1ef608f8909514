"""An encoder-decoder model that tract runs, with the `generate()` of transformers."""

import os
from dataclasses import dataclass
from typing import Any, ClassVar, Final, final

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
from transformers.generation import GenerationMode
from transformers.modeling_outputs import ModelOutput, Seq2SeqLMOutput

from t2n_hf.errors import ConfigError
from t2n_hf.tract.encoder_decoder import Encoded, EncoderDecoder
from t2n_hf.tract.generating import TractGenerator, refuse_unknown_tokens
from t2n_hf.tract.loading import export_folder, generation_config_of, manifest_of
from t2n_hf.tract.pipelines import open_encoder_decoder

__all__ = ["TractEncoderOutput", "TractModelForSeq2SeqLM"]

_MASK: Final = "attention_mask"


@dataclass
class TractEncoderOutput(ModelOutput):
    """What the encoder gave, as `generate()` passes it on.

    Attributes:
        last_hidden_state: [B, E, width].
        rows: which encoded sequence each row is, [B] i64; beams repeat them.
        encoded: what the decoder takes of it.
    """

    last_hidden_state: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    encoded: Any = None


@final
class TractModelForSeq2SeqLM(TractGenerator):
    """An exported encoder-decoder model: text, sound (Whisper) or images (TrOCR) in, text out.

    The encoder and the decoder each have a worker process; the decoder's keeps its caches. `generate()` does greedy
    search, sampling and beam search, of several sequences at once. Close it, or use it as a context manager.
    """

    _supported_generation_modes: ClassVar[list[str]] = [
        GenerationMode.GREEDY_SEARCH,
        GenerationMode.SAMPLE,
        GenerationMode.BEAM_SEARCH,
        GenerationMode.BEAM_SAMPLE,
    ]

    def __init__(
        self,
        pipeline: EncoderDecoder,
        config: PreTrainedConfig,
        generation_config: GenerationConfig,
        *,
        max_context: int | None = None,
    ) -> None:
        super().__init__(pipeline.decoder, config, generation_config, max_context)
        self.main_input_name = next(iter(pipeline.encoder.inputs))
        self._pipeline = pipeline
        self._encoder = _Encoder(pipeline, self.main_input_name, self._vocabulary)

    @classmethod
    def from_pretrained(
        cls,
        export: str | os.PathLike[str],
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        verify: bool = True,
        timeout_s: float | None = None,
    ) -> "TractModelForSeq2SeqLM":
        """Load an export folder, or an export on the Hub; the arguments are those of `TractModelForCausalLM`.

        Raises:
            TractError: tract is missing, or refuses an archive.
            StorageError: there is no export.
            HubError: the Hub does not give it.
            ArchiveError: a file is not what the manifest says.
            ConfigError: the export is no encoder and decoder.
        """
        folder = export_folder(export, revision, token)
        manifest = manifest_of(folder, verify)
        if set(manifest.archives) != {"encoder", "decoder"}:
            raise ConfigError(
                f"{folder} holds {', '.join(manifest.archives)} for {manifest.task}; TractModelForSeq2SeqLM runs an "
                "encoder and a decoder"
            )
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        archives = {name: folder / archive for name, archive in manifest.archives.items()}
        pipeline = open_encoder_decoder(archives, timeout_s=timeout_s)
        try:
            return cls(pipeline, config, generation_config_of(folder, config), max_context=manifest.max_context)
        except BaseException:
            pipeline.close()
            raise

    def get_encoder(self, *_args: Any, **_kwargs: Any) -> nn.Module:  # noqa: ANN401
        """The encoder, called with what the model takes: gives a TractEncoderOutput."""
        return self._encoder

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        encoder_outputs: TractEncoderOutput | None = None,
        use_cache: bool | None = None,
        *,
        pixel_values: torch.Tensor | None = None,
        input_features: torch.Tensor | None = None,
        input_values: torch.Tensor | None = None,
        **_ignored: Any,  # noqa: ANN401 - whatever generate() passes to every model
    ) -> Seq2SeqLMOutput:
        """Logits after the whole `decoder_input_ids` [B, T] i64: of the last position, [B, 1, V].

        `encoder_outputs` is what `get_encoder()` gave; without it the encoder runs on `input_ids` [B, E], or the image
        or sound that it takes, and `attention_mask`. Positions that agree with what the worker has seen are not
        computed again, unless `use_cache` is off.

        Raises ConfigError for tokens that the model lacks, or more of them than the archive was exported for.
        """
        if decoder_input_ids is None:
            raise ConfigError("decoder_input_ids are missing: the decoder needs one token per sequence at the least")
        if encoder_outputs is None:
            images = {"pixel_values": pixel_values}
            sounds = {"input_features": input_features, "input_values": input_values}
            encoder_outputs = self._encoder(input_ids, attention_mask, **images, **sounds)
        if encoder_outputs.encoded is None or encoder_outputs.rows is None:
            raise ConfigError("encoder_outputs are not of this model's encoder: take what get_encoder() gives")
        _refuse_tokens("decoder_input_ids", decoder_input_ids, self._vocabulary)
        self._check_length(decoder_input_ids.shape[1])
        if not use_cache:
            self._pipeline.reset()
        tokens = decoder_input_ids.to("cpu", torch.int64).numpy()
        logits = self._pipeline.logits(encoder_outputs.encoded, tokens, encoder_outputs.rows.numpy())
        return Seq2SeqLMOutput(
            logits=torch.from_numpy(logits), encoder_last_hidden_state=encoder_outputs.last_hidden_state
        )

    def close(self) -> None:
        """End the worker processes."""
        self._pipeline.close()

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        encoder_outputs: TractEncoderOutput | None = None,
        attention_mask: torch.Tensor | None = None,
        use_cache: bool | None = True,
        **kwargs: Any,  # noqa: ANN401 - of this name: generate() then lets through what forward takes
    ) -> dict[str, Any]:
        """Pass all tokens on every step: `forward` knows what is new in them. The encoder has had its mask."""
        return {"decoder_input_ids": input_ids, "encoder_outputs": encoder_outputs, "use_cache": use_cache}


@final
class _Encoder(nn.Module):
    """The encoder as transformers calls it: `encoder(main_input, attention_mask=...)`."""

    def __init__(self, pipeline: EncoderDecoder, main_input_name: str, vocabulary: int | None) -> None:
        super().__init__()
        self.main_input_name = main_input_name
        self._pipeline = pipeline
        self._vocabulary = vocabulary

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        input_features: torch.Tensor | None = None,
        input_values: torch.Tensor | None = None,
        **_ignored: Any,  # noqa: ANN401 - what generate() passes to every encoder
    ) -> TractEncoderOutput:
        """Run the encoder on its main input; a mask is [B, E], all ones when it is not given.

        Raises ConfigError for an input that the archive does not take.
        """
        given = (input_ids, pixel_values, input_features, input_values)
        value = next((tensor for tensor in given if tensor is not None), None)
        if value is None:
            raise ConfigError(f"the encoder takes {self.main_input_name}, which is missing")
        spec = self._pipeline.encoder.inputs[self.main_input_name]
        array = value.detach().to("cpu", getattr(torch, spec.dtype)).numpy()
        self._refuse_shape(array, spec.shape)
        inputs = {self.main_input_name: array}
        if self._pipeline.masked:
            _refuse_tokens(self.main_input_name, value, self._vocabulary)
            mask = torch.ones_like(value) if attention_mask is None else attention_mask
            inputs[_MASK] = mask.to("cpu", torch.int64).numpy()
        elif attention_mask is not None and not bool(attention_mask.all()):
            raise ConfigError(
                "attention_mask has zeros, and this archive takes no mask: pass sounds of one length, or one at a time"
            )
        encoded: Encoded = self._pipeline.encode(inputs)
        return TractEncoderOutput(
            last_hidden_state=torch.from_numpy(encoded.states), rows=torch.arange(len(array)), encoded=encoded
        )

    def _refuse_shape(self, array: np.ndarray, expected: tuple[int | str, ...]) -> None:
        same = array.ndim == len(expected) and all(
            isinstance(want, str) or want == got for got, want in zip(array.shape, expected, strict=True)
        )
        if not same:
            raise ConfigError(
                f"{self.main_input_name} has shape {list(array.shape)}; this archive takes "
                f"[{', '.join(map(str, expected))}]"
            )


def _refuse_tokens(name: str, tokens: torch.Tensor, vocabulary: int | None) -> None:
    if tokens.ndim != 2:
        raise ConfigError(f"{name} has shape {list(tokens.shape)}; expected [B, length]")
    refuse_unknown_tokens(name, tokens, vocabulary)
