"""One weight of a quantized checkpoint: what it is stored as, known from its shape alone."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from t2n_hf.contract import OffloadState, SupportsOffloadState
from t2n_hf.dtypes import dtype_named, dtype_of
from t2n_hf.hf.packing import quantized
from t2n_hf.hf.plan import Choice
from t2n_hf.hf.stored import key_of_part
from t2n_hf.hf.weights import tied_names
from t2n_hf.store.shard import TensorSpec
from t2n_hf.tensor.transposed import TransposedTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Weight", "meta_tensor", "spec_of", "weights_to_write"]


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One parameter, or buffer, of the output.

    `names` are all it is known by, its own first; `module` is the class of the module that has it, `dtype` what it acts
    as. `form` is the state that an empty weight of this shape has, on meta; None when it stays float.
    """

    name: str
    names: tuple[str, ...]
    module: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    choice: Choice
    form: OffloadState | None

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        """What it is stored as, by key: itself, or the parts of its packed form."""
        if self.form is None:
            return {self.name: TensorSpec(dtype_of(self.dtype).name, self.shape)}
        return {key_of_part(self.name, part): spec_of(value) for part, value in self.form["tensors"].items()}

    @property
    def nbytes(self) -> int:
        """Bytes that it will take."""
        return sum(spec.nbytes for spec in self.tensors.values())

    @property
    def is_stored_by_item(self) -> bool:
        """Whether each part, and so the whole, is one piece for each index of the first axis."""
        if self.form is None:
            return True
        kind: type[SupportsOffloadState] | None = TransposedTensor if self.choice.transposed else self.choice.format
        return kind is not None and kind.row_parts(self.form["meta"], self.shape) >= self.form["tensors"].keys()


def spec_of(value: torch.Tensor) -> TensorSpec:
    """Describe a tensor."""
    return TensorSpec(dtype_of(value.dtype).name, tuple(value.shape))


def meta_tensor(shape: Iterable[int], dtype: str) -> torch.Tensor:
    """Make a tensor without values; `dtype` is a name in tract."""
    return torch.empty(tuple(shape), dtype=getattr(torch, dtype_named(dtype).torch), device="meta")


def weights_to_write(model: "PreTrainedModel", choices: Mapping[str, Choice]) -> Iterator[Weight]:
    """Give every weight of `model`, which is on meta, in its order; tied ones once, under the name that is saved."""
    canonical = tied_names(model)
    groups: dict[str, list[str]] = {}
    for name, kept in canonical.items():
        groups.setdefault(kept, [kept]).append(name)
    ignored = set(model._keys_to_ignore_on_save or ())
    forms: dict[tuple[object, ...], OffloadState] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        choice = choices.get(name, Choice(reason="a buffer", by_user=True))
        if canonical.get(name, name) != name or (choice.format is None and name in ignored):
            continue
        shape = tuple(tensor.shape)
        case = (choice.format, choice.transposed, shape, tensor.dtype)
        if choice.format is not None and case not in forms:
            forms[case] = _empty_state(choice, shape, tensor.dtype)
        yield Weight(
            name=name,
            names=tuple(dict.fromkeys(groups.get(name, [name]))),
            module=type(model.get_submodule(name.rpartition(".")[0])).__name__,
            shape=shape,
            dtype=tensor.dtype,
            choice=choice,
            form=forms.get(case),
        )


def _empty_state(choice: Choice, shape: tuple[int, ...], dtype: torch.dtype) -> OffloadState:
    """Find the parts of a class for one shape: on meta where it can, else by quantizing zeros that take no memory."""
    options: dict[str, Any] = {"dtype": dtype, "name": "", "compute": "exact"}
    try:
        packed: Any = quantized(torch.empty(shape, dtype=dtype, device="meta"), choice, **options)
        state = packed.to_offload_state()
    except Exception:  # noqa: BLE001 - a class need not know meta tensors, and may raise anything at them
        packed = quantized(torch.zeros(1, dtype=dtype).expand(shape), choice, **options)
        state = packed.to_offload_state()
    tensors = {part: meta_tensor(value.shape, dtype_of(value.dtype).name) for part, value in state["tensors"].items()}
    return OffloadState(tag=state["tag"], tensors=tensors, meta=state["meta"])
