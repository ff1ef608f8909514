"""Open a checkpoint for the exporter and the command line: everything on disk unless told otherwise."""

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import transformers
from transformers import AutoConfig
from transformers.utils import cached_file

from t2n_hf.errors import CheckpointNotFoundError, ConfigError, FormatError, T2NError
from t2n_hf.hf.config import NOT_QUANTIZED, QUANT_METHOD, Late, T2NConfig
from t2n_hf.hf.dispatch.options import limits_of
from t2n_hf.hf.one_at_a_time import ONE_AT_A_TIME
from t2n_hf.hf.placement.device_map import DISK
from t2n_hf.hf.quantizer import register
from t2n_hf.hf.tasks import TASKS, auto_class
from t2n_hf.store.checkpoint import CheckpointIndex

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["check_checkpoint", "checkpoint_folder", "empty_model", "load_checkpoint"]

_ON_DISK: Final[Mapping[str, str]] = {"": "disk"}
# What transformers says of a package that a class needs.
_INSTALL: Final = re.compile(r"`(pip install [^`]+)`")


def check_checkpoint(folder: str | Path) -> None:
    """Look at a model folder before anything is loaded.

    Raises CheckpointNotFoundError when it has no config.json or no weights, StorageError for a missing or truncated
    shard, FormatError for a file that is not what it should be.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise CheckpointNotFoundError(
            f"{folder} has no config.json; expected a model folder as save_pretrained writes it, or a repository's id"
        )
    CheckpointIndex.open(folder).close()


def checkpoint_folder(path_or_id: str | Path, revision: str | None = None, **options: Any) -> Path:  # noqa: ANN401
    """Give the local folder of a model: `path_or_id` itself, or the snapshot of a repository (its config is fetched).

    `options` (token, cache_dir) go to the download. Raises CheckpointNotFoundError when there is neither.
    """
    folder = Path(path_or_id)
    if folder.is_dir():
        return folder
    try:
        found = cached_file(str(path_or_id), "config.json", revision=revision, **options)
    except OSError as error:
        raise CheckpointNotFoundError(f"{path_or_id} is neither a model folder nor a repository: {error}") from error
    if found is None:
        raise CheckpointNotFoundError(f"{path_or_id} has no config.json")
    return Path(found).parent


def load_checkpoint(
    path_or_id: str | Path,
    *,
    weights: str | None = None,
    embeddings: str | None = None,
    lm_head: str | None = None,
    device_map: str | Mapping[str, Any] | None = _ON_DISK,
    max_memory: Mapping[Any, Any] | None = None,
    dtype: torch.dtype | str | None = None,
    task: str | None = None,
    config: T2NConfig | None = None,
    late: Late | None = None,
    spill_dir: str | Path | None = None,
    **options: Any,  # noqa: ANN401 - for from_pretrained: revision, token, cache_dir, trust_remote_code...
) -> "PreTrainedModel":
    """Load a model folder or a repository of the Hub, its weights left on disk unless `device_map` says otherwise.

    Weights have to be in safetensors files; pickled ones (`.bin`) are refused, with what to do. May be called from any
    thread: one waits for the other (transformers' own from_pretrained must not run in two threads at once).

    Args:
        path_or_id: a folder, or an id of the Hub (which is downloaded).
        weights: quantize to this class while loading; None takes the checkpoint as it is.
        embeddings: the same for the token embeddings.
        lm_head: the same for the head.
        device_map: as for from_pretrained, and "disk". None: all in memory.
        max_memory: limits by device, in bytes or text: what device_map="auto" is made of, and what a given map must
            keep to.
        dtype: None keeps that of the checkpoint.
        task: which head to load, one of hf.tasks.TASKS; None takes the class that the checkpoint names.
        config: all options at once, in place of `weights`, `embeddings` and `lm_head`.
        late: quantize matrices that stay on disk when they are read, the first time ("once") or each time ("always"),
            where that gives the same: for a model whose weights are read in one pass. A bad value, which is refused
            while loading otherwise, is then refused when a weight is read.
        spill_dir: as of T2NConfig; takes the place of that of `config`.
        **options: handed to from_pretrained. `trust_remote_code` stays False unless it is given.

    Raises CheckpointNotFoundError, StorageError or FormatError for a checkpoint that cannot be loaded, ConfigError for
    options that contradict it.
    """
    register()
    options.setdefault("trust_remote_code", False)  # None would have transformers ask on standard input
    if config is not None and (weights, embeddings, lm_head) != (None, None, None):
        raise ConfigError("config= already says weights, embeddings and lm_head; give one or the other")
    if Path(path_or_id).is_file():
        raise CheckpointNotFoundError(f"{path_or_id} is a file; expected a model folder, or a repository's id")
    if Path(path_or_id).is_dir():
        check_checkpoint(Path(path_or_id, options.get("subfolder") or ""))
    model_config = _read_config(path_or_id, options)
    loader = _loader(model_config, task, options)
    stored = getattr(model_config, "quantization_config", None)
    if stored is not None:
        _refuse_repacking(path_or_id, stored, (weights, embeddings, lm_head))
    else:
        config = config or T2NConfig(weights or NOT_QUANTIZED, embeddings=embeddings, lm_head=lm_head)
    device_map = _ON_DISK if isinstance(device_map, str) and device_map == DISK else device_map
    # transformers does not pass limits on beside a given map.
    limits = limits_of(max_memory) if isinstance(device_map, Mapping) else None
    config = _for_this_load(config, stored, limits=limits, late=late, spill_dir=spill_dir)
    if config is not None:  # an explicit None would make transformers forget that a checkpoint is quantized
        options["quantization_config"] = config
    may_differ = options.pop("ignore_mismatched_sizes", False)
    try:
        with ONE_AT_A_TIME:
            model, found = loader.from_pretrained(
                path_or_id,
                config=model_config,
                device_map=dict(device_map) if isinstance(device_map, Mapping) else device_map,
                max_memory=None if max_memory is None else dict(max_memory),
                dtype=dtype or "auto",
                ignore_mismatched_sizes=True,  # refused below, in words
                output_loading_info=True,
                **options,
            )
    except T2NError:
        raise
    except ValueError as error:  # transformers' word for options, and classes, that do not fit
        raise ConfigError(f"{path_or_id} cannot be loaded like this: {str(error).splitlines()[0]}") from error
    except ImportError as error:  # a package that this one model needs (timm)
        wanted = ", ".join(_INSTALL.findall(str(error))) or str(error)
        raise ConfigError(f"{path_or_id} needs a package that is not installed: {wanted}") from error
    _refuse_random_weights(path_or_id, found, task, may_differ)
    return model


def _for_this_load(
    config: T2NConfig | None,
    stored: Any,  # noqa: ANN401 - a dict, or a configuration
    *,
    limits: dict[Any, int] | None,
    late: Late | None,
    spill_dir: str | Path | None,
) -> T2NConfig | None:
    """Give a copy of `config` that also says what holds for this load; None: all is as a packed checkpoint says."""
    if config is None:
        if limits is None and spill_dir is None:
            return None
        config = T2NConfig(compute=stored.get("compute", "exact") if isinstance(stored, dict) else stored.compute)
    config = copy.deepcopy(config)
    config.limits = config.limits if limits is None else limits
    config.late = config.late if late is None else late
    config.spill_dir = config.spill_dir if spill_dir is None else T2NConfig(spill_dir=spill_dir).spill_dir
    return config


def empty_model(
    path_or_id: str | Path, task: str | None, dtype: torch.dtype | None, options: Mapping[str, Any]
) -> tuple["PreTrainedModel", torch.dtype]:
    """Make the model of a folder on the meta device, and say the dtype that it would be loaded in.

    Raises CheckpointNotFoundError, FormatError and ConfigError as `load_checkpoint` does.
    """
    config = _read_config(path_or_id, options)
    loader = _loader(config, task, options)
    found = dtype or getattr(config.get_text_config(), "dtype", None) or torch.get_default_dtype()
    make = getattr(loader, "_from_config", None) or loader.from_config
    with ONE_AT_A_TIME, torch.device("meta"):
        model = make(copy.deepcopy(config), dtype=found)
    return model, found


def _refuse_random_weights(
    path_or_id: str | Path, found: Mapping[str, Any], task: str | None, may_differ: bool
) -> None:
    """Refuse a checkpoint that does not fill the model: transformers gives what is left random values, and goes on."""
    differ = sorted(found.get("mismatched_keys", ()), key=str)
    if differ and not may_differ:
        name, stored, wanted = differ[0]
        more = f", and {len(differ) - 1} more differ" if len(differ) > 1 else ""
        raise FormatError(
            f"{path_or_id}: {name} has shape {tuple(stored)}, its config.json asks for {tuple(wanted)}{more}; repair "
            "config.json, or take the checkpoint that belongs to it"
        )
    # What pools the states of an encoder is no part of its features, and often not stored.
    unused = task == "feature-extraction"
    missing = sorted(name for name in found.get("missing_keys", ()) if not (unused and "pooler" in name.split(".")))
    if missing and not may_differ:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        head = f"; is task={task!r} what it was trained for?" if task else ""
        raise FormatError(f"{path_or_id} holds no values for {', '.join(missing[:3])}{more}{head}")


def _read_config(path_or_id: str | Path, options: Mapping[str, Any]) -> Any:  # noqa: ANN401 - a PreTrainedConfig
    kept = {
        k: v for k, v in options.items() if k in ("revision", "token", "cache_dir", "trust_remote_code", "subfolder")
    }
    try:
        return AutoConfig.from_pretrained(path_or_id, **kept)
    except OSError as error:
        raise CheckpointNotFoundError(f"{path_or_id} is neither a model folder nor a repository: {error}") from error
    except ValueError as error:
        raise FormatError(f"{path_or_id}: its config.json cannot be used: {error}") from error


def _loader(config: Any, task: str | None, options: Mapping[str, Any]) -> Any:  # noqa: ANN401 - a class of transformers
    if task is not None:
        auto = auto_class(task, config)
        # A model of images and text has its language model in it, which no auto class knows by that configuration.
        has_parts = config.get_text_config() is not config
        known = type(config) in auto._model_mapping or getattr(config, "auto_map", None)
        if known or not has_parts or not config.architectures:
            return auto
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    if getattr(config, "auto_map", None) and options.get("trust_remote_code"):
        return transformers.AutoModelForCausalLM
    raise ConfigError(
        f"config.json names the model class {', '.join(config.architectures or ['(none)'])}, which transformers "
        f"{transformers.__version__} does not have; give task= ({', '.join(TASKS)})"
    )


def _refuse_repacking(path_or_id: str | Path, stored: Any, asked: tuple[str | None, ...]) -> None:  # noqa: ANN401
    method = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", None)
    if method != QUANT_METHOD:
        raise ConfigError(
            f"{path_or_id} is quantized with {method!r}, which t2n_hf does not load; take the plain weights"
        )
    if any(choice is not None for choice in asked):
        raise ConfigError(
            f"{path_or_id} is quantized already and is loaded as it is; leave out weights, embeddings and lm_head, "
            "or take the plain weights"
        )
