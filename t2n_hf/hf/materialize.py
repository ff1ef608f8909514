"""Back to a plain model: every packed or offloaded weight becomes an ordinary parameter."""

from typing import TypeVar

from torch import nn

from t2n_hf.hf.dispatch.moving import let_go
from t2n_hf.hf.hooks import leases_of
from t2n_hf.hf.saving import disown
from t2n_hf.hf.weights import replace_parameter
from t2n_hf.tensor.opaque import OpaqueTensor

__all__ = ["materialize"]

Model = TypeVar("Model", bound=nn.Module)


def materialize(model: Model) -> Model:
    """Turn every packed or offloaded weight of `model` into a plain parameter, in place, and return the model.

    Values are those of the exact path, ties are kept, hooks and pool are gone; what remains is a model that t2n_hf has
    no part in: it can be cast, trained and saved like any other. All of it is in memory afterwards.
    """
    for _, parameter in list(model.named_parameters()):
        if isinstance(parameter, OpaqueTensor):
            value = parameter.to_base_tensor()
            replace_parameter(model, parameter, nn.Parameter(value, requires_grad=value.is_floating_point()))
    leases = leases_of(model)
    if leases is not None:
        leases.detach(model)
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        quantizer.remove_quantization_config(model)
    disown(model)
    let_go(model)
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_is_quantized", False):
            del config._is_quantized  # type: ignore[union-attr]
    if hasattr(model, "hf_device_map"):
        del model.hf_device_map
    return model
