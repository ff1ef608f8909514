"""Why models of the zoo are not exported for free lengths, in a few words each; every other model must be right."""

from typing import Final

__all__ = ["FIXED", "REASONS"]

REASONS: Final[dict[str, str]] = {
    "smolvlm": "leaves pictures out that are zeros everywhere: how many it sees depends on the data",
    "vilt": "chooses patches by what is not padding, in numbers that depend on the data: fixed at those of the example",
    "vits": "durations of sounds are numbers that depend on the data: so is the length of the wave",
}

# Exported with capture="dispatch", by one run at the shapes of the example, which the archive then keeps.
FIXED: Final = frozenset({"vilt"})
