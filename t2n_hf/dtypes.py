"""One table of number types: the name in tract <-> torch <-> numpy <-> the item type of a `.dat` file.

torch is never imported here: a torch dtype is recognised by its text, so that the rooms that know no torch can use the
table.
"""

from dataclasses import dataclass
from typing import Final

from t2n_hf.errors import ConfigError

__all__ = ["DTYPES", "FLOATS", "DType", "dtype_named", "dtype_of"]


@dataclass(frozen=True, kw_only=True)
class DType:
    """A number type.

    `item_type` and `bits` are those of bytes 48-49 and 44-47 of a `.dat` header; `numpy` is None where numpy has no
    such type, `item_type` None where NNEF has none.
    """

    name: str
    torch: str
    numpy: str | None
    bits: int
    item_type: int | None

    @property
    def nbytes(self) -> int:
        """Bytes per element in memory."""
        return max(1, self.bits // 8)

    @property
    def is_float(self) -> bool:
        """Whether values are floating point numbers."""
        return self.name in FLOATS


FLOATS: Final = ("f16", "bf16", "f32", "f64")

DTYPES: Final = {
    d.name: d
    for d in (
        DType(name="f16", torch="float16", numpy="float16", bits=16, item_type=0),
        DType(name="bf16", torch="bfloat16", numpy=None, bits=16, item_type=None),
        DType(name="f32", torch="float32", numpy="float32", bits=32, item_type=0),
        DType(name="f64", torch="float64", numpy="float64", bits=64, item_type=0),
        DType(name="u8", torch="uint8", numpy="uint8", bits=8, item_type=2),
        DType(name="i8", torch="int8", numpy="int8", bits=8, item_type=3),
        DType(name="i16", torch="int16", numpy="int16", bits=16, item_type=3),
        DType(name="i32", torch="int32", numpy="int32", bits=32, item_type=3),
        DType(name="i64", torch="int64", numpy="int64", bits=64, item_type=3),
        DType(name="bool", torch="bool", numpy="bool", bits=8, item_type=5),
    )
}

_BY_ALIAS: Final = {
    alias: d for d in DTYPES.values() for alias in (d.name, d.torch, f"torch.{d.torch}", d.numpy) if alias is not None
}


def dtype_named(name: str) -> DType:
    """Find a type by its name in tract, torch or numpy: "f16", "float16", "torch.float16".

    Raises ConfigError for a name that is not in the table.
    """
    if name not in _BY_ALIAS:
        raise ConfigError(f"unknown dtype {name!r}; expected one of {', '.join(DTYPES)} or its torch name")
    return _BY_ALIAS[name]


def dtype_of(dtype: object) -> DType:
    """Find the type of a `torch.dtype` or `numpy.dtype` object (or of a name)."""
    return dtype_named(str(dtype))
