"""The NNEF format as tract reads it: the graph model and its text, `.dat` files, archives. Knows no torch.

`ir` is the graph, `text` writes it, `names` makes legal names, `dat` holds tensors, `archive` joins them in a folder,
.tar or .tgz (through `sinks` and `sources`, `tar` and `deflate`), `signature` reads names back, `versions` says which
tract runs a document, `meaning` whether two of them compute the same.
"""
