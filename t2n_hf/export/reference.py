"""What PyTorch says that the archive should give: the model run by its exact path, at lengths that were not traced."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import sympy
import torch
from torch import nn
from torch.utils import _pytree as pytree

from t2n_hf.dtypes import dtype_named
from t2n_hf.errors import CheckError, T2NError
from t2n_hf.export.module_interface import evaluation_mode
from t2n_hf.hf.packing import quantized as quantize
from t2n_hf.hf.plan import Choice
from t2n_hf.tensor.offload import OffloadedTensor
from t2n_hf.tensor.opaque import OpaqueTensor, compute_mode, opaque_to_final_tensor
from t2n_hf.trace.interface import Interface
from t2n_hf.trace.swap import tensors_replaced

__all__ = ["InputSpec", "Step", "bounds_of", "exact_tensors", "example_inputs", "plan_lengths", "run_references"]

# New tokens of each call of a model with a past: prefill, prefill with a past, single tokens. None is the example's.
_NEW_TOKENS: Final = (7, 3, 1, 1)
_LENGTHS: Final = (3, 8, 1)
_CONSTANT_LENGTHS: Final = (3, 7)
# A switch of a model's behaviour beyond this length is not worth the time of a prefill that long.
_LONGEST_PREFILL: Final = 4096
_WHOLE_NBYTES: Final = 1 << 20
_PADDING: Final = (2, 0, 1)
_PAST, _NEW, _FED_BACK, _FEEDS = "P", "S", "in_cache_", "out_cache_"


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """An input of the archive: `shape` holds ints and sympy expressions whose symbols are named as in the archive.

    `dtype` is the tract name.
    """

    name: str
    dtype: str
    shape: tuple[int | sympy.Expr, ...]

    def concrete(self, lengths: Mapping[str, int]) -> tuple[int, ...]:
        """Shape at the given value of each symbol."""
        values = {sympy.Symbol(name): value for name, value in lengths.items()}
        return tuple(dim if isinstance(dim, int) else int(dim.subs(values)) for dim in self.shape)

    def symbols(self) -> set[str]:
        """Names of the symbols in the shape."""
        return {str(s) for dim in self.shape if not isinstance(dim, int) for s in dim.free_symbols}


@dataclass(frozen=True, kw_only=True)
class Step:
    """One call: values of the symbols, the inputs in the model's own precision (f32), and what PyTorch gives.

    `fed_back` maps an input to the output of the step before that it takes; such an input is not in `inputs`. `ignored`
    is true where an output, by name, means nothing: at padding. It is broadcast against the output.
    """

    lengths: Mapping[str, int]
    inputs: Mapping[str, np.ndarray]
    fed_back: Mapping[str, str]
    outputs: Mapping[str, np.ndarray]
    ignored: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __str__(self) -> str:
        """Say the lengths: "S=3, P=7"."""
        return ", ".join(f"{name}={value}" for name, value in self.lengths.items()) or "the given shapes"


def plan_lengths(
    specs: Sequence[InputSpec], bounds: Mapping[str, tuple[int, int | None]], extra: Mapping[str, Any]
) -> list[list[dict[str, int]]]:
    """Choose the calls: a list of sequences; each call of a sequence takes the caches that the one before gave.

    `bounds` gives the least and largest value of a symbol. Calls that do not fit into the positions are left out.
    """
    symbols = sorted({symbol for spec in specs for symbol in spec.symbols()})
    if any(spec.name.startswith(_FED_BACK) for spec in specs):
        sequences = _sequences(extra.get("max_context"), extra.get("rope_switch"))
        # Lengths beside S and P stay the same in a sequence: sequences at a time, positions of an encoder.
        others = {
            symbol: _clip(_CONSTANT_LENGTHS[place % len(_CONSTANT_LENGTHS)], bounds.get(symbol, (1, None)))
            for place, symbol in enumerate(symbol for symbol in symbols if symbol not in (_NEW, _PAST))
        }
        return [[{**others, **call} for call in calls] for calls in sequences]
    rounds = []
    for number in range(len(_LENGTHS) if symbols else 1):
        wanted = {symbol: _LENGTHS[(number + place) % len(_LENGTHS)] for place, symbol in enumerate(symbols)}
        rounds.append([{symbol: _clip(value, bounds.get(symbol, (1, None))) for symbol, value in wanted.items()}])
    return rounds


def _clip(value: int, bounds: tuple[int, int | None]) -> int:
    low, high = bounds
    return max(low, value if high is None else min(value, high))


def _sequences(max_context: int | None, switch: int | None) -> list[list[dict[str, int]]]:
    limit = max_context if max_context is not None else _LONGEST_PREFILL
    calls: list[dict[str, int]] = []
    past = 0
    for new in _NEW_TOKENS:
        if past + new > limit:
            continue
        calls.append({_NEW: new, _PAST: past})
        past += new
    sequences = [calls]
    if switch is not None and switch < min(limit, _LONGEST_PREFILL):
        sequences += [[{_NEW: length, _PAST: 0}] for length in (switch, switch + 1)]
    return sequences


def exact_tensors(module: nn.Module, quantized: Mapping[str, Choice] | None = None) -> dict[str, torch.Tensor]:
    """Show every parameter and floating buffer of `module` in f32, without a second copy of the large ones.

    `quantized` names those that the archive holds quantized although the module does not: they are presented with the
    values that the archive has. Tied tensors stay tied.
    """
    shown: dict[int, torch.Tensor] = {}
    result = {}
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if not tensor.is_floating_point():
            continue
        if id(tensor) not in shown:
            shown[id(tensor)] = _exact(tensor.detach(), name, (quantized or {}).get(name))
        result[name] = shown[id(tensor)]
    return result


def _exact(tensor: torch.Tensor, name: str, quantize_as: Choice | None) -> torch.Tensor:
    if quantize_as is not None:
        dense = opaque_to_final_tensor(tensor)
        return quantize(dense, quantize_as, dtype=torch.float32, name=name, compute="exact")
    if tensor.dtype == torch.float32:
        return tensor
    if isinstance(tensor, OpaqueTensor):
        return tensor.to(torch.float32)
    if tensor.numel() * 4 <= _WHOLE_NBYTES:
        return tensor.float()
    return OffloadedTensor.over(tensor, torch.float32, name)


def run_references(
    interface: Interface,
    specs: Sequence[InputSpec],
    sequences: Sequence[Sequence[Mapping[str, int]]],
    tensors: Mapping[str, torch.Tensor],
) -> list[Step]:
    """Run the module with `tensors` in place of its own, in f32, by the exact path; give what went in and came out."""
    maker = _InputMaker(interface, specs)
    steps: list[Step] = []
    with torch.no_grad(), compute_mode("exact"), evaluation_mode(interface.module):
        for calls in sequences:
            before: dict[str, torch.Tensor] | None = None
            for lengths in calls:
                fed_back = {} if before is None else maker.fed_back()
                given = maker.values(lengths, skip=fed_back)
                fed = {name: before[source] for name, source in fed_back.items()} if before is not None else {}
                before = _call(interface, {**given, **fed}, tensors)
                steps.append(
                    Step(
                        lengths=lengths,
                        inputs={name: value.numpy() for name, value in given.items()},
                        fed_back=fed_back,
                        outputs={name: _array(value) for name, value in before.items()},
                        ignored=maker.meaningless(lengths, before),
                    )
                )
    return steps


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The values of a result; numpy has no bfloat16, and neither has tract."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def example_inputs(
    interface: Interface, specs: Sequence[InputSpec], lengths: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """Inputs of the given lengths, by name, floats in f32: always the same ones."""
    return _InputMaker(interface, specs).values(lengths, skip={})


def _call(
    interface: Interface, inputs: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    leaves, spec = pytree.tree_flatten((interface.args, dict(interface.kwargs)))
    # Copies: the module may write to what it is given, and tract is given the same.
    values = iter([inputs[name].clone() for name in interface.input_names])
    filled = [next(values) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(filled, spec)
    with tensors_replaced(interface.module, tensors):
        result = _run(interface.module, args, kwargs)
    outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    plain = [opaque_to_final_tensor(output).contiguous() for output in outputs]
    return dict(zip(interface.output_names, plain, strict=True))


def _run(module: nn.Module, args: Any, kwargs: Any) -> Any:  # noqa: ANN401 - pytrees
    try:
        return module(*args, **kwargs)
    except T2NError:
        raise
    except Exception as error:
        raise CheckError(
            f"PyTorch does not run {type(module).__name__} in f32, which the archive is compared with: "
            f"{type(error).__name__}: {error}. Give the module one dtype, or export with check=False"
        ) from error


class _InputMaker:
    """Makes inputs of any length: always the same ones."""

    def __init__(self, interface: Interface, specs: Sequence[InputSpec]) -> None:
        self._specs = specs
        self._outputs = set(interface.output_names)
        leaves = pytree.tree_leaves((interface.args, dict(interface.kwargs)))
        examples = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._examples = dict(zip(interface.input_names, examples, strict=True))
        self._vocabulary = _vocabulary(interface.weight_owner)
        # A model with a cache takes padding in front of the tokens, any other one behind them.
        names = {spec.name for spec in specs}
        self._is_padded = "attention_mask" in names and any(name.startswith(_FED_BACK) for name in names)
        self._random = torch.Generator().manual_seed(0)

    def fed_back(self) -> dict[str, str]:
        """Inputs that take an output of the step before."""
        pairs = ((spec.name, spec.name.replace(_FED_BACK, _FEEDS, 1)) for spec in self._specs)
        return {name: source for name, source in pairs if name.startswith(_FED_BACK) and source in self._outputs}

    def values(self, lengths: Mapping[str, int], skip: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Make the inputs that are not in `skip`, floats in f32."""
        made = {s.name: self._value(s, s.concrete(lengths)) for s in self._specs if s.name not in skip}
        if self._is_padded:
            made |= left_padding(made, lengths.get(_PAST, 0))
        return made

    def meaningless(self, lengths: Mapping[str, int], outputs: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
        """Where outputs, by name, are those of padding: keys, values, states and logits of its positions."""
        if not self._is_padded:
            return self._behind(lengths, outputs)
        new, total = lengths[_NEW], lengths[_NEW] + lengths.get(_PAST, 0)
        rows = next(iter(outputs.values())).shape[0]
        padding = (padded_left(rows, total) == 0).numpy()
        places = {"outputs": padding[:, -new:, None]} if outputs["outputs"].shape[1] == new else {}
        grown = {name for name in outputs if name.startswith((f"{_FEEDS}key", f"{_FEEDS}value"))}
        return places | dict.fromkeys(grown, padding[:, None, :, None])

    def _behind(self, lengths: Mapping[str, int], outputs: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
        """The same of an encoder. In a window padding may see nothing at all, of which each library makes its own."""
        mask = next((spec for spec in self._specs if spec.name == "attention_mask" and len(spec.shape) == 2), None)
        if mask is None:
            return {}
        rows, length = mask.concrete(lengths)
        padding = (_padded((rows, length), torch.int64) == 0).numpy()
        states = {name: padding[..., None] for name, value in outputs.items() if _begins(value, (rows, length), 3)}
        crossed = [name for name, value in outputs.items() if name.startswith("cross_") and value.shape[2] == length]
        return states | dict.fromkeys(crossed, padding[:, None, :, None])

    def _value(self, spec: InputSpec, shape: tuple[int, ...]) -> torch.Tensor:
        if spec.name.startswith(_FED_BACK) and _PAST not in spec.symbols():
            return torch.zeros(shape)  # a state that has seen nothing
        if dtype_named(spec.dtype).is_float:
            return self._floats(self._examples[spec.name], shape)
        dtype = getattr(torch, dtype_named(spec.dtype).torch)
        if spec.name == "input_ids" and self._vocabulary is not None:
            return torch.randint(0, self._vocabulary, shape, generator=self._random, dtype=dtype)
        if spec.name.endswith("attention_mask"):
            return _padded(shape, dtype)
        # Integers may be indices: only those of the example are known to be in range.
        flat = self._examples[spec.name].reshape(-1)
        count = int(np.prod(shape))
        return flat.repeat(-(-count // max(1, flat.numel())))[:count].reshape(shape).to(dtype)

    def _floats(self, example: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        noise = torch.randn(shape, generator=self._random)
        spread = float(example.float().std()) if example.numel() > 1 else 0.0
        return noise * spread + float(example.float().mean()) if spread > 0 else noise


def padded_left(rows: int, length: int) -> torch.Tensor:
    """A mask [rows, length] whose rows begin with padding, of 2, 0 and 1 tokens by turns."""
    first = torch.tensor([_PADDING[row % len(_PADDING)] for row in range(rows)])
    return (torch.arange(length) >= first[:, None]).to(torch.int64)


def left_padding(inputs: Mapping[str, torch.Tensor], past: int) -> dict[str, torch.Tensor]:
    """Mask and positions for inputs with an attention mask, after `past` positions."""
    rows, new = inputs["input_ids"].shape
    mask = padded_left(rows, past + new)
    made = {"attention_mask": mask[:, -inputs["attention_mask"].shape[1] :]}
    if "position_ids" in inputs:
        made["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -new:]
    return made


def _begins(value: torch.Tensor, shape: tuple[int, ...], rank: int) -> bool:
    return value.dim() == rank and tuple(value.shape[: len(shape)]) == shape


def _padded(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A mask whose rows, but the first, end in padding; every row keeps its first position."""
    mask = torch.ones(shape, dtype=dtype)
    mask[1:, max(1, shape[-1] // 2) :] = 0
    return mask


def _vocabulary(model: nn.Module) -> int | None:
    get = getattr(model, "get_input_embeddings", None)
    if not callable(get):
        return None
    try:
        return getattr(get(), "num_embeddings", None)
    except NotImplementedError:  # a model of images or sounds has no table of words
        return None


def bounds_of(dynamic_shapes: Any) -> dict[str, tuple[int, int | None]]:  # noqa: ANN401 - what torch.export.export takes
    """Least and largest value of each named `torch.export.Dim` in `dynamic_shapes`."""
    return {dim.__name__: (dim.min, _finite(dim.max)) for dim in _dims(dynamic_shapes)}


def _dims(tree: Any) -> Iterator[Any]:  # noqa: ANN401 - nested dynamic shapes
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _dims(item)
    elif isinstance(tree, torch.export.Dim):
        yield getattr(tree, "root", tree)


def _finite(value: Any) -> int | None:  # noqa: ANN401 - torch writes "no bound" in several ways
    return int(value) if isinstance(value, int) and value < (1 << 31) else None
