"""The operator snake in NNEF."""

from t2n_hf.ops import Emit, Value

__all__ = ["snake"]


def snake(emit: Emit, x: Value, alpha: Value) -> Value:
    """`x + sin(alpha * x) ** 2 / alpha`: what a call of the operator is written as."""
    wave = emit.unary("sin", emit.binary("mul", x, alpha, x.dtype))
    square = emit.binary("mul", wave, wave, x.dtype)
    return emit.binary("add", x, emit.binary("div", square, alpha, x.dtype), x.dtype)
