"""Tiny random models of the architectures that people use, and what it takes to hold their archives against PyTorch.

`ZOO` maps a name to its `Entry`. `entry.make()` builds the model, with weights scaled up so that masks, positions and
norms matter; `zoo.check` exports it and compares tract with PyTorch at sizes that were not traced; `zoo.pool` does that
in worker processes; `scripts/zoo.py` runs any selection and writes docs/zoo.md.
"""

from zoo import (
    audio,
    decoders,
    detection,
    encoder_decoders,
    encoders,
    experts,
    further,
    multimodal,
    other_inputs,
    pixels,
    recurrent,
    sounds,
    vision,
)
from zoo.entry import FAMILIES, Entry

__all__ = ["FAMILIES", "ZOO", "Entry", "selected"]

ZOO: dict[str, Entry] = {}
for _room in (
    decoders,
    experts,
    further,
    recurrent,
    encoders,
    encoder_decoders,
    vision,
    pixels,
    detection,
    audio,
    sounds,
    multimodal,
    other_inputs,
):
    for _entry in _room.MODELS:
        if _entry.name in ZOO:
            raise ValueError(f"two models of the zoo are called {_entry.name!r}")
        ZOO[_entry.name] = _entry


def selected(words: list[str]) -> list[Entry]:
    """Entries whose family is one of `words`, or whose name is; all of them for no words.

    Raises KeyError for a word that is neither.
    """
    unknown = [word for word in words if word not in FAMILIES and word not in ZOO]
    if unknown:
        raise KeyError(f"the zoo has no model or family {', '.join(unknown)}")
    return [entry for entry in ZOO.values() if not words or entry.family in words or entry.name in words]
