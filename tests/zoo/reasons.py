"""Why models of the zoo are not exported for free lengths, in a few words each; every other model must be right."""

from typing import Final

__all__ = ["FIXED", "REASONS"]

_ASKS: Final = "its forward asks for a tensor's value"

REASONS: Final[dict[str, str]] = {
    "encodec": f"{_ASKS} (how much to pad, computed in tensors)",
    "funnel": "torch.export fixes the length, as relative positions are pooled in Python",
    "mimi": f"{_ASKS} (how much to pad, computed in tensors)",
    "smolvlm": "leaves pictures out that are zeros everywhere: how many it sees depends on the data",
    "vilt": "chooses patches by what is not padding, in numbers that depend on the data: fixed at those of the example",
    "vits": "durations of sounds are numbers that depend on the data: so is the length of the wave",
}

# Exported with capture="dispatch", by one run at the shapes of the example, which the archive then keeps.
FIXED: Final = frozenset(
    {
        "encodec",
        "funnel",
        "mimi",
        "vilt",
    }
)
