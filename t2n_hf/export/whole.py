"""The check of a model that is several graphs, as one: tract's parts, one after the other, against the model itself.

PyTorch generates greedily, with the whole model and no cache; the archives are led over the same tokens, one at a time
with their caches. Where all logits agree within the tolerance, so do the tokens, but for ties within it.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch

from t2n_hf.dtypes import dtype_named
from t2n_hf.export.check import TOLERANCES, CheckResult, Comparison, timeout_of
from t2n_hf.export.config import ExportConfig
from t2n_hf.export.module_interface import evaluation_mode
from t2n_hf.export.parts import Part
from t2n_hf.export.reference import bounds_of, example_inputs, plan_lengths
from t2n_hf.hf.tasks import Pipeline
from t2n_hf.tensor.opaque import compute_mode, opaque_to_final_tensor
from t2n_hf.trace.swap import tensors_replaced
from t2n_hf.tract.encoder_decoder import EncoderDecoder
from t2n_hf.tract.multimodal import Multimodal
from t2n_hf.tract.pipelines import open_encoder_decoder, open_multimodal

__all__ = ["check_whole"]

_TOKENS: Final = 6


def check_whole(
    pipeline: Pipeline,
    parts: Sequence[Part],
    config: ExportConfig,
    staging: Path,
    tensors: Mapping[str, torch.Tensor],
) -> CheckResult:
    """Generate with the model and with its archives in `staging`, and compare the logits of each token.

    `tensors` are those of the model as the archives hold them. Raises CheckError at the first difference beyond the
    tolerance, TractError.
    """
    assert config.dtype is not None
    inputs = _inputs(parts[0])
    tokens, expected = _generate(pipeline, parts[0], inputs, tensors)
    comparison = Comparison(TOLERANCES[config.dtype] if config.tolerance is None else config.tolerance)
    dtypes = {spec.name: np.dtype(dtype_named(spec.dtype).numpy) for spec in parts[0].graph.specs}
    archives = {part.name: staging / part.archive for part in parts}
    timeout_s = timeout_of(sum(part.weight_bytes for part in parts))
    with _open(pipeline, archives, timeout_s) as whole:
        given = {name: value.numpy().astype(dtypes[name]) for name, value in inputs.items()}
        logits_of = _encoded(whole, given)
        begun = tokens.shape[1] - len(expected)
        for number, logits in enumerate(expected):
            got = logits_of(tokens[:, : begun + number])[:, -1]
            comparison.add(f"token {number} of the whole", {"logits": got}, {"logits": logits})
    return comparison.result()


def _open(pipeline: Pipeline, archives: Mapping[str, Path], timeout_s: float) -> EncoderDecoder | Multimodal:
    if pipeline.placeholder is None:
        return open_encoder_decoder(archives, timeout_s=timeout_s)
    return open_multimodal(archives, pipeline.placeholder, timeout_s=timeout_s)


def _encoded(whole: EncoderDecoder | Multimodal, given: Mapping[str, np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    """Run the encoder on its inputs by name; what comes back gives the logits after tokens [B, T]."""
    if isinstance(whole, EncoderDecoder):
        states = whole.encode(given)
        return lambda tokens: whole.logits(states, tokens)
    features = whole.encode([given])
    return lambda tokens: whole.logits(features, tokens)


def _inputs(first: Part) -> dict[str, torch.Tensor]:
    interface, specs = first.interface, first.graph.specs
    lengths = plan_lengths(specs, bounds_of(interface.dynamic_shapes), interface.extra)[-1][-1]
    return example_inputs(interface, specs, lengths)


def _generate(
    pipeline: Pipeline, first: Part, inputs: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Tokens [B, T], those that were generated last, and the logits [B, V] that each of these was chosen by."""
    assert pipeline.answer is not None
    assert pipeline.start is not None
    module = first.interface.module
    tokens = pipeline.start(inputs).expand(_rows(pipeline, inputs), -1)
    logits = []
    with torch.no_grad(), compute_mode("exact"), evaluation_mode(module), tensors_replaced(module, tensors):
        for _ in range(_TOKENS):
            last = opaque_to_final_tensor(pipeline.answer(inputs, tokens))
            logits.append(last.numpy())
            tokens = torch.cat([tokens, _next(last, pipeline.placeholder)], dim=1)
    return tokens.numpy(), logits


def _next(logits: torch.Tensor, placeholder: int | None) -> torch.Tensor:
    """The likeliest token of each row of `logits` [B, V], as [B, 1]: no placeholder, for it would stand for nothing."""
    if placeholder is not None and placeholder < logits.shape[-1]:
        logits = logits.index_fill(-1, torch.tensor([placeholder]), -torch.inf)
    return logits.argmax(-1, keepdim=True)


def _rows(pipeline: Pipeline, inputs: Mapping[str, torch.Tensor]) -> int:
    """How many sequences are generated: one about an image or a sound, else as many as are encoded."""
    return 1 if pipeline.placeholder is not None else len(next(iter(inputs.values())))
