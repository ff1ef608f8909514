"""Models of transformers in a form that can be captured at every length: each file swaps forwards, and puts them back.

`forwards` is for what asks Python for a number of tensors, `windows` for attention in blocks, `indexers` for attention
to tokens that an index chooses, `routed_experts` for experts that are run one after the other, `rotary` for frequencies
that depend on the length, `codecs` and `pooled_places` for lengths that are calculated in tensors or lists, `languages`
for adapters of which each language has its own, `causal_masks` for decoders that forget their mask beside a cache.
`recurrence` is for models that walk along the sequence; those that need more than a function have a file of their own:
`griffin`, `lightning`, `rwkv`, `xlstm`. `own_caches` says how a `caches.states.StateCache` is what such a model keeps.
`tasks.settings.capture_settings` enters all but `causal_masks`.
"""

__all__: list[str] = []
