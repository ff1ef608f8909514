"""Everything that meets transformers: options, the quantizer, device maps, leases, saving, and what a task looks like.

A load goes through `config` (what is asked), `plan` (what becomes of each weight), `placement` (where it lives),
`quantizer` and `conversions` (what transformers calls), `placing` (the work, one weight at a time) and `hooks` (leases
while modules run). Under it: `packing` quantizes one weight, `experts` some of a stack, `late` when it is read;
`sources`, `disk_sources` and `key_map` find bytes in a checkpoint, `weights` names of a model; `failures` joins errors.
`saving`, `stored` and `materialize` are the ways out. `report`, `sampled_error` and `comparing` say what happened.

`dispatch` does the same for any module, `quantize` for a folder without loading it (`companions` are its other files),
`calibration` measures what matters. `loading` opens checkpoints for the exporter; `tasks` says how a model looks when
it is exported, `caches` what it remembers, and `capturable` brings it into a form that can be captured. What changes
the process for a while holds the lock of `one_at_a_time`.
"""

__all__: list[str] = []
