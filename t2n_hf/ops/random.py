"""Random numbers: an archive gives the same results each time, so that all of these are refused."""

from typing import NoReturn

import torch

from t2n_hf.ops.emit import Emit
from t2n_hf.ops.table import EMITTERS

__all__: list[str] = []

_aten = torch.ops.aten
_emits = EMITTERS.emits


@_emits(_aten.rand.default, _aten.rand_like.default, _aten.randn.default, _aten.randn_like.default)
@_emits(_aten.randint.default, _aten.randint.low, _aten.randint_like.default, _aten.randint_like.low_dtype)
@_emits(_aten.randperm.default, _aten.normal.float_float, _aten.normal.Tensor_float, _aten.normal.float_Tensor)
@_emits(_aten.normal.Tensor_Tensor, _aten.normal_functional.default, _aten.uniform.default)
@_emits(_aten.bernoulli.default, _aten.bernoulli.p, _aten.bernoulli.Tensor, _aten.multinomial.default)
@_emits(_aten.exponential.default, _aten.poisson.default, _aten.rrelu_with_noise_functional.default)
def random(emit: Emit, *_: object, **__: object) -> NoReturn:
    """Refused."""
    raise emit.refuse(
        "it is random; make the numbers an input of the model, or put the module in inference with eval()"
    )
