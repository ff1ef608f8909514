"""Speech and sound: waves or spectrograms in, at two lengths where the architecture has a free length."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from zoo.encoder_decoders import DECODED
from zoo.entry import VOCABULARY, Entry, PlainModule, built, config_of, token_ids

__all__ = ["BATCHES", "MODELS", "hearer", "noise"]

_WAV2VEC2: Final = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "conv_dim": (32, 32, 32),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "vocab_size": 32,
}
_STABLE: Final = {"do_stable_layer_norm": True, "feat_extract_norm": "layer"}
_SPECIAL: Final = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_SEQ2SEQ: Final = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
}
_NO_CACHE: Final = {"use_cache": False}


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def hearer(
    name: str,
    model: str,
    config: str,
    inputs: Callable[[Mapping[str, int]], dict[str, torch.Tensor]],
    axes: Mapping[str, Mapping[int, str]],
    *,
    sizes: Sequence[Mapping[str, int]],
    outputs: Sequence[str] = ("logits",),
    called: Mapping[str, Any] | None = None,
    least: Mapping[str, int] | None = None,
    most: Mapping[str, int] | None = None,
    gain: float = 1.0,
    **options: Any,
) -> Entry:
    """Entry whose first `sizes` are those of the example and whose others are tested."""

    def make() -> PlainModule:
        return PlainModule(
            model=built(model, config_of(config, options), gain),
            inputs=inputs,
            axes=axes,
            traced=sizes[0],
            tested=sizes[1:],
            outputs=outputs,
            options=called or {},
            least=least or {},
            most=most or {},
        )

    return Entry(name=name, family="audio", make=make)


def _waves(name: str, model: str, config: str, **options: Any) -> Entry:
    """Entry of a model of waves, [B, L]."""
    return hearer(
        name,
        model,
        config,
        lambda sizes: {"input_values": noise(sizes["B"], sizes["L"])},
        {"input_values": {0: "B", 1: "L"}},
        sizes=[{"B": 2, "L": 1600}, {"B": 1, "L": 1203}, {"B": 3, "L": 2048}],
        least={"L": 400},
        **options,
    )


def _frames(key: str, *shape: int) -> Callable[[Mapping[str, int]], dict[str, torch.Tensor]]:
    return lambda sizes: {key: noise(sizes["B"], *shape)}


BATCHES: Final = [{"B": 2}, {"B": 1}, {"B": 3}]
_MOONSHINE: Final = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "encoder_num_hidden_layers": 2,
    "decoder_num_hidden_layers": 2,
    "encoder_num_attention_heads": 4,
    "decoder_num_attention_heads": 4,
}
_PARAKEET_ENCODER: Final = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "conv_kernel_size": 5,
    "subsampling_factor": 8,
    "subsampling_conv_channels": 16,
    "num_mel_bins": 32,
}

MODELS: Final = (
    _waves("wav2vec2", "Wav2Vec2ForCTC", "Wav2Vec2Config", **_WAV2VEC2),
    _waves("wav2vec2_stable", "Wav2Vec2ForCTC", "Wav2Vec2Config", **_WAV2VEC2, **_STABLE),
    _waves(
        "wav2vec2_classifier",
        "Wav2Vec2ForSequenceClassification",
        "Wav2Vec2Config",
        **_WAV2VEC2,
        classifier_proj_size=32,
    ),
    _waves("hubert", "HubertForCTC", "HubertConfig", **_WAV2VEC2),
    _waves("wavlm", "WavLMForCTC", "WavLMConfig", **_WAV2VEC2),
    _waves("unispeech", "UniSpeechForCTC", "UniSpeechConfig", **_WAV2VEC2),
    _waves("unispeech_sat", "UniSpeechSatForCTC", "UniSpeechSatConfig", **_WAV2VEC2),
    _waves(
        "data2vec_audio",
        "Data2VecAudioForCTC",
        "Data2VecAudioConfig",
        **{**_WAV2VEC2, "num_conv_pos_embeddings": 2},
        conv_pos_kernel_size=5,
    ),
    _waves("sew", "SEWForCTC", "SEWConfig", **_WAV2VEC2, squeeze_factor=2),
    _waves(
        "sew_d",
        "SEWDForCTC",
        "SEWDConfig",
        **_WAV2VEC2,
        squeeze_factor=2,
        max_position_embeddings=64,
        position_buckets=16,
    ),
    _waves(
        "wav2vec2_conformer",
        "Wav2Vec2ConformerForCTC",
        "Wav2Vec2ConformerConfig",
        **_WAV2VEC2,
        position_embeddings_type="rotary",
    ),
    _waves(
        "wav2vec2_conformer_relative",
        "Wav2Vec2ConformerForCTC",
        "Wav2Vec2ConformerConfig",
        **_WAV2VEC2,
        position_embeddings_type="relative",
    ),
    hearer(
        "wav2vec2_bert",
        "Wav2Vec2BertForCTC",
        "Wav2Vec2BertConfig",
        lambda sizes: {"input_features": noise(sizes["B"], sizes["L"], 16)},
        {"input_features": {0: "B", 1: "L"}},
        sizes=[{"B": 2, "L": 40}, {"B": 1, "L": 33}, {"B": 3, "L": 57}],
        feature_projection_input_dim=16,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        vocab_size=32,
    ),
    hearer(
        "ast",
        "ASTForAudioClassification",
        "ASTConfig",
        _frames("input_values", 64, 32),
        {"input_values": {0: "B"}},
        sizes=BATCHES,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        patch_size=16,
        frequency_stride=10,
        time_stride=10,
        max_length=64,
        num_mel_bins=32,
    ),
    hearer(
        "whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        lambda sizes: {
            "input_features": noise(sizes["B"], 16, 100),
            "decoder_input_ids": token_ids(sizes["B"], sizes["T"]),
        },
        {"input_features": {0: "B"}, "decoder_input_ids": DECODED},
        sizes=[{"B": 2, "T": 7}, {"B": 1, "T": 4}, {"B": 3, "T": 11}],
        called=_NO_CACHE,
        **_SEQ2SEQ,
        **_SPECIAL,
        num_mel_bins=16,
        max_source_positions=50,
        max_target_positions=32,
    ),
    hearer(
        "whisper_classifier",
        "WhisperForAudioClassification",
        "WhisperConfig",
        _frames("input_features", 16, 100),
        {"input_features": {0: "B"}},
        sizes=BATCHES,
        **_SEQ2SEQ,
        **_SPECIAL,
        num_mel_bins=16,
        max_source_positions=50,
        max_target_positions=32,
    ),
    hearer(
        "moonshine",
        "MoonshineForConditionalGeneration",
        "MoonshineConfig",
        lambda sizes: {"input_values": noise(1, sizes["L"]), "decoder_input_ids": token_ids(1, sizes["T"])},
        {"input_values": {1: "L"}, "decoder_input_ids": {1: "T"}},
        sizes=[{"L": 3200, "T": 7}, {"L": 2500, "T": 4}, {"L": 4711, "T": 9}],
        called=_NO_CACHE,
        least={"L": 1300},
        **_MOONSHINE,
        **_SPECIAL,
    ),
    hearer(
        "speech_to_text",
        "Speech2TextForConditionalGeneration",
        "Speech2TextConfig",
        lambda sizes: {
            "input_features": noise(sizes["B"], sizes["L"], 16),
            "decoder_input_ids": token_ids(sizes["B"], sizes["T"]),
        },
        {"input_features": {0: "B", 1: "L"}, "decoder_input_ids": DECODED},
        sizes=[{"B": 2, "L": 60, "T": 7}, {"B": 1, "L": 43, "T": 4}, {"B": 3, "L": 84, "T": 9}],
        called=_NO_CACHE,
        least={"L": 8},
        most={"L": 380, "T": 32},
        **_SEQ2SEQ,
        input_feat_per_channel=16,
        conv_channels=32,
        max_source_positions=100,
        max_target_positions=32,
        decoder_start_token_id=2,
    ),
    hearer(
        "parakeet_ctc",
        "ParakeetForCTC",
        "ParakeetCTCConfig",
        _frames("input_features", 96, 32),
        {"input_features": {0: "B"}},
        sizes=BATCHES,
        vocab_size=32,
        pad_token_id=0,
        encoder_config=_PARAKEET_ENCODER,
    ),
    hearer(
        "speecht5",
        "SpeechT5ForSpeechToText",
        "SpeechT5Config",
        lambda sizes: {
            "input_values": noise(sizes["B"], sizes["L"]),
            "decoder_input_ids": token_ids(sizes["B"], sizes["T"], 30),
        },
        {"input_values": {0: "B", 1: "L"}, "decoder_input_ids": DECODED},
        sizes=[{"B": 2, "L": 1600, "T": 5}, {"B": 1, "L": 1203, "T": 3}, {"B": 3, "L": 2048, "T": 8}],
        called=_NO_CACHE,
        least={"L": 400},
        most={"T": 400},
        vocab_size=32,
        hidden_size=64,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=128,
        conv_dim=(32, 32, 32),
        conv_stride=(5, 2, 2),
        conv_kernel=(10, 3, 3),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
    ),
)
