"""What a model remembers, as exported graphs see it: plain tensors of known shape, that are set and not grown.

`whole` holds keys and values, `cross` also those of an encoder, `states` what layers of fixed size keep; `trees` takes
any cache of transformers apart for a captured graph.
"""

__all__: list[str] = []
