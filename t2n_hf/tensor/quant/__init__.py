"""Packed formats: `q4_0`, with its `q4_0_blocks`, `q4_0_storage` and fast `kernels`.

`qtensor` and `scheme` (u8 values under a quantization scheme) are the classes that torch_to_nnef has for this: `q4_0`
keeps their interface, a new format needs neither.
"""

__all__: list[str] = []
