"""What a quantized class must provide, so that t2n_hf can load, offload, save, reload and export it without knowing it.

A class declares an `OFFLOAD_STATE_TAG` and can turn itself into an offload state (plain tensors and JSON) and back.
Defining it registers it in this process; an entry point in group `t2n_hf.offload_state`, named like the tag, lets
`t2n_hf.registry` find it in any other process without an import.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, TypedDict

import torch

from t2n_hf.dtypes import dtype_named
from t2n_hf.errors import ConfigError, TagClashError, UnsupportedOpError
from t2n_hf.nnef.dat import Payload, dense_payload, write_dat

__all__ = [
    "COMPUTE_MODES",
    "ENTRY_POINT_GROUP",
    "InferenceTarget",
    "OffloadState",
    "SupportsOffloadState",
    "Tag",
    "WeightFormat",
    "defined_classes",
    "dense_chunks",
]

ENTRY_POINT_GROUP: Final = "t2n_hf.offload_state"
COMPUTE_MODES: Final = ("exact", "fast", "compiled")
_TAG_FORM: Final = re.compile(r"(?P<distribution>[A-Za-z0-9_]+)\.(?P<short>[A-Za-z0-9_]+)\.v(?P<version>[0-9]+)")
_DENSE_CHUNK_BYTES: Final = 8 << 20


class OffloadState(TypedDict):
    """A tensor as plain parts.

    `tag` names the class that can rebuild it, `tensors` are plain CPU tensors by part name (a Python identifier, stable
    across versions of the class: it becomes part of the key in a saved checkpoint), `meta` is what JSON can hold.
    """

    tag: str
    tensors: dict[str, torch.Tensor]
    meta: dict[str, Any]


@dataclass(frozen=True)
class Tag:
    """The parts of `<distribution>.<format>.v<N>`; `short` is the name that T2NConfig takes."""

    distribution: str
    short: str
    version: int

    @classmethod
    def parse(cls, text: str) -> "Tag":
        """Split a tag. Raises ConfigError when `text` is not one."""
        match = _TAG_FORM.fullmatch(text)
        if match is None:
            raise ConfigError(f"{text!r} is not a tag; expected <distribution>.<format>.v<N>, e.g. 't2n_hf.q4_0.v1'")
        return cls(match["distribution"], match["short"], int(match["version"]))


@dataclass(frozen=True, kw_only=True)
class InferenceTarget:
    """What an exported weight is written for.

    `dtype` is the tract name ("f32" or "f16") of the numbers that a dense weight is written in.
    """

    name: str = "tract"
    version: str | None = None
    dtype: Literal["f32", "f16"] = "f32"


_DEFINED: dict[str, type["SupportsOffloadState"]] = {}


def defined_classes() -> Mapping[str, type["SupportsOffloadState"]]:
    """Classes that were defined in this process, by tag."""
    return dict(_DEFINED)


def _register(cls: type["SupportsOffloadState"]) -> None:
    tag = cls.OFFLOAD_STATE_TAG
    Tag.parse(tag)
    known = _DEFINED.get(tag)
    # A module that is reloaded defines its classes again: same place, newer object.
    if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise TagClashError(
            f"tag {tag!r} is claimed by {known.__module__}.{known.__qualname__} "
            f"and by {cls.__module__}.{cls.__qualname__}; give one of them another tag"
        )
    _DEFINED[tag] = cls


def dense_chunks(dense: torch.Tensor, dtype: str) -> Callable[[], Any]:
    """Give a plain tensor's values, row major, cast to `dtype` (tract name), as byte chunks of 8 MiB at most."""
    flat = dense.detach().reshape(-1)
    wanted = getattr(torch, dtype_named(dtype).torch)
    step = _DENSE_CHUNK_BYTES // wanted.itemsize

    def chunks() -> Any:  # noqa: ANN401 - an iterator of buffers
        for start in range(0, flat.numel(), step):
            yield memoryview(flat[start : start + step].to(wanted).contiguous().numpy()).cast("B")  # type: ignore[arg-type]

    return chunks


class SupportsOffloadState:
    """Mixin for tensors that have a compact state. See `OffloadState` for its form.

    A subclass that sets OFFLOAD_STATE_TAG in its own body is registered when it is defined. EXPORT_FORMAT names the
    block format of its `.dat` ("q4_0", "q8_1"), or is "dense": then the exporter lists the weight as dense.
    """

    OFFLOAD_STATE_TAG: ClassVar[str]
    EXPORT_FORMAT: ClassVar[str] = "dense"

    def __init_subclass__(cls, **kwargs: Any) -> None:  # noqa: ANN401 - of any class that is mixed in
        """Register the class under its tag. Raises TagClashError when another class has it."""
        super().__init_subclass__(**kwargs)
        if "OFFLOAD_STATE_TAG" in cls.__dict__:
            _register(cls)

    def to_offload_state(self) -> OffloadState:
        """Take the tensor apart. The parts may share memory with it; nothing is copied that need not be."""
        raise UnsupportedOpError(f"{type(self).__name__} does not say its offload state; define to_offload_state()")

    def to_private_state(self) -> OffloadState:
        """Give a state for a spill of this process, never for a checkpoint: it may hold a kernel's own layout.

        `from_offload_state` of the same class, in the same process, rebuilds the tensor from it. Default: the state.
        """
        return self.to_offload_state()

    @classmethod
    def row_parts(cls, meta: Mapping[str, Any], shape: Sequence[int]) -> frozenset[str]:
        """Name the parts of a state of a tensor of `shape` whose first axis is that of the tensor, item for item.

        Rows of an embedding, and single experts, are then read without the others: `from_offload_state` gets these
        parts cut to some rows (the other parts whole), and rebuilds a tensor of those rows alone. `meta` is that of the
        state, which may be a private one. Default: none, and the whole state is read for any row.
        """
        return frozenset()

    @classmethod
    def from_offload_state(cls, state: OffloadState, target_device: Any = None) -> torch.Tensor:  # noqa: ANN401
        """Rebuild the tensor, its parts on `target_device` (None: where they are).

        Raises FormatError when parts are missing or do not fit together.
        """
        raise UnsupportedOpError(f"{cls.__name__} cannot be rebuilt from its state; define from_offload_state()")

    @classmethod
    def dat_payload(cls, state: OffloadState, target: InferenceTarget) -> Payload:
        """Say what the `.dat` file of this state holds, as a header and a stream of byte chunks.

        The default writes the dense values in `target.dtype`; a class with a block format of tract writes its own.
        """
        # In f32, and not rounded to the dtype that the weight acts as first.
        dense = cls.from_offload_state(state, "cpu").to(torch.float32).to_base_tensor()  # type: ignore[attr-defined]
        return dense_payload(tuple(dense.shape), target.dtype, dense_chunks(dense, target.dtype))

    @classmethod
    def write_offload_state_in_file(
        cls, state: OffloadState, dirpath: str | Path, label: str, inference_target: InferenceTarget | None = None
    ) -> None:
        """Write `<dirpath>/<label>.dat`. Called at NNEF write time, with the only copy of the state in memory."""
        write_dat(Path(dirpath) / f"{label}.dat", cls.dat_payload(state, inference_target or InferenceTarget()))


class WeightFormat(SupportsOffloadState):
    """What `T2NConfig(weights=...)` asks of a quantized class, beyond its state.

    The class is also a `t2n_hf.tensor.OpaqueTensor`, whose shape and dtype are those of the float tensor it stands for.
    Quantization works on the last axis of `tensor`; formats never see transposed weights (t2n_hf turns them before).
    """

    @classmethod
    def refuses(cls, shape: Sequence[int], dtype: torch.dtype) -> str | None:
        """Say why a tensor of this shape and dtype cannot be held, for the report; None when it can."""
        raise UnsupportedOpError(f"{cls.__name__} does not say what it can hold; define refuses()")

    @classmethod
    def packed_nbytes(cls, shape: Sequence[int]) -> int:
        """Bytes that a tensor of this shape takes at rest. Exact."""
        raise UnsupportedOpError(f"{cls.__name__} does not say its size; define packed_nbytes()")

    @classmethod
    def resident_nbytes(cls, shape: Sequence[int], compute: str) -> int:
        """Bytes in memory of a tensor of this shape that computes as `compute`. Default: as many as at rest.

        A class with a kernel's own layout says its size. Exact: device maps are planned with it.
        """
        return cls.packed_nbytes(shape)

    @classmethod
    def quantize(
        cls,
        tensor: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
        name: str = "",
        importance: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Quantize a plain float tensor (..., K); the result acts as a tensor of `dtype` (None: that of `tensor`).

        `importance`, f32 (K,), says how much an error in each input channel matters, relative to the others: the mean
        square of what a model feeds into that channel. It may only change which values are chosen, never their layout;
        a class that has no use for it ignores it. Does not modify `tensor`.

        Raises QuantizationError, naming `name`, on NaN or infinity.
        """
        raise UnsupportedOpError(f"{cls.__name__} cannot quantize; define quantize()")

    def with_compute(self, compute: str) -> torch.Tensor:
        """Return the same weight set to compute "exact", "fast" (may round) or "compiled" (fast, with native code).

        Default: itself, always exact. A class without a kernel of its own has nothing to choose.
        """
        if compute not in COMPUTE_MODES:
            raise ConfigError(f"compute={compute!r}; expected one of {', '.join(COMPUTE_MODES)}")
        return self  # type: ignore[return-value]
