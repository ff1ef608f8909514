"""How much each input channel of a weight matters, measured on a few texts.

`run` runs a model on the windows that `tokens` cuts, `input_statistics` sums up what its weights get to see, and
`importance` is the result, as a file too.
"""

__all__: list[str] = []
