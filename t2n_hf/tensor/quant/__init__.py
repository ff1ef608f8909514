"""tensor/quant."""
