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
    # What was loaded may be a part of `model`: peft and others wrap it.
    for loaded in [module for module in model.modules() if module is model or "t2n_report" in vars(module)]:
        _let_be(loaded)
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_is_quantized", False):
            del config._is_quantized  # type: ignore[union-attr]
    return model


def _let_be(model: nn.Module) -> None:
    """Undo what loading made of a model, beside its weights."""
    leases = leases_of(model)
    if leases is not None:
        leases.detach(model)
    quantizer = vars(model).get("hf_quantizer")
    if quantizer is not None:
        quantizer.remove_quantization_config(model)
    disown(model)
    let_go(model)
    vars(model).pop("hf_device_map", None)
