"""Load one model the way that a side of the loading benchmark does. Imports only what that side needs."""

import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

Spec = dict[str, Any]


def dense(spec: Spec) -> torch.nn.Module:
    """Plain bf16. Its weights are copied out of the file's mapping: aligned and anonymous, which is its fastest."""
    model = AutoModelForCausalLM.from_pretrained(spec["folder"], dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def ours(spec: Spec) -> torch.nn.Module:
    """With T2NConfig, and a device map when there is a limit of memory."""
    from t2n_hf import T2NConfig

    config = T2NConfig(**spec["config"])
    return AutoModelForCausalLM.from_pretrained(
        spec["folder"], quantization_config=config, dtype=torch.bfloat16, **_placement(spec)
    )


def accelerate(spec: Spec) -> torch.nn.Module:
    """accelerate's disk offload through from_pretrained: it reads the checkpoint's own files."""
    return AutoModelForCausalLM.from_pretrained(
        spec["folder"], dtype=torch.bfloat16, offload_folder=spec["offload_folder"], **_placement(spec)
    )


def accelerate_dispatch(spec: Spec) -> torch.nn.Module:
    """accelerate's disk offload through load_checkpoint_and_dispatch: it writes a file for each weight."""
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch

    config = AutoConfig.from_pretrained(spec["folder"])
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return load_checkpoint_and_dispatch(
        model,
        spec["folder"],
        no_split_module_classes=model._no_split_modules,
        offload_folder=spec["offload_folder"],
        dtype=torch.bfloat16,
        **_placement(spec),
    )


def quanto(spec: Spec) -> torch.nn.Module:
    """optimum-quanto's int4 weights through transformers, which is faster than its own quantize() and freeze()."""
    from transformers import QuantoConfig

    return AutoModelForCausalLM.from_pretrained(
        spec["folder"], dtype=torch.bfloat16, quantization_config=QuantoConfig(weights="int4")
    )


# Options that say how a model computes, not where its weights are.
COUNTED = {"weights", "embeddings", "lm_head", "compute"}
LOADERS: dict[str, Callable[[Spec], torch.nn.Module]] = {
    "dense": dense,
    "ours": ours,
    "accelerate": accelerate,
    "accelerate_dispatch": accelerate_dispatch,
    "quanto": quanto,
}


def _placement(spec: Spec) -> dict[str, Any]:
    limit = spec.get("max_memory")
    if limit is None:
        return {"device_map": spec["device_map"]} if "device_map" in spec else {}
    return {"device_map": "auto", "max_memory": {"cpu": limit}}


def warm_interpreter(spec: Spec) -> None:
    """Load and run a tiny model the way of the side, so that all code is in memory before memory is counted."""
    set_verbosity_error()
    disable_progress_bar()
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    options = {name: value for name, value in spec.get("config", {}).items() if name in COUNTED}
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
        tiny = {**spec, "folder": folder, "config": options, "max_memory": None, "offload_folder": None}
        kind = "accelerate" if spec["kind"] == "accelerate_dispatch" else spec["kind"]
        model = LOADERS[kind](tiny).eval()
        model.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=2, do_sample=False)
    del model
    gc.collect()


def load(spec: Spec) -> tuple[torch.nn.Module, float]:
    """Give the model in eval mode, and the seconds that loading took."""
    if "offload_folder" in spec:
        Path(spec["offload_folder"]).mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    model = LOADERS[spec["kind"]](spec).eval()
    return model, time.perf_counter() - start
