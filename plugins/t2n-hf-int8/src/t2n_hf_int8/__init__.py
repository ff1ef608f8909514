"""Int8 with one scale per row, as a quantized class for t2n-hf."""

from t2n_hf_int8.rows import Int8Rows

__all__ = ["Int8Rows"]
