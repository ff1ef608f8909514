"""How much an error in each input channel of a weight matters, as quantizers take it."""

import torch

from t2n_hf.errors import QuantizationError

__all__ = ["checked_importance"]


def checked_importance(importance: torch.Tensor, columns: int, name: str = "") -> torch.Tensor:
    """Give `importance` as f32 (K,).

    Raises QuantizationError, naming `name`, when it has another shape than (`columns`,), or values that are negative
    or not finite.
    """
    where = name or "the tensor"
    if tuple(importance.shape) != (columns,):
        raise QuantizationError(
            f"{where} has {columns} input channels, and importance of shape {tuple(importance.shape)}; "
            "calibrate the same model that is quantized"
        )
    values = importance.detach().to(torch.float32)
    if not bool((torch.isfinite(values) & (values >= 0)).all()):
        raise QuantizationError(f"the importance for {where} has values that are negative, NaN or infinite")
    return values
