"""Device maps for any module: accelerate's entry points (`entry`), and a look before loading (`outlook`).

`options` are the arguments, `module_load` puts a checkpoint's weights into a module, `moving` keeps a model where it is
and brings its inputs there.
"""

__all__: list[str] = []
