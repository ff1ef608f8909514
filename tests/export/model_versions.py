"""Tiny models of every kind, exported once: which version of tract runs which."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import models
import pipeline_models
import recurrent_models
import torch
import transformers as hf

from t2n_hf.errors import CheckError, TractError
from t2n_hf.export.check import check_archive
from t2n_hf.export.config import ExportConfig
from t2n_hf.export.graph import make_graph
from t2n_hf.export.package import write_archives
from t2n_hf.export.parts import Part
from t2n_hf.export.reference import Step
from t2n_hf.export.verify import references_of
from t2n_hf.hf.tasks import pipeline_of
from t2n_hf.nnef.versions import version_key

__all__ = ["MODELS", "BuiltModel", "built_models", "model_outcome"]

_ENCODER: Final = {key: models.SHAPE[key] for key in models.SHAPE if not key.endswith(("heads", "token_id"))} | {
    "num_attention_heads": 4
}


def bert() -> Any:
    return models.build(hf.BertForMaskedLM, hf.BertConfig(**_ENCODER))


def vit() -> Any:
    return models.build(hf.ViTForImageClassification, hf.ViTConfig(**pipeline_models.IMAGE, num_labels=5))


def resnet() -> Any:
    sizes: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
    return models.build(hf.ResNetForImageClassification, hf.ResNetConfig(**sizes, num_labels=5))


def recurrent(name: str) -> Callable[[], Any]:
    return lambda: recurrent_models.recurrent(name)


# Name -> how it is made, options of the export.
MODELS: Final[Mapping[str, tuple[Callable[[], Any], Mapping[str, Any]]]] = {
    "llama": (models.m1, {}),
    "llama in f16": (lambda: recurrent_models.quieter(models.m1()), {"dtype": "f16"}),
    "llama in Q4_0": (models.m1, {"weights": "q4_0", "embeddings": "q4_0"}),
    "llama with a mask": (models.m1, {"batch": True, "mask": True}),
    "phi3 with longrope": (models.m6, {}),
    "gemma3 with a window": (models.m5, {}),
    "gpt2": (models.m10, {}),
    "mixtral": (models.m4, {}),
    "mamba": (recurrent("mamba"), {}),
    "mamba2": (recurrent("mamba2"), {}),
    "rwkv": (recurrent("rwkv"), {}),
    "jamba": (recurrent("jamba"), {}),
    "qwen3_next": (recurrent("qwen3_next"), {}),
    "bert": (bert, {}),
    "vit": (vit, {}),
    "resnet": (resnet, {}),
    "t5": (pipeline_models.t5, {}),
    "whisper": (pipeline_models.whisper, {}),
    "llava": (pipeline_models.llava, {}),
}


@dataclass(frozen=True)
class BuiltModel:
    """Archives with what PyTorch gives; `least` is the version that the manifest would say."""

    archives: tuple[tuple[Path, Part, list[Step]], ...]
    dtype: str
    least: str


def built_models(root: Path, names: Iterable[str] = tuple(MODELS), target: str | None = None) -> dict[str, BuiltModel]:
    """Export below `root`, for a target when one is given."""
    return {name: _built(name, root / name.replace(" ", "_"), target) for name in names}


def _built(name: str, folder: Path, target: str | None) -> BuiltModel:
    make, options = MODELS[name]
    model = make()
    asked = {key: value for key, value in options.items() if key in ("batch", "mask")}
    config = ExportConfig(**{"dtype": "f32", "format": "dir", "target": target, **options})
    assert config.dtype is not None
    pipeline = pipeline_of(model, dtype=torch.float16 if config.dtype == "f16" else torch.float32, **asked)
    parts = [
        Part(name=part, interface=interface, graph=make_graph(interface, config), archive=part)
        for part, interface in pipeline.parts.items()
    ]
    folder.mkdir()
    write_archives(folder, config, parts, None)
    least = max((part.graph.least_tract for part in parts), key=version_key)
    return BuiltModel(tuple((folder / part.archive, part, references_of(part)) for part in parts), config.dtype, least)


def model_outcome(built: BuiltModel, tract_folder: Path) -> str:
    """Run a model with the tract of a folder: "right", or what went wrong."""
    for archive, part, steps in built.archives:
        try:
            check_archive(archive, part.graph.specs, steps, dtype=built.dtype, tract_folder=tract_folder)
        except (CheckError, TractError) as error:
            lines = str(error).partition("Stack backtrace")[0].strip().splitlines()
            return f"{part.name}: {lines[0][:200]} ... {lines[-1][-160:]}" if lines else part.name
    return "right"
