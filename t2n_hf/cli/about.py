"""`t2n-hf env` and `t2n-hf plugins`."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Final

import typer

from t2n_hf.cli.options import print_json
from t2n_hf.registry import PluginInfo, list_plugins

__all__ = ["env", "plugins"]

_PACKAGES: Final = (
    "t2n-hf",
    "torch",
    "transformers",
    "accelerate",
    "safetensors",
    "huggingface-hub",
    "hf-xet",
    "numpy",
    "tract",
)
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _facts() -> dict[str, Any]:
    # No host name, user name or path: this is meant to be pasted into a public report.
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        **{package: _version(package) for package in _PACKAGES},
    }


def env(as_json: Json = False) -> None:
    """Show versions and resources, for a bug report."""
    facts = _facts()
    if as_json:
        print_json(facts)
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {'not installed' if value is None else value}")


def _plugin_line(row: PluginInfo) -> str:
    """One class in two lines. A short name is shown only where `T2NConfig` takes it."""
    use = f"short name {row.short}" if row.quantizes or row.error else "holds other formats, no option takes it"
    state = "ok" if row.error is None else f"does not load: {row.error}"
    owner = f"{row.distribution} {row.version}".rstrip()
    return f"{row.tag}\n  {use}; {row.target}, of {owner}: {state}"


def plugins(as_json: Json = False) -> None:
    """List the installed weight formats."""
    rows = list_plugins()
    if as_json:
        print_json([vars(row) for row in rows])
        return
    for row in rows:
        print(_plugin_line(row))
