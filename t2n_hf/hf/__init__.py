"""Everything that meets transformers: options, the quantizer, device maps, leases, saving, and what a task looks like.

A load goes through `config` (what is asked), `plan` (what becomes of each weight), `device_map` (where it lives),
`quantizer` and `conversions` (what transformers calls), `placing` (the work, one weight at a time) and `hooks` (leases
while modules run). `saving`, `stored` and `materialize` are the ways out, `report` says what happened. `loading` opens
checkpoints for the exporter, `calibration` runs them on texts (`input_statistics`) to tell which channels matter
(`importance`), `tasks`, `caches` and `rotary` say how a model looks when it is exported.
"""

__all__: list[str] = []
