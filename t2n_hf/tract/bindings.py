"""What differs between the Python packages of tract 0.22 and 0.23. Runs in the worker: numpy and tract only."""

import ctypes
import math
import re
from typing import Any, Final

import numpy as np
import tract
from tract.bindings import check, lib

__all__ = ["describe", "load", "to_numpy", "to_tract"]

# Numbers of tract's C interface; both packages give facts by them, or by these names in lower case.
_NUMPY_NAMES: Final = {
    0x01: "bool",
    0x11: "uint8",
    0x21: "int8",
    0x22: "int16",
    0x24: "int32",
    0x28: "int64",
    0x32: "float16",
    0x34: "float32",
    0x38: "float64",
}
_TEXT_NAMES: Final = {
    "bool": "bool",
    "u8": "uint8",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
}
_VALUE: Final = re.compile(r"\s*(?:🟰|=).*", re.DOTALL)


def load(path: str) -> Any:  # noqa: ANN401 - tract has no types
    """A model from an archive that may use the operators of tract's own registries."""
    loader: Any = tract.nnef().with_tract_transformers().with_tract_extra().with_extended_identifier_syntax()
    return loader.load(path) if hasattr(loader, "load") else loader.model_for_path(path)  # 0.23, 0.22


def to_tract(array: np.ndarray) -> Any:  # noqa: ANN401 - tract has no types
    """A tensor of tract."""
    kind: Any = getattr(tract, "Tensor", None) or tract.Value  # 0.23, 0.22
    return kind.from_numpy(array)


def to_numpy(tensor: Any) -> np.ndarray:  # noqa: ANN401 - tract has no types
    """The values of a tensor of tract."""
    if hasattr(tract, "Tensor"):
        return tensor.to_numpy()
    # The package 0.22 takes every tensor for f32.
    kind, rank = ctypes.c_uint32(), ctypes.c_size_t()
    shape, data = ctypes.POINTER(ctypes.c_size_t)(), ctypes.c_void_p()
    facts = [ctypes.byref(place) for place in (kind, rank, shape, data)]
    check(lib.tract_value_as_bytes(tensor.ptr, *facts))
    lengths = [shape[axis] for axis in range(rank.value)]
    dtype = np.dtype(_NUMPY_NAMES[kind.value])
    nbytes = dtype.itemsize * math.prod(lengths)
    return np.frombuffer(ctypes.string_at(data, nbytes), dtype).reshape(lengths).copy()


def describe(fact: Any) -> tuple[str, list[str]]:  # noqa: ANN401 - tract has no types
    """The numpy name of a fact's dtype (tract's own where numpy has none), and its lengths as texts."""
    if hasattr(fact, "datum_type"):
        number = int(fact.datum_type())
        return _NUMPY_NAMES.get(number, str(number)), [str(dim) for dim in fact.dims()]
    *dims, kind = _VALUE.sub("", fact.dump()).split(",")  # 0.22 has the text alone: "1,S,F32"
    return _TEXT_NAMES.get(kind.strip().lower(), kind.strip()), [dim.strip() for dim in dims if dim.strip()]
