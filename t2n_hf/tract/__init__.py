"""Archives run in tract, in a process of its own: tract may abort, and must not take ours along.

`runner` starts the process and talks to it, `worker` is that process (over `bindings`, the Python packages of tract),
`frames` is what goes between them. `generating` is what the classes with the `generate()` of transformers share:
`model` (one archive), `seq2seq` and `image_text`, over `encoder_decoder` and `multimodal` (several archives each), with
`caches` and `past` of what was seen; `pictures` and `three_positions` prepare what images bring. `loading` opens
exports, `pipelines` chooses the class, `version` says which tract is installed.
"""
