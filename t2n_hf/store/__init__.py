"""Tensors on disk, without pickle: byte ranges of checkpoints, offload states, a private spill, the manifest.

`checkpoint` reads the user's safetensors files where they are and never writes to them (`header` checks them), `state`
keeps what a quantized class gives of itself, `spill` what leaves memory for a while (`disk_space` gives it back),
`manifest` what an export holds. `memory` and `recycled` are what bytes are read into.
"""
