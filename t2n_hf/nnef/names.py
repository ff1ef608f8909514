"""Names that NNEF and tract accept."""

import re
from collections.abc import Iterable
from typing import Final

__all__ = ["OPERATORS", "RESERVED", "Namer", "identifier", "is_identifier", "member_problem"]

_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NOT_WORD: Final = re.compile(r"[^A-Za-z0-9_]+")
# Words with dots between them, what most weights are called: there is nothing to say against one.
_PLAIN_MEMBER: Final = re.compile(r"\w+(\.\w+)*", re.ASCII)
_LONGEST: Final = 1024
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")

# tract reads these as literals wherever a value is used, whatever follows: `true_x`, `info`.
_LITERAL: Final = re.compile(r"true|false|inf")

_GRAMMAR: Final = (
    *("version", "extension", "graph", "fragment", "tensor", "integer", "scalar", "logical", "string", "true", "false"),
    *("for", "in", "if", "else", "yield", "lengthof", "shape_of", "range_of", "inf", "nan"),
)
# Words of the grammar, its literals, and the one fragment that tract looks up itself.
RESERVED: Final = frozenset((*_GRAMMAR, "tract_core_properties"))

# Operators of NNEF: a fragment of such a name would stand for them wherever they are called. Those of tract's own begin
# with `tract_`.
OPERATORS: Final = frozenset(
    (
        *("external", "variable", "copy", "neg", "rcp", "exp", "log", "sin", "cos", "tan", "asin", "acos", "atan"),
        *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "abs", "sign", "not", "floor", "ceil", "round", "add"),
        *("sub", "mul", "div", "pow", "lt", "gt", "le", "ge", "eq", "ne", "and", "or", "sqr", "sqrt", "rsqr", "rsqrt"),
        *("log2", "min", "max", "clamp", "select", "conv", "deconv", "box", "debox", "argmax_pool", "sample"),
        *("desample", "nearest_downsample", "area_downsample", "nearest_upsample", "multilinear_upsample"),
        *("sum_reduce", "min_reduce", "max_reduce", "argmax_reduce", "argmin_reduce", "mean_reduce", "any_reduce"),
        *("all_reduce", "reshape", "transpose", "concat", "split", "slice", "stack", "unstack", "squeeze", "unsqueeze"),
        *("pad", "tile", "gather", "cast", "matmul", "update", "sigmoid", "relu", "elu", "selu", "gelu", "silu"),
        *("prelu", "leaky_relu", "softabs", "softmax", "softplus", "linear", "separable_conv", "separable_deconv"),
        *("max_pool", "max_pool_with_index", "avg_pool", "rms_pool", "moments", "batch_normalization"),
        *("l1_normalization", "l2_normalization", "local_response_normalization", "local_mean_normalization"),
        *("local_variance_normalization", "local_contrast_normalization", "avg_roi_pool", "max_roi_pool"),
        *("avg_roi_align", "max_roi_align", "linear_quantize", "min_max_linear_quantize", "logarithmic_quantize"),
        *("zero_point_linear_quantize", "copy_n", "add_n", "recip", "log_one_plus"),
    )
)


def is_identifier(text: str) -> bool:
    """Say whether `text` can name a value, a fragment or a parameter."""
    return _IDENTIFIER.fullmatch(text) is not None and text not in RESERVED and _LITERAL.match(text) is None


def identifier(text: str) -> str:
    """Turn any text into an NNEF identifier: other characters become `_`. Different texts may give the same one."""
    name = _NOT_WORD.sub("_", text) or "_"
    if name[0].isdigit() or _LITERAL.match(name):
        name = f"_{name}"
    return f"{name}_" if name in RESERVED else name


class Namer:
    """Gives identifiers that differ from each other and from `reserved` names, the same ones for the same requests."""

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self._taken = set(reserved)
        self._next: dict[str, int] = {}

    def reserve(self, name: str) -> None:
        """Keep `name` from being given."""
        self._taken.add(name)

    def unique(self, base: str) -> str:
        """Return `base` as an identifier, with `_1`, `_2`, ... after it when it is taken."""
        stem = identifier(base)
        name, number = stem, self._next.get(stem, 0)
        while name in self._taken:
            number += 1
            name = f"{stem}_{number}"
        self._next[stem] = number
        self._taken.add(name)
        return name


def member_problem(name: str) -> str | None:
    """Say why `name` cannot be the name of a file inside an archive; None when it can.

    A name is relative, with `/` between its parts, and stays inside the folder that it is put in, on any system.
    """
    if len(name) <= _LONGEST and _PLAIN_MEMBER.fullmatch(name):
        return None
    if not name or len(name.encode("utf-8", "replace")) > _LONGEST:
        return "it is empty, or longer than 1024 bytes"
    if _CONTROL.search(name) or "\\" in name or not name.isprintable():
        return "it holds a backslash or a character that is not printable"
    if name.startswith("/") or re.match(r"[A-Za-z]:", name):
        return "it is absolute"
    if any(part in ("", ".", "..") for part in name.split("/")):
        return "it has an empty, `.` or `..` part"
    return None
