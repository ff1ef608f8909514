"""Which task a model is exported for, which class loads it, and what it takes."""

import pipeline_models
import pytest
import torch
import transformers as hf

from t2n_hf.errors import ConfigError
from t2n_hf.hf.caches.cross import RecordedCaches, WholePairCache
from t2n_hf.hf.tasks import ONE_GRAPH, TASKS, auto_class, pipeline_of
from t2n_hf.hf.tasks.inputs import image_shape, main_input
from t2n_hf.hf.tasks.table import task_named, task_of_class, task_of_model

# What optimum exports these for, by the class that their checkpoints name.
KNOWN = {
    "LlamaForCausalLM": ("LlamaConfig", "text-generation"),
    "GPT2LMHeadModel": ("GPT2Config", "text-generation"),
    "T5ForConditionalGeneration": ("T5Config", "text2text-generation"),
    "BartForConditionalGeneration": ("BartConfig", "text2text-generation"),
    "MarianMTModel": ("MarianConfig", "text2text-generation"),
    "WhisperForConditionalGeneration": ("WhisperConfig", "automatic-speech-recognition"),
    "Wav2Vec2ForCTC": ("Wav2Vec2Config", "automatic-speech-recognition"),
    "VisionEncoderDecoderModel": ("VisionEncoderDecoderConfig", "image-text-to-text"),
    "LlavaForConditionalGeneration": ("LlavaConfig", "image-text-to-text"),
    "Gemma3ForConditionalGeneration": ("Gemma3Config", "image-text-to-text"),
    "Qwen3VLForConditionalGeneration": ("Qwen3VLConfig", "image-text-to-text"),
    "VoxtralForConditionalGeneration": ("VoxtralConfig", "audio-text-to-text"),
    "Qwen2AudioForConditionalGeneration": ("Qwen2AudioConfig", "audio-text-to-text"),
    "BertForMaskedLM": ("BertConfig", "fill-mask"),
    "BertForQuestionAnswering": ("BertConfig", "question-answering"),
    "BertModel": ("BertConfig", "feature-extraction"),
    "ViTForImageClassification": ("ViTConfig", "image-classification"),
    "DetrForObjectDetection": ("DetrConfig", "object-detection"),
    "SegformerForSemanticSegmentation": ("SegformerConfig", "image-segmentation"),
    "DPTForDepthEstimation": ("DPTConfig", "depth-estimation"),
    "CLIPModel": ("CLIPConfig", "zero-shot-image-classification"),
    "ASTForAudioClassification": ("ASTConfig", "audio-classification"),
    "WavLMForXVector": ("WavLMConfig", "audio-xvector"),
}


@pytest.mark.parametrize(("name", "config", "task"), [(name, *rest) for name, rest in KNOWN.items()], ids=KNOWN)
def test_the_task_of_a_model_is_that_of_the_class_its_checkpoint_names(name, config, task):
    assert task_of_class(name, getattr(hf, config)()) == task


def test_a_class_that_transformers_does_not_know_goes_by_its_name():
    assert task_of_class("MyOwnForSequenceClassification", hf.BertConfig()) == "text-classification"
    with pytest.raises(ConfigError, match=r"MyOwn \(bert\) is a model of no supported task; those are .*fill-mask"):
        task_of_class("MyOwn", hf.BertConfig())


def test_of_the_classes_of_a_task_the_one_that_knows_the_configuration_loads_it():
    task = "automatic-speech-recognition"
    assert auto_class(task, hf.WhisperConfig()) is hf.AutoModelForSpeechSeq2Seq
    assert auto_class(task, hf.Wav2Vec2Config()) is hf.AutoModelForCTC
    assert auto_class("image-segmentation", hf.Mask2FormerConfig()) is hf.AutoModelForUniversalSegmentation
    assert auto_class("translation") is hf.AutoModelForSeq2SeqLM


def test_other_names_of_tasks_mean_the_same():
    assert task_named("summarization") is TASKS["text2text-generation"]
    assert task_named("ner") is TASKS["token-classification"]
    with pytest.raises(ConfigError, match="unknown task 'nothing'; supported tasks: text2text-generation"):
        task_named("nothing")


def test_an_encoder_decoder_is_two_graphs_that_meet_by_names():
    pipeline = pipeline_of(pipeline_models.t5())
    encoder, decoder = pipeline.parts.values()
    assert list(pipeline.parts) == ["encoder", "decoder"]
    assert encoder.input_names == ("input_ids", "attention_mask")
    assert encoder.output_names[0] == "last_hidden_state"
    assert set(encoder.output_names[1:]) == {name for name in decoder.input_names if name.startswith("cross_")}
    fed = {name.replace("out_", "in_", 1) for name in decoder.output_names if name.startswith("out_cache_")}
    assert fed == {name for name in decoder.input_names if name.startswith("in_cache_")}
    assert pipeline.start({}).tolist() == [[0]]


def test_the_states_of_an_encoder_decoder_model_may_be_had_alone():
    pipeline = pipeline_of(hf.T5EncoderModel(hf.T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)))
    assert list(pipeline.parts) == [ONE_GRAPH]
    assert pipeline.main.output_names == ("last_hidden_state",)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (hf.ViTConfig(image_size=48), (3, 48, 48)),
        (hf.ViTConfig(image_size=[32, 64], num_channels=1), (1, 32, 64)),
        (hf.LlavaConfig(vision_config=hf.CLIPVisionConfig(image_size=96)), (3, 96, 96)),
        (hf.ResNetConfig(num_channels=3), (3, 224, 224)),
    ],
    ids=["side", "height and width", "inside", "any"],
)
def test_images_have_the_size_that_the_configuration_says(config, shape):
    assert image_shape(config) == shape


def test_sounds_have_the_length_that_their_encoder_takes():
    batch = torch.export.Dim("B", min=1)
    whisper = main_input(pipeline_models.whisper(), "input_features", batch)
    assert (tuple(whisper.example.shape[1:]), whisper.length) == ((16, 100), None)
    speech = main_input(pipeline_models.speech_to_text(), "input_features", batch)
    assert (speech.example.shape[2], speech.length, speech.dims[1].max) == (16, "N", 400)
    with pytest.raises(ConfigError, match="takes 'pixel_patches', which no task describes"):
        main_input(pipeline_models.llava(), "pixel_patches", batch)


def test_caches_of_decoder_and_encoder_lie_together_layer_by_layer():
    own = [torch.full((1, 1, 2, 3), float(i)) for i in range(4)]
    cross = [torch.full((1, 1, 5, 3), float(10 + i)) for i in range(4)]
    cache = WholePairCache(own, cross)
    leaves, spec = torch.utils._pytree.tree_flatten(cache)
    assert [float(leaf.flatten()[0]) for leaf in leaves] == [0, 1, 10, 11, 2, 3, 12, 13]
    again = torch.utils._pytree.tree_unflatten(leaves, spec)
    assert again.get_seq_length() == 2
    assert all(again.is_updated.values())
    with pytest.raises(ConfigError, match=r"4 tensors .* for 2"):
        WholePairCache(own, cross[:2])


def test_recorded_caches_hold_what_a_first_call_makes():
    model = pipeline_models.bart()
    caches, inputs = RecordedCaches(), pipeline_models.inputs_for(model)
    with torch.no_grad():
        model(**inputs, decoder_input_ids=torch.zeros(2, 1, dtype=torch.int64), cache=caches, use_cache=True)
        native = model(**inputs, decoder_input_ids=torch.zeros(2, 1, dtype=torch.int64), use_cache=True).cache
    expected = [tensor for layer in native.cross_attention_cache.layers for tensor in (layer.keys, layer.values)]
    torch.testing.assert_close(caches.cross(), expected)
    assert [tensor.shape[2] for tensor in caches.own()] == [1] * 4


class Mine(hf.LlamaForCausalLM):
    pass


class MyModel(hf.LlamaForCausalLM):
    pass


class MyForTokenClassification(hf.BertModel):
    pass


class MyEncoder(hf.BertModel):
    pass


class OwnModel(hf.BertPreTrainedModel):
    pass


class OwnRanker(hf.BertPreTrainedModel):
    pass


@pytest.mark.parametrize(
    ("kind", "config", "task"),
    [
        (Mine, hf.LlamaConfig, "text-generation"),
        (MyModel, hf.LlamaConfig, "text-generation"),
        (MyForTokenClassification, hf.BertConfig, "token-classification"),
        (MyEncoder, hf.BertConfig, "feature-extraction"),
        (OwnModel, hf.BertConfig, "feature-extraction"),
    ],
)
def test_a_class_of_ones_own_has_the_task_that_it_says_or_that_of_its_base(kind, config, task):
    with torch.device("meta"):
        small = config(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
        assert task_of_model(kind(small)) == task


def test_a_class_of_ones_own_that_says_nothing_is_refused_by_its_name():
    with pytest.raises(ConfigError, match="OwnRanker"):
        task_of_model(OwnRanker(hf.BertConfig(hidden_size=16, num_attention_heads=2, vocab_size=8)))
