"""How much each input channel of each weight matters: the mean square of what a model multiplied it by."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import nn

from t2n_hf.errors import ConfigError, FormatError
from t2n_hf.hf.plan import Plan
from t2n_hf.hf.weights import tied_names
from t2n_hf.store.checkpoint import CheckpointFile
from t2n_hf.store.header import load_json_object
from t2n_hf.store.state import write_tensors

__all__ = ["Importance", "importance_for"]

_KEY: Final = "t2n_hf.importance"
_SCHEMA_VERSION: Final = 1


@final
class Importance(Mapping[str, torch.Tensor]):
    """Mean squares by parameter name: f32 (K,), one for each input channel; (E, K) for a stack of E fused experts.

    `source` says which model was calibrated (the last part of its path, or its id), `tokens` on how many tokens.
    """

    def __init__(self, values: Mapping[str, torch.Tensor], *, source: str = "", tokens: int = 0) -> None:
        self._values = {name: _checked(name, value) for name, value in values.items()}
        self.source = source
        self.tokens = tokens

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Importance({len(self)} weights, source={self.source!r}, tokens={self.tokens})"

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, which appears when it is complete. The same importance gives the same bytes."""
        facts = {"schema_version": _SCHEMA_VERSION, "source": self.source, "tokens": self.tokens}
        write_tensors(path, self._values, {_KEY: json.dumps(facts, sort_keys=True)})

    @classmethod
    def load(cls, path: str | Path) -> "Importance":
        """Read what `save` wrote.

        Raises FormatError for any other file, StorageError for a truncated one, or one that cannot be read.
        """
        file = CheckpointFile(path)
        try:
            if _KEY not in file.metadata:
                raise FormatError(
                    f"{path} is a safetensors file, but holds no importance: its metadata lacks {_KEY!r}; "
                    "expected a file that t2n-hf calibrate made"
                )
            facts = load_json_object(file.metadata[_KEY].encode(), f"{_KEY} of {path}")
            version, source, tokens = (facts.get(key) for key in ("schema_version", "source", "tokens"))
            if version != _SCHEMA_VERSION:
                raise FormatError(f"{path} has importance schema {version!r}; this t2n_hf reads {_SCHEMA_VERSION}")
            if not isinstance(source, str) or not isinstance(tokens, int):
                raise FormatError(f"{path}: {_KEY} needs a source (text) and tokens (count), got {facts!r:.200}")
            with torch.device("cpu"):  # transformers builds empty models in a scope that makes all tensors meta
                values = {name: file.byte_range(name).read() for name in file.names()}
            return cls(values, source=source, tokens=tokens)
        finally:
            file.close()


def _checked(name: str, value: torch.Tensor) -> torch.Tensor:
    """Give `value` as it is kept. Raises FormatError, naming it, when it is no importance."""
    if value.dtype != torch.float32 or value.dim() not in (1, 2) or value.numel() == 0:
        raise FormatError(f"importance of {name}: expected f32 (K,) or (E, K), got {value.dtype} {tuple(value.shape)}")
    value = value.detach().to("cpu").contiguous()
    if not bool((torch.isfinite(value) & (value >= 0)).all()):
        raise FormatError(f"importance of {name} has values that are negative, NaN or infinite; calibrate again")
    return value


def importance_for(
    model: nn.Module, plan: Plan, given: "Mapping[str, torch.Tensor] | str | Path | None"
) -> dict[str, torch.Tensor]:
    """Choose what is for the weights that `plan` quantizes; a weight that nothing is known of is left out.

    `given` may be the path of a file. Any name of a tied weight is as good as another, and a model with a head finds
    what was calibrated without it, and the other way round. Raises ConfigError for another model's importance (channels
    that differ in number, or no name that is known), and what `Importance.load` raises.
    """
    if given is None:
        return {}
    known: Any = Importance.load(given) if isinstance(given, (str, Path)) else given
    prefix = getattr(model, "base_model_prefix", "")
    canonical = tied_names(model)
    tied: dict[str, list[str]] = {}
    for name, kept in canonical.items():
        tied.setdefault(kept, []).append(name)
    chosen, wanted = {}, 0
    for name, parameter in model.named_parameters(remove_duplicate=False):
        choice = plan.get(name)
        if choice is None or choice.format is None:
            continue
        wanted += 1
        names = (name, *tied.get(canonical.get(name, name), ()))
        found = next((n for n in _candidates(names, prefix) if n in known), None)
        if found is None:
            continue
        channels = parameter.shape[-2 if choice.transposed else -1]
        _check_shape(name, tuple(known[found].shape), (*parameter.shape[:-2], channels))
        chosen[name] = known[found].detach().to("cpu", torch.float32)
    if wanted and not chosen:
        source = f" ({known.source})" if isinstance(known, Importance) and known.source else ""
        raise ConfigError(
            f"the importance is of another model{source}: none of its {len(known)} names is one of the {wanted} "
            f"weights to quantize; it has for example {next(iter(known), None)!r}; calibrate the model itself"
        )
    return chosen


def _candidates(names: Iterable[str], prefix: str) -> Iterator[str]:
    for name in names:
        yield name
        if prefix:
            yield f"{prefix}.{name}"
            yield name.removeprefix(f"{prefix}.")


def _check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found not in (expected, expected[-1:]):
        raise ConfigError(
            f"{name} has {expected[-1]} input channels, and importance of shape {found}; calibrate the model that is "
            "quantized"
        )
