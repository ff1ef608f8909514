"""Archives run in tract, in a process of its own: tract may abort, and must not take ours along.

`runner` starts the process and talks to it, `worker` is that process, `frames` is what goes between them. `model` puts
the `generate()` of transformers on top, `version` says which tract is installed.
"""
