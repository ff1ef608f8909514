"""What can be asked of an export, checked once."""

from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from t2n_hf.dtypes import dtype_of
from t2n_hf.errors import ConfigError
from t2n_hf.nnef.versions import parse_target
from t2n_hf.trace.capture import CAPTURE_MODES

__all__ = ["ARCHIVE_ENDINGS", "ExportConfig", "archive_dtype"]

ARCHIVE_ENDINGS: Final = {"tgz": ".nnef.tgz", "tar": ".nnef.tar", "dir": ""}
_MAX_COMPRESSION: Final = 9


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """The options of `export_nnef` that are not about the model itself.

    Attributes:
        dtype: "f32" or "f16", the numbers of the archive; None takes the model's own, and f32 for a bf16 model, because
            tract has no bf16 and f16 would not hold its range.
        weights: block format to quantize dense weights to while exporting; None leaves every weight as it is.
        embeddings: the same for embeddings; None follows the loader's own rule, "none" leaves them.
        lm_head: the same for the output layer.
        task: name of a task, when the model's configuration does not say it.
        format: "tgz", "tar" or "dir" (an open folder).
        overwrite: replace an export that is there already; it stays as it was until the new one is complete.
        check: run the archive in tract and compare it with PyTorch.
        tolerance: largest error that the check accepts, relative to the largest value of the output; None: by dtype.
        all_logits: logits of every position, not of the last one only.
        capture: "pieces" (each distinct layer once), "whole", "dispatch" (at fixed lengths), or "auto": pieces where
            they are possible, and fixed lengths where nothing else is.
        flat: write the graph without fragments.
        compression_level: of a tgz, 0 to 9; 0 stores, because Q4_0 hardly compresses.
        max_context: largest number of positions, past included; None takes the model's.
        batch: take several sequences at once (models that generate; others always do).
        mask: take a mask for sequences that are padded on the left (the same).
        target: "tract==X.Y.Z", the oldest tract that has to run the archive; None: the newest that is known.
    """

    dtype: Literal["f32", "f16"] | None = None
    weights: str | None = None
    embeddings: str | None = None
    lm_head: str | None = None
    task: str | None = None
    format: str = "tgz"
    overwrite: bool = False
    check: bool = True
    tolerance: float | None = None
    all_logits: bool = False
    capture: str = "auto"
    flat: bool = False
    compression_level: int = 0
    max_context: int | None = None
    batch: bool = False
    mask: bool = False
    target: str | None = None

    def __post_init__(self) -> None:
        """Check every option. Raises ConfigError."""
        if self.dtype is not None:
            object.__setattr__(self, "dtype", archive_dtype(self.dtype))
        _one_of("format", self.format, tuple(ARCHIVE_ENDINGS))
        _one_of("capture", self.capture, CAPTURE_MODES)
        if self.target is not None:
            parse_target(self.target)
        if not 0 <= self.compression_level <= _MAX_COMPRESSION:
            raise ConfigError(f"compression_level={self.compression_level}; expected 0 to {_MAX_COMPRESSION}")
        if self.compression_level and self.format != "tgz":
            raise ConfigError(f"compression_level={self.compression_level} needs format='tgz', got {self.format!r}")
        if self.max_context is not None and self.max_context < 1:
            raise ConfigError(f"max_context={self.max_context}; expected 1 or more")
        if self.tolerance is not None and not self.tolerance > 0:
            raise ConfigError(f"tolerance={self.tolerance}; expected a number above 0")

    def archive_name(self, part: str) -> str:
        """Name, inside the export folder, of the archive of a part ("model" of a model that is one graph)."""
        return f"{part}{ARCHIVE_ENDINGS[self.format]}"

    @property
    def tract_version(self) -> str | None:
        """The version of the target; None when there is none."""
        return None if self.target is None else parse_target(self.target)

    def with_dtype(self, model_dtype: object) -> "ExportConfig":
        """Fill in `dtype` from that of a model (a torch dtype), unless it was given."""
        if self.dtype is not None:
            return self
        return replace(self, dtype="f16" if dtype_of(model_dtype).name == "f16" else "f32")


def archive_dtype(dtype: Any) -> Literal["f32", "f16"]:  # noqa: ANN401 - a torch dtype, or its name
    """Name the dtype of an archive: "f32" and "f16" in any spelling. Raises ConfigError for any other."""
    name = dtype_of(dtype).name
    if name == "bf16":
        raise ConfigError("tract has no bf16: export with dtype='f32' (exact) or dtype='f16' (half the size)")
    if name not in {"f32", "f16"}:
        raise ConfigError(f"dtype={name!r}; an archive holds 'f32' or 'f16'")
    return name  # type: ignore[return-value]


def _one_of(option: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{option}={value!r}; expected one of {', '.join(known)}")
