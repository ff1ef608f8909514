"""Models that walk along the sequence, in a form that can be captured at every length.

The layers of state-space models and of linear attention call plain functions of their module for the recurrence: by
chunks of a fixed length, or token by token, and some begin anew at every call of several tokens. While a model is
captured, the forward of such a layer runs with other functions under those names, which go on from the state in the
cache and are one operator for the whole walk (`ops.state_space`).
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional as F

from t2n_hf.hf.capturable.griffin import capturable_griffin, has_griffin
from t2n_hf.hf.capturable.lightning import capturable_lightning
from t2n_hf.hf.capturable.rwkv import capturable_rwkv
from t2n_hf.hf.capturable.xlstm import capturable_xlstm
from t2n_hf.ops.state_space import gated_scan
from t2n_hf.trace.function_variants import in_scope
from t2n_hf.trace.swap import methods_replaced
from t2n_hf.trace.walk import modules_of

__all__ = ["begins_anew", "capturable_recurrences"]

# States that the scans of the layer that is running begin with: some functions are not given theirs.
_BEGINNINGS: ContextVar[Iterator[torch.Tensor] | None] = ContextVar("t2n_hf_recurrence_beginnings", default=None)


def _time_first(x: torch.Tensor, axis: int) -> torch.Tensor:
    return x.float().movedim(axis, 0)


def _steps(dt: torch.Tensor, bias: torch.Tensor | None, softplus: bool) -> torch.Tensor:
    steps = dt if bias is None else dt + bias.to(dt.dtype)
    return F.softplus(steps) if softplus else steps


def _selective_scan(  # noqa: PLR0917 - the signature that callers know
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_ignored: Any,  # noqa: ANN401 - which kernels to use
) -> Any:  # noqa: ANN401 - one tensor or two
    """`mamba_selective_scan` (Gu and Dao 2023): inputs and `dt` [B, I, S], A [I, N], B and C [B, N, S].

    The state is [B, I, N].
    """
    bias = None if delta_bias is None else delta_bias[..., None]
    steps, inputs = _time_first(_steps(dt, bias, delta_softplus), -1), _time_first(hidden_states, -1)
    begin = _begin(inputs.shape[1:], A.shape[-1:], inputs)
    keys, queries = (_time_first(x, -1).unsqueeze(2) for x in (B, C))
    news = (steps * inputs).unsqueeze(-1)
    read, last = gated_scan(queries, keys, news, steps.unsqueeze(-1), begin, 2, A.float().unsqueeze(0))
    output = read.movedim(0, -1)
    if D is not None:
        output = output + hidden_states * D[None, :, None]
    if z is not None:
        output = output * F.silu(z)
    return (output, last) if return_last_state else output


def _limited(steps: torch.Tensor, limits: tuple[float, float]) -> torch.Tensor:
    """Steps [B, S, H] > 0 within limits. transformers limits them in calls of several tokens, and not in others."""
    if tuple(limits) == (0.0, float("inf")):
        return steps
    several = torch.arange(steps.shape[1], device=steps.device)[-1:] > 0
    return torch.where(several, torch.clamp(steps, limits[0], limits[1]), steps)


def _chunk_scan(  # noqa: PLR0917 - the signature that callers know
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_ignored: Any,  # noqa: ANN401 - which kernels to use
) -> Any:  # noqa: ANN401 - one tensor or two
    """`mamba2_chunk_scan` (Dao and Gu 2024): inputs [B, S, H, P], `dt` [B, S, H], A [H], B and C [B, S, G, N].

    The state is [B, H, P, N].
    """
    heads, groups = hidden_states.shape[2], B.shape[2]
    steps = _limited(_steps(dt, dt_bias, dt_softplus), dt_limit)
    steps, inputs = (_time_first(x, 1) for x in (steps, hidden_states))
    keys, queries = (_time_first(x.repeat_interleave(heads // groups, dim=2), 1).unsqueeze(3) for x in (B, C))
    news = (steps.unsqueeze(-1) * inputs).unsqueeze(-1)
    state = inputs.new_zeros(*inputs.shape[1:], B.shape[-1]) if initial_states is None else initial_states.float()
    decay, rate = steps[..., None, None], A.float()[None, :, None, None]
    read, last = gated_scan(queries, keys, news, decay, state, 3, rate)
    output = read.movedim(0, 1)
    if D is not None:
        output = output + hidden_states * D[:, None]
    return (output, last) if return_final_states else output


def _delta_rule(  # noqa: PLR0917 - the signature that callers know
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int = 64,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_ignored: Any,  # noqa: ANN401 - which kernels to use
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated delta rule (Yang et al. 2024): one gate for a head (`g` [B, S, H]) or a key channel (`g` [B, S, H, K]).

    `query` and `key` are [B, S, heads of keys, K], `value` [B, S, H, V], `beta` [B, S, H]; the state is [B, H, K, V].
    """
    repeats = value.shape[2] // key.shape[2]
    queries, keys, values, gates, betas = (_time_first(x, 1) for x in (query, key, value, g, beta))
    if repeats != 1:
        queries, keys = (x.repeat_interleave(repeats, dim=2) for x in (queries, keys))
    if use_qk_l2norm_in_kernel:
        queries, keys = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (queries, keys))
    queries = queries / queries.shape[-1] ** 0.5
    shape = (*keys.shape[1:], values.shape[-1])
    state = keys.new_zeros(shape) if initial_state is None else initial_state.float()
    gates = gates[..., None] if gates.ndim == keys.ndim else gates[..., None, None]
    read, last = gated_scan(
        queries.unsqueeze(-1), keys.unsqueeze(-1), values.unsqueeze(-2), gates, state, 2, None, betas[..., None, None]
    )
    return read.movedim(0, 1).to(query.dtype), last if output_final_state else None


_WALKS: Final[Mapping[str, Callable[..., Any]]] = {
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _chunk_scan,
    "mamba_selective_scan": _selective_scan,
    "torch_chunk_gated_delta_rule": _delta_rule,
}
# These are not given the state that they go on from.
_WITHOUT_BEGINNING: Final = frozenset({"mamba_selective_scan"})


def begins_anew(model: nn.Module) -> bool:
    """Whether layers of `model`, as transformers runs them, forget their state at every call of several tokens."""
    kinds = set(map(type, modules_of(model)))
    return has_griffin(model) or any(_names(kind) & _WITHOUT_BEGINNING for kind in kinds)


@contextmanager
def capturable_recurrences(model: nn.Module) -> Iterator[None]:
    """Let the layers of `model` walk by one operator; they are as before after any exit."""
    with ExitStack() as stack:
        for rewritten in (capturable_griffin, capturable_lightning, capturable_rwkv, capturable_xlstm):
            stack.enter_context(rewritten(model))
        modules = modules_of(model)
        walking = {kind for kind in set(map(type, modules)) if _names(kind)}
        for module in modules:
            if type(module) in walking:
                forward = _rewritten(type(module))  # type: ignore[arg-type]
                stack.enter_context(methods_replaced(module, {"forward": forward}))
        yield


def _names(kind: type[nn.Module]) -> frozenset[str]:
    """Names of functions that the forward of a module calls and that are replaced."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return frozenset() if code is None else frozenset(_WALKS) & frozenset(code.co_names)


@cache
def _rewritten(kind: type[nn.Module]) -> Callable[..., Any]:
    """The forward of a class with other functions under the same names; one for all layers, so that they are alike."""
    plain, names = inspect.unwrap(kind.forward), _names(kind)
    rewritten = in_scope(plain, {name: _WALKS[name] for name in names})
    if not names & _WITHOUT_BEGINNING:
        return rewritten
    signature = inspect.signature(plain)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the layer's own
        cached = signature.bind(self, *args, **kwargs).arguments.get("cache")
        state = None if cached is None else cached.get_recurrent_state(self.layer_idx)
        token = _BEGINNINGS.set(None if state is None else iter(_by_call(state)))
        try:
            return rewritten(self, *args, **kwargs)
        finally:
            _BEGINNINGS.reset(token)

    return forward


def _by_call(state: torch.Tensor) -> list[torch.Tensor]:
    """The state of each scan of a layer: a layer with heads, [B, heads, I, N], walks once for each of them."""
    return [state] if state.ndim == 3 else list(state.unbind(1))


def _begin(rows: torch.Size, columns: torch.Size, like: torch.Tensor) -> torch.Tensor:
    beginnings = _BEGINNINGS.get()
    return like.new_zeros(*rows, *columns) if beginnings is None else next(beginnings).float()
