"""Tasks by name: the classes of transformers that load models for each, and what of their output is exported."""

from dataclasses import dataclass
from typing import Any, Final

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from t2n_hf.errors import ConfigError

__all__ = ["TASKS", "Task", "auto_class", "task_named", "task_of_class", "task_of_model", "unsupported"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task.

    Attributes:
        name: as the Hub has it.
        autos: auto classes that load its models; the first that knows a model is taken.
        endings: how names of its model classes end that no auto class knows (code that comes with a checkpoint).
        outputs: the outputs that are exported, those of them that a model gives, in this order.
        instead: what is exported of a model that gives none of `outputs`.
        generates: whether its models generate tokens.
    """

    name: str
    autos: tuple[str, ...]
    endings: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("logits",)
    instead: tuple[str, ...] = ()
    generates: bool = False


# A class that several auto classes know has the first of their tasks: BART is listed for masked language models too,
# and models of text and images among causal ones.
TASKS: Final = {
    task.name: task
    for task in (
        Task(name="text2text-generation", autos=("AutoModelForSeq2SeqLM",), generates=True),
        Task(name="automatic-speech-recognition", autos=("AutoModelForSpeechSeq2Seq", "AutoModelForCTC")),
        Task(name="image-text-to-text", autos=("AutoModelForImageTextToText",), generates=True),
        Task(
            name="audio-text-to-text",
            autos=("AutoModelForMultimodalLM", "AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq"),
            generates=True,
        ),
        Task(
            name="text-generation",
            autos=("AutoModelForCausalLM",),
            endings=("ForCausalLM", "LMHeadModel"),
            generates=True,
        ),
        Task(name="fill-mask", autos=("AutoModelForMaskedLM",), endings=("ForMaskedLM",)),
        Task(
            name="text-classification",
            autos=("AutoModelForSequenceClassification",),
            endings=("ForSequenceClassification",),
        ),
        Task(
            name="token-classification", autos=("AutoModelForTokenClassification",), endings=("ForTokenClassification",)
        ),
        Task(
            name="question-answering",
            autos=("AutoModelForQuestionAnswering",),
            endings=("ForQuestionAnswering",),
            outputs=("start_logits", "end_logits"),
        ),
        Task(name="image-classification", autos=("AutoModelForImageClassification",)),
        Task(
            name="object-detection",
            autos=("AutoModelForObjectDetection",),
            outputs=("logits", "pred_boxes"),
            instead=("last_hidden_state",),
        ),
        Task(
            name="image-segmentation",
            autos=(
                "AutoModelForSemanticSegmentation",
                "AutoModelForUniversalSegmentation",
                "AutoModelForInstanceSegmentation",
                "AutoModelForImageSegmentation",
            ),
            outputs=("class_queries_logits", "masks_queries_logits", "logits", "pred_boxes", "pred_masks"),
        ),
        Task(name="image-to-image", autos=("AutoModelForImageToImage",), outputs=("reconstruction",)),
        Task(name="pose-estimation", autos=("AutoModelForPoseEstimation",), outputs=("heatmaps",)),
        Task(name="depth-estimation", autos=("AutoModelForDepthEstimation",), outputs=("predicted_depth",)),
        Task(
            name="zero-shot-image-classification",
            autos=("AutoModelForZeroShotImageClassification",),
            outputs=("logits_per_image", "logits_per_text", "text_embeds", "image_embeds"),
        ),
        Task(name="audio-classification", autos=("AutoModelForAudioClassification",)),
        Task(name="audio-frame-classification", autos=("AutoModelForAudioFrameClassification",)),
        Task(name="audio-xvector", autos=("AutoModelForAudioXVector",), outputs=("logits", "embeddings")),
        # The last one: "LMHeadModel" ends in "Model" too.
        Task(
            name="feature-extraction",
            autos=("AutoModel",),
            endings=("Model", "ModelWithProjection"),  # CLIP's towers
            outputs=("last_hidden_state", "text_embeds", "image_embeds"),
            instead=("pooler_output", "logits"),
        ),
    )
}

# Endings that say what a model is for; "Model" does not.
_TELLING: Final = tuple(end for task in TASKS.values() if task.name != "feature-extraction" for end in task.endings)

# They load encoder-decoders, and language models that listen.
_OF_SEQUENCES: Final = ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq")

# What else these tasks are called: pipelines of transformers, and uses of one kind of model.
_SYNONYMS: Final = {
    "image-to-text": "image-text-to-text",
    "translation": "text2text-generation",
    "summarization": "text2text-generation",
    "speech-recognition": "automatic-speech-recognition",
    "sentiment-analysis": "text-classification",
    "ner": "token-classification",
    "masked-lm": "fill-mask",
    "causal-lm": "text-generation",
    "seq2seq-lm": "text2text-generation",
    "semantic-segmentation": "image-segmentation",
    "image-feature-extraction": "feature-extraction",
}


def auto_class(task: str, config: PreTrainedConfig | None = None) -> Any:  # noqa: ANN401 - they have no common type
    """The auto class of transformers that loads models for `task`: the one that knows `config`, or the first.

    Raises ConfigError for an unknown task.
    """
    autos = [getattr(transformers, name) for name in task_named(task).autos]
    knowing = [auto for auto in autos if config is not None and type(config) in auto._model_mapping]
    return (knowing or autos)[0]


def task_named(name: str) -> Task:
    """The task of that name, or of which it is another one. Raises ConfigError for an unknown one."""
    name = _SYNONYMS.get(name, name)
    if name not in TASKS:
        raise ConfigError(f"unknown task {name!r}; supported tasks: {', '.join(TASKS)}")
    return TASKS[name]


def task_of_class(class_name: str, config: PreTrainedConfig) -> str:
    """Name of the task of a model class. Raises ConfigError for a class without one."""
    if class_name.endswith(TASKS["text-generation"].endings):  # without importing all the auto classes
        return "text-generation"
    for task in TASKS.values():
        auto = next((auto for auto in task.autos if _knows(auto, class_name)), None)
        if auto is not None:
            # transformers lists language models that listen among those of text to text, and of speech to text.
            listens = auto in _OF_SEQUENCES and not config.is_encoder_decoder
            return "audio-text-to-text" if listens else task.name
    for task in TASKS.values():
        if class_name.endswith(task.endings):
            return task.name
    raise unsupported(class_name, config)


def task_of_model(model: PreTrainedModel) -> str:
    """Name of the task of a model, by its class; by that of transformers which it derives from, unless it says its own.

    Raises ConfigError for a model without one.
    """
    own = type(model)
    names = [kind.__name__ for kind in own.__mro__ if issubclass(kind, PreTrainedModel) and _is_of_transformers(kind)]
    says = own.__name__.endswith(_TELLING) or own.__name__ in names
    return task_of_class(own.__name__ if says or not names else names[0], model.config)


def _is_of_transformers(kind: type) -> bool:
    return kind.__module__.startswith("transformers.") and not kind.__name__.endswith("PreTrainedModel")


def _knows(auto: str, class_name: str) -> bool:
    known = getattr(transformers, auto)._model_mapping._model_mapping.values()
    return any(class_name == name or (isinstance(name, tuple) and class_name in name) for name in known)


def unsupported(class_name: str, config: PreTrainedConfig) -> ConfigError:
    """The error that says that a model has no supported task, and which there are."""
    return ConfigError(
        f"{class_name} ({config.model_type}) is a model of no supported task; those are {', '.join(TASKS)}. "
        "Any other module can be exported with example_args, dynamic_shapes and names of its own"
    )
