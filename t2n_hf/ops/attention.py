"""Attention, and the rotation of its queries and keys."""

import torch

from t2n_hf.ops.activation import softmax_over
from t2n_hf.ops.dims import Length
from t2n_hf.ops.emit import Emit
from t2n_hf.ops.table import EMITTERS
from t2n_hf.ops.value import Value, tract_dtype

__all__ = ["rope"]

_aten = torch.ops.aten
_emits = EMITTERS.emits


@_emits(_aten.scaled_dot_product_attention.default)
def scaled_dot_product_attention(  # noqa: PLR0917 - the operator's own signature
    emit: Emit,
    query: Value,
    key: Value,
    value: Value,
    attn_mask: Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Value:
    """softmax(query @ key.T * scale + mask) @ value.

    A mask is floating here: the capture turns boolean ones into numbers to add, where a row that is masked everywhere
    attends evenly to all positions (torch gives 0).
    """
    if dropout_p:
        raise emit.refuse("attention with dropout is random; put the module in inference with eval()")
    if scale is None and not isinstance(query.shape[-1], int):
        raise emit.refuse(f"the size {query.shape[-1]} of a head is free; fix it, or give the scale")
    factor = float(query.shape[-1]) ** -0.5 if scale is None else float(scale)
    mask = attn_mask
    if mask is not None and mask.dtype is torch.bool:
        mask = emit.select(mask, 0.0, torch.finfo(query.dtype).min, query.dtype)
    if is_causal:
        mask = _causal(emit, query.shape[-2], key.shape[-2], query.dtype)
    if emit.options.attention == "sdpa" and not enable_gqa:
        return _fused(emit, query, key, value, mask, factor)
    if enable_gqa:
        key, value = _repeated(emit, key, query.shape[-3]), _repeated(emit, value, query.shape[-3])
    scores = emit.matmul(*_scaled(emit, query, key, factor), transpose_right=True)
    if mask is not None:
        scores = emit.binary("add", scores, mask, scores.dtype)
    return emit.matmul(softmax_over(emit, scores, -1, scores.dtype), value)


def _scaled(emit: Emit, query: Value, key: Value, factor: float) -> tuple[Value, Value]:
    """Queries and keys whose product has the factor.

    tract cuts a product with a join of two parts into two products, and fails where heads share the one part (the
    rotated part of latent attention). A factor on either side keeps it from that.
    """
    if factor > 0 and emit.joined_along(key, key.rank - 1):
        return tuple(emit.binary("mul", x, factor**0.5, x.dtype) for x in (query, key))  # type: ignore[return-value]
    return emit.binary("mul", query, factor, query.dtype), key


@_emits(_aten._scaled_dot_product_flash_attention_for_cpu.default)
def attention_on_cpu(
    emit: Emit,
    query: Value,
    key: Value,
    value: Value,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Value | None = None,
    scale: float | None = None,
) -> list[Value | None]:
    """The form that attention has in a graph of what torch runs on a CPU; what the way back needs is not written."""
    result = scaled_dot_product_attention(emit, query, key, value, attn_mask, dropout_p, is_causal, scale)
    return [result, None]


def _causal(emit: Emit, queries: Length, keys: Length, dtype: torch.dtype) -> Value:
    """What torch's is_causal masks: keys after the query's own place, both counted from the start."""
    down = emit.unsqueeze(emit.range(0, queries, torch.int64), [1])
    along = emit.unsqueeze(emit.range(0, keys, torch.int64), [0])
    later = emit.binary("gt", along, down, torch.int64, torch.bool)
    return emit.select(later, torch.finfo(dtype).min, 0.0, dtype)


def _repeated(emit: Emit, x: Value, heads: Length) -> Value:
    """Each head of keys or values once for each of its queries."""
    axis = x.rank - 3
    count = heads // x.shape[axis]
    if count == 1:
        return x
    wide = emit.unsqueeze(x, [axis + 1])
    shape = [*wide.shape]
    shape[axis + 1] = count
    joined = (*x.shape[:axis], heads, *x.shape[axis + 1 :])
    return emit.reshape(emit.broadcast(wide, shape), joined)


def _fused(emit: Emit, query: Value, key: Value, value: Value, mask: Value | None, factor: float) -> Value:
    """The operator that tract has for it; it wants a mask with all the query's rows."""
    inputs = [query, key, value]
    if mask is not None:
        mask = emit.raised(mask, query.rank)
        full = (*mask.shape[:-2], query.shape[-2], key.shape[-2])
        inputs.append(emit.broadcast(mask, full))
    kind = tract_dtype(query.dtype)
    shape = (*query.shape[:-1], value.shape[-1])
    return emit.call(
        "tract_transformers_sdpa",
        *inputs,
        out=(shape, query.dtype),
        scale=factor,
        datum_type=kind,
        acc_datum_type="f32",
        is_causal=False,
    )


def rope(emit: Emit, x: Value, cos: Value, sin: Value) -> Value:
    """`x * cos + rotate_half(x) * sin`. The capture makes this call; no overload of torch is one.

    Written out it would be seven lines, and quicker for many positions (0.3 ms for 1 ms of 9 heads at 512 positions).
    """
    return emit.call("tract_transformers_apply_rope", x, cos, sin, out=(x.shape, x.dtype))
