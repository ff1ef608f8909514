"""Quantizing a checkpoint into a folder, one weight at a time: what save_pretrained of the loaded model would write.

`checkpoint` is the order of things. `plan` says what will be written, of `units` (weights that are made together) and
`weights` (what each is stored as); `values` makes the bytes; `work` is the folder that grows, with its `journal`, so
that an interrupted run is gone on with; `output` is what lies beside the weights; `report` says what was done.
"""

__all__: list[str] = []
