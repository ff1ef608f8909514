"""Why models of the zoo are not exported, in a few words each; every other model must be right."""

from typing import Final

__all__ = ["REASONS"]

REASONS: Final[dict[str, str]] = {}
