"""T2NConfig: what to quantize, into which class, and how to compute with it."""

import copy
import os
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from transformers.utils.quantization_config import MetalConfig

from t2n_hf.contract import COMPUTE_MODES
from t2n_hf.errors import ConfigError
from t2n_hf.registry import format_class

__all__ = ["NOT_QUANTIZED", "QUANT_METHOD", "Late", "T2NConfig"]

QUANT_METHOD: Final = "t2n"
NOT_QUANTIZED: Final = "none"
Late: TypeAlias = Literal["once", "always"]
"""Quantize what stays on disk when it is read: the first time, and keep it in the spill, or each time."""
_STORED: Final = ("weights", "embeddings", "lm_head", "modules_to_not_convert", "compute")
_MACHINE: Final = ("max_resident_bytes", "spill_dir", "readahead_bytes", "max_length", "batch_size", "importance")


# transformers hands the options that a user passes beside an already quantized checkpoint only to the classes of
# quantizers.auto.LOADING_ATTRIBUTES_CONFIG_TYPES, and registering a class does not put it there. MetalConfig is the
# smallest of them: nothing else is taken from it, and nothing in transformers asks for it by type.
class T2NConfig(MetalConfig):
    """Options of `from_pretrained(..., quantization_config=T2NConfig(...))`.

    Args:
        weights: the class that matrices (nn.Linear, Conv1D, fused 3-D experts) are quantized to: "q4_0" (4.5 bits per
            value), "q8_1" (9) or "ternary" (2.5), or any installed class by its tag ("t2n_hf.q4_0.v1") or short name;
            "none" quantizes nothing. tract multiplies by q4_0 only: an export holds the dense values of the others,
            but for a table in q8_1 that is only looked up.
        embeddings: the class of the token embeddings; None or "none" leaves them float.
        lm_head: the class of the output head; None or "none" leaves it float. When head and embeddings are tied they
            are one table: the choice that is made, for either, holds for both; two different ones are a ConfigError.
        modules_to_not_convert: None leaves out what transformers leaves out by default (the last module, tied modules
            and the head); [] leaves out nothing; a list leaves out exactly the modules (or parameters) that it names.
            A name matches at dots: "mlp" matches "layers.0.mlp.up_proj", not "layers.0.mlp_norm". Embeddings and head
            always follow their own options, and what the architecture keeps in float32 always stays float. A name
            that matches nothing is warned about.
        compute: "exact" (the truth: dequantize, then multiply), "fast" (kernels that may round), or "compiled": fast,
            and prompts are read faster still by native code that a C compiler on this machine makes when it is first
            needed (in less than a second; kept in a folder `t2n_hf` beside torch's own cache). Without a compiler it is
            "fast", with a warning that says why.
        max_resident_bytes: how many bytes of weights that are mapped to "disk" may be kept in memory. It has to hold
            the largest module. None: what `max_memory` leaves with device_map="auto"; otherwise nothing beyond the
            module that runs.
        spill_dir: folder of the private, unlinked file that holds weights quantized while loading and mapped to
            "disk". None: the system's folder for temporary files.
        readahead_bytes: how many bytes of weights to load ahead of the module that runs. None: what fits beside the
            largest module; 0: nothing is loaded ahead.
        max_length: how many tokens (prompt and answer) a sequence will have at most. The bytes that the keys and values
            of so many take are then kept free of every budget. None: budgets are for weights alone.
        batch_size: how many sequences are computed at once, beams included; counts with `max_length` only.
        importance: a file that `t2n_hf.calibrate` made of this model: how much each input channel of its weights
            matters. Classes that choose scales by it ("q4_0", "ternary") lose less. None: all matter alike.

    The last six describe a machine and its use: they are never written into a model's config.json. Passed beside an
    already quantized checkpoint they are used, as is `compute`; the others come from the checkpoint.

    Before anything is loaded the device map is planned, and refused (BudgetError) when it cannot fit; the plan is kept
    as `model.hf_quantizer.placement`. Of pickled checkpoints (`.bin`), which from_pretrained reads with weights_only,
    what is mapped to "disk" is written to `spill_dir`: only safetensors files are read where they are.

    Raises ConfigError for an unknown option or a value out of range, UnknownTagError for a class that is not installed.
    """

    def __init__(  # the positional `weights` is the one option that nearly every call gives
        self,
        weights: str = "q4_0",
        *,
        embeddings: str | None = None,
        lm_head: str | None = None,
        modules_to_not_convert: Iterable[str] | None = None,
        compute: str = "exact",
        max_resident_bytes: int | None = None,
        spill_dir: str | Path | None = None,
        readahead_bytes: int | None = None,
        max_length: int | None = None,
        batch_size: int = 1,
        importance: str | Path | None = None,
        **unknown: object,
    ) -> None:
        if unknown:
            names = ", ".join(map(repr, sorted(unknown)))
            raise ConfigError(f"T2NConfig has no option {names}; known: {', '.join(_STORED + _MACHINE)}")
        self.quant_method = QUANT_METHOD  # type: ignore[assignment]
        self.weights = weights
        self.embeddings = embeddings
        self.lm_head = lm_head
        self.modules_to_not_convert = _list_of_names(modules_to_not_convert)
        self.compute = compute
        self.max_resident_bytes = max_resident_bytes
        self.spill_dir = _path("spill_dir", spill_dir, "a folder")
        self.readahead_bytes = readahead_bytes
        self.max_length = max_length
        self.batch_size = batch_size
        self.importance = _path("importance", importance, "a file")
        # No option: bytes by device, set by load_checkpoint. transformers drops max_memory beside a given map.
        self.limits: dict[Any, int] | None = None
        # No option: see load_checkpoint.
        self.late: Late | None = None
        self.tensors: dict[str, Any] | None = None
        self.requested: dict[str, Any] | None = None
        self.post_init()

    def post_init(self) -> None:
        """Check every option. Raises ConfigError, and UnknownTagError for a class that is not installed."""
        if not isinstance(self.weights, str):
            raise ConfigError(f'weights={self.weights!r}; expected a class by tag or short name ("q4_0"), or "none"')
        for option in ("weights", "embeddings", "lm_head"):
            name = getattr(self, option)
            if name is None or name == NOT_QUANTIZED:
                continue
            if not isinstance(name, str):
                raise ConfigError(f'{option}={name!r}; expected a tag or short name, "none" or None')
            format_class(name)
        if self.compute not in COMPUTE_MODES:
            raise ConfigError(f"compute={self.compute!r}; expected one of {', '.join(COMPUTE_MODES)}")
        _check_count("max_resident_bytes", self.max_resident_bytes, "a number of bytes, 0 or more, or None")
        _check_count("readahead_bytes", self.readahead_bytes, "a number of bytes, 0 or more, or None")
        _check_count("max_length", self.max_length, "a number of tokens, 1 or more, or None", least=1)
        if self.batch_size is None:
            raise ConfigError("batch_size=None; expected a number of sequences, 1 or more")
        _check_count("batch_size", self.batch_size, "a number of sequences, 1 or more", least=1)

    def get_loading_attributes(self) -> dict[str, Any]:
        """Give what holds for this load even when the checkpoint is quantized already (transformers asks for it)."""
        requested = {name: copy.copy(getattr(self, name)) for name in _STORED if name != "compute"}
        return {
            "compute": self.compute,
            "requested": requested,
            "limits": copy.copy(self.limits),
            **{name: getattr(self, name) for name in _MACHINE},
        }

    def to_dict(self) -> dict[str, Any]:
        """Give what config.json keeps: what the weights are, nothing about this machine."""
        kept = {"quant_method": self.quant_method, **{name: copy.copy(getattr(self, name)) for name in _STORED}}
        if self.tensors is not None:
            kept["tensors"] = copy.deepcopy(self.tensors)
        return kept

    def to_diff_dict(self) -> dict[str, Any]:
        """Give every option, those of this machine included."""
        return {**self.to_dict(), **{name: getattr(self, name) for name in _MACHINE}}

    def to_json_string(self, use_diff: bool = True) -> str:
        """Give every option as JSON; `from_dict` of it makes an equal configuration."""
        return super().to_json_string(use_diff=True)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Let `dict(config)` work."""
        yield from self.to_diff_dict().items()

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: object
    ) -> "T2NConfig | tuple[T2NConfig, dict[str, object]]":
        """Make a configuration of what `to_dict` or `to_json_string` gave.

        Raises ConfigError for an unknown key, naming the known ones, and when another `quant_method` is said.
        """
        options = dict(config_dict)
        method = options.pop("quant_method", QUANT_METHOD)
        if method != QUANT_METHOD:
            raise ConfigError(f"quant_method={method!r} is not of T2NConfig; expected {QUANT_METHOD!r}")
        tensors = options.pop("tensors", None)
        known = {name: kwargs.pop(name) for name in list(kwargs) if name in _STORED + _MACHINE}
        config = cls(**{**options, **known})
        config.tensors = copy.deepcopy(tensors)
        return (config, kwargs) if return_unused_kwargs else config


def _check_count(option: str, value: object, expected: str, least: int = 0) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise ConfigError(f"{option}={value!r}; expected {expected}")


def _list_of_names(names: Iterable[str] | None) -> list[str] | None:
    if names is None:
        return None
    if isinstance(names, (str, bytes, Mapping)) or not isinstance(names, Iterable):
        raise ConfigError(f"modules_to_not_convert={names!r}; expected None or a list of module names")
    listed = list(names)
    if not all(isinstance(name, str) and name for name in listed):
        raise ConfigError(f"modules_to_not_convert={listed!r}; expected None or a list of module names")
    # The order of a set differs from process to process, and what is saved must not.
    return sorted(listed) if isinstance(names, Set) else listed


def _path(option: str, path: object, what: str) -> str | None:
    if path is None or isinstance(path, str):
        return path
    if isinstance(path, os.PathLike) and isinstance(os.fspath(path), str):
        return str(os.fspath(path))
    raise ConfigError(f"{option}={path!r}; expected the path of {what}, or None")
