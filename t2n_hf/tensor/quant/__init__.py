"""Quantized formats, one per file, and the schemes and kernels that they share."""

__all__: list[str] = []
