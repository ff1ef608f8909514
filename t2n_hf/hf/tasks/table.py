"""Tasks by name: the class of transformers that loads a model for each, and what of its output is exported."""

from dataclasses import dataclass
from typing import Any, Final

import transformers
from transformers import PreTrainedConfig

from t2n_hf.errors import ConfigError

__all__ = ["TASKS", "Task", "auto_class", "task_named", "task_of_class", "unsupported"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task: the auto class that loads its models, how their class names end, and the model output it exports."""

    name: str
    auto: str
    endings: tuple[str, ...]
    output: str


TASKS: Final = {
    task.name: task
    for task in (
        Task(
            name="text-generation", auto="AutoModelForCausalLM", endings=("ForCausalLM", "LMHeadModel"), output="logits"
        ),
        Task(name="fill-mask", auto="AutoModelForMaskedLM", endings=("ForMaskedLM",), output="logits"),
        Task(
            name="text-classification",
            auto="AutoModelForSequenceClassification",
            endings=("ForSequenceClassification",),
            output="logits",
        ),
        Task(
            name="token-classification",
            auto="AutoModelForTokenClassification",
            endings=("ForTokenClassification",),
            output="logits",
        ),
        # The last one: "LMHeadModel" ends in "Model" too.
        Task(name="feature-extraction", auto="AutoModel", endings=("Model",), output="last_hidden_state"),
    )
}


def auto_class(task: str) -> Any:  # noqa: ANN401 - an auto class of transformers, which has no common type
    """The auto class of transformers that loads models for `task`. Raises ConfigError for an unknown task."""
    return getattr(transformers, task_named(task).auto)


def task_named(name: str) -> Task:
    """The task of that name. Raises ConfigError for an unknown one."""
    if name not in TASKS:
        raise ConfigError(f"unknown task {name!r}; supported tasks: {', '.join(TASKS)}")
    return TASKS[name]


def task_of_class(class_name: str, config: PreTrainedConfig) -> str:
    """Name of the task of a model class. Raises ConfigError for a class without one."""
    if config.is_encoder_decoder:
        raise unsupported(class_name, config)
    for task in TASKS.values():
        if class_name.endswith(task.endings):
            return task.name
    raise unsupported(class_name, config)


def unsupported(class_name: str, config: PreTrainedConfig) -> ConfigError:
    """The error that says that a model has no supported task, and which models have."""
    supported = "; ".join(f"{t.name} (classes *{', *'.join(t.endings)})" for t in TASKS.values())
    what = "an encoder-decoder model" if config.is_encoder_decoder else "not a text model of a supported task"
    return ConfigError(
        f"{class_name} ({config.model_type}) is {what}; supported, for token ids as input: {supported}. "
        "Any other module can be exported with example_args, dynamic_shapes and names of its own"
    )
