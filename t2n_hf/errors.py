"""One tree of errors: every leaf is a `T2NError` and also the builtin that a caller would expect.

Texts say what went wrong, where, what was found, what was expected, and what to do next.
"""

__all__ = [
    "ArchiveError",
    "BudgetError",
    "CaptureError",
    "CheckError",
    "CheckpointNotFoundError",
    "ConfigError",
    "EmitError",
    "FormatError",
    "HubError",
    "InPlaceError",
    "LeakError",
    "MissingEmittersError",
    "OutputExistsError",
    "QuantizationError",
    "ResidencyError",
    "StorageError",
    "T2NError",
    "TagClashError",
    "TractError",
    "UnknownTagError",
    "UnsupportedOpError",
]


class T2NError(Exception):
    """Root of every error that t2n_hf raises on purpose.

    Attributes:
        each: the errors that this one sums up, when it tells of several.
    """

    each: "tuple[T2NError, ...]" = ()


class ConfigError(T2NError, ValueError):
    """An option is unknown, of the wrong type, out of range, or contradicts another one."""


class CheckpointNotFoundError(T2NError, FileNotFoundError):
    """A model folder or Hub id holds no config or no weights."""


class OutputExistsError(T2NError, FileExistsError):
    """The place to write to exists already and overwriting was not asked for."""


class StorageError(T2NError, OSError):
    """Bytes on disk are missing, truncated, changed since they were opened, or cannot be written."""


class FormatError(T2NError, ValueError):
    """Bytes or text do not follow their format."""


class ArchiveError(FormatError):
    """An archive has a hostile, duplicated or oversized member, or its content is not what its manifest says."""


class TagClashError(T2NError, ValueError):
    """Two classes claim one OFFLOAD_STATE_TAG, or one short name means several tags."""


class UnknownTagError(T2NError, KeyError):
    """No installed class declares this OFFLOAD_STATE_TAG or short name."""

    def __str__(self) -> str:
        """Show the text itself: `KeyError` would show its repr."""
        return str(self.args[0]) if self.args else ""


class QuantizationError(T2NError, ValueError):
    """A tensor cannot be quantized: NaN or infinity inside, or a shape that the format cannot hold."""


class UnsupportedOpError(T2NError, NotImplementedError):
    """An opaque tensor has no rule for this operation."""


class InPlaceError(T2NError, RuntimeError):
    """An in-place operation on an opaque tensor that could not be made to persist."""


class ResidencyError(T2NError, RuntimeError):
    """A residency pool is used against its rules: closed, leases left, a pin under FIXED."""


class BudgetError(T2NError, MemoryError):
    """A byte budget is smaller than what has to be in memory at once."""


class CaptureError(T2NError, RuntimeError):
    """A module could not be captured as a graph."""


class MissingEmittersError(T2NError, NotImplementedError):
    """The graph uses operators that no emitter covers; all of them are listed."""


class EmitError(T2NError, ValueError):
    """An emitter exists but refuses this form of its operator."""


class CheckError(T2NError, ArithmeticError):
    """The archive, run in tract, does not agree with PyTorch."""


class TractError(T2NError, RuntimeError):
    """tract is not installed, refused an archive, or its process ended."""


class HubError(T2NError, RuntimeError):
    """A push to or a pull from the Hub failed."""


class LeakError(T2NError, ValueError):
    """A file that would be pushed holds a secret, a local path, or a host or user name."""
