"""What quantizing a checkpoint will write: every file, every tensor in it, and the units that make them.

Made of names and shapes: the model is on meta, and no value is read but those of tables that may be tied.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from huggingface_hub import split_torch_state_dict_into_shards

from t2n_hf.errors import ConfigError
from t2n_hf.hf.config import T2NConfig
from t2n_hf.hf.key_map import KeyMap, map_keys
from t2n_hf.hf.plan import make_plan
from t2n_hf.hf.quantize.units import Unit, units_of
from t2n_hf.hf.quantize.weights import Weight, meta_tensor, weights_to_write
from t2n_hf.store.checkpoint import ByteRange, CheckpointIndex
from t2n_hf.store.shard import ShardLayout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["OutputPlan", "make_output_plan"]

# As transformers names files, and what it says in each.
_FILES: Final = "model{suffix}.safetensors"
_METADATA: Final = {"format": "pt"}
_CHUNK_NBYTES: Final = 8 << 20


@dataclass(frozen=True, kw_only=True)
class OutputPlan:
    """Every weight in the order of the model, the units that make them, and the files that they go into.

    `file_of` maps the names of stored tensors to files; `index` is the content of the index file, None when there is
    one file. `dtype` is what the model is loaded in.
    """

    weights: tuple[Weight, ...]
    units: tuple[Unit, ...]
    files: Mapping[str, ShardLayout]
    file_of: Mapping[str, str]
    dtype: torch.dtype
    index: dict[str, Any] | None = field(default=None, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all files with weights."""
        return sum(layout.nbytes for layout in self.files.values())

    def nbytes_of(self, keys: Iterable[str]) -> int:
        """Bytes of the stored tensors `keys`."""
        return sum(self.files[self.file_of[key]].tensors[key].nbytes for key in keys)

    @property
    def nbytes_read(self) -> int:
        """Bytes of stored tensors that are read."""
        return sum(unit.nbytes for unit in self.units)


def make_output_plan(
    model: "PreTrainedModel", config: T2NConfig, stored: CheckpointIndex, max_shard_size: int | str
) -> OutputPlan:
    """Plan the output for `model`, loaded on meta from `stored`.

    Tables that the model ties and the checkpoint has twice are compared, and tied or not as the loader does. Raises
    ConfigError for options that contradict each other or the model, FormatError when values are missing.
    """
    choices = make_plan(model, config)
    keys = map_keys(model, getattr(model, "hf_quantizer", None), stored)
    _settle_ties(model, keys, stored)
    weights = tuple(weights_to_write(model, choices))
    tensors = {key: spec for weight in weights for key, spec in weight.tensors.items()}
    try:
        split = split_torch_state_dict_into_shards(
            {key: meta_tensor(spec.shape, spec.dtype) for key, spec in tensors.items()},
            filename_pattern=_FILES,
            max_shard_size=max_shard_size,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"max_shard_size={max_shard_size!r}; expected bytes, or text such as '5GB'") from error
    index = None
    if split.is_sharded:
        metadata = {"total_parameters": model.num_parameters(), **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
    return OutputPlan(
        weights=weights,
        units=tuple(units_of(model, keys, stored, weights)),
        files={
            file: ShardLayout({name: tensors[name] for name in names}, _METADATA)
            for file, names in split.filename_to_tensors.items()
        },
        file_of=split.tensor_to_filename,
        dtype=_loaded_in(model),
        index=index,
    )


def _loaded_in(model: "PreTrainedModel") -> torch.dtype:
    dtype: Any = model.config.dtype or model.dtype
    found: torch.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    return found


def _settle_ties(model: "PreTrainedModel", keys: KeyMap, stored: CheckpointIndex) -> None:
    """Do what the loader does with tied tables that the checkpoint has twice; on meta it leaves them as they are."""
    for target, source in list(model.all_tied_weights_keys.items()):
        if target not in keys.by_target or source not in keys.by_target:
            continue
        first, second = (stored[keys.by_target[name][0][1]] for name in (target, source))
        if _equal(first, second, model.get_parameter(source).dtype):
            path, _, leaf = target.rpartition(".")
            setattr(model.get_submodule(path), leaf, model.get_parameter(source))
        else:
            del model.all_tied_weights_keys[target]


def _equal(first: ByteRange, second: ByteRange, dtype: torch.dtype) -> bool:
    """Compare two stored tensors as they are after a cast to `dtype`, some rows at a time."""
    if first.shape != second.shape or not first.shape:
        return first.shape == second.shape and torch.equal(first.read().to(dtype), second.read().to(dtype))
    rows = first.shape[0]
    step = max(1, _CHUNK_NBYTES * rows // max(1, first.nbytes))
    spans = [(start, min(rows, start + step)) for start in range(0, rows, step)]
    return all(torch.equal(first.rows(*span).read().to(dtype), second.rows(*span).read().to(dtype)) for span in spans)
