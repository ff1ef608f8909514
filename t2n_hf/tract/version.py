"""Which tract is installed, found without importing it."""

import importlib.metadata
import importlib.util

from t2n_hf.errors import TractError

__all__ = ["available", "require_tract", "tract_version"]


def available() -> bool:
    """Whether the `tract` package can be imported."""
    return importlib.util.find_spec("tract") is not None


def tract_version() -> str | None:
    """Version of the installed `tract` package, or None when there is none."""
    try:
        return importlib.metadata.version("tract")
    except importlib.metadata.PackageNotFoundError:
        return None


def require_tract() -> None:
    """Raise TractError, saying what to install, when `tract` is missing."""
    if not available():
        raise TractError(
            "running an archive needs the tract package, which is not installed: `pip install t2n-hf[tract]`"
        )
