"""Option texts that become values: device maps, memory sizes; and output for people or for scripts."""

import json
import re
import sys
from typing import Any, Final

import typer
from transformers.utils import logging

__all__ = [
    "parse_bytes",
    "parse_device_map",
    "parse_max_memory",
    "placement_options",
    "print_json",
    "print_report",
    "progress_bar",
    "quiet_unless_watched",
]

_UNITS: Final = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_SIZE: Final = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[A-Za-z]*)")
_WHOLE_MAPS: Final = ("cpu", "disk")


def parse_bytes(text: str) -> int:
    """Read a size: "2GB", "500 MiB", "1000000" (bytes). Raises a usage error."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match["unit"].upper() not in _UNITS:
        raise typer.BadParameter(f"{text!r} is not a size; expected for example 2GB, 500MiB or 1000000")
    return int(float(match["number"]) * _UNITS[match["unit"].upper()])


def parse_device_map(text: str | None) -> Any:  # noqa: ANN401 - what from_pretrained takes as device_map
    """Read a device map: "disk" and "cpu" put the whole model there, JSON gives a place to each module.

    Anything else ("auto", "balanced", "cuda:0") is passed on as it is. Raises a usage error for a map that is not JSON.
    """
    if text is None:
        return None
    if text in _WHOLE_MAPS:
        return {"": text}
    if not text.lstrip().startswith("{"):
        return text
    try:
        device_map = json.loads(text)
    except json.JSONDecodeError as error:
        raise typer.BadParameter(f"the device map is not JSON: {error}") from error
    if not all(isinstance(place, (str, int)) for place in device_map.values()):
        raise typer.BadParameter(
            'the device map gives a device name to each module, as in {"model.embed_tokens": "cpu"}'
        )
    return device_map


def parse_max_memory(items: list[str] | None) -> dict[str | int, int] | None:
    """Read `--max-memory cpu=2GB --max-memory 0=10GiB`. Raises a usage error."""
    if not items:
        return None
    limits: dict[str | int, int] = {}
    for item in items:
        device, equals, size = item.partition("=")
        if not equals or not device:
            raise typer.BadParameter(f"{item!r}: expected DEVICE=SIZE, for example cpu=2GB")
        limits[int(device) if device.isdigit() else device] = parse_bytes(size)
    return limits


def placement_options(device_map: str | None, max_memory: list[str] | None) -> dict[str, Any]:
    """Read `--device-map` and `--max-memory` together, as load_checkpoint takes them. Raises a usage error.

    A map that is planned is made of the limits, any other one keeps to them.
    """
    return {"device_map": parse_device_map(device_map), "max_memory": parse_max_memory(max_memory)}


def print_json(value: object) -> None:
    """Print one JSON document on stdout."""
    print(json.dumps(value, indent=2, sort_keys=True))


def print_report(report: Any, as_json: bool) -> None:  # noqa: ANN401 - any report with to_dict()
    """Print a report on stdout, as text or as one JSON document."""
    if as_json:
        print_json(report.to_dict())
    else:
        print(report)


def progress_bar() -> bool:
    """Whether to show progress: only to a person who looks at a terminal."""
    return sys.stderr.isatty()


def quiet_unless_watched() -> None:
    """Turn off the progress bars of transformers unless a person looks at them."""
    if not progress_bar():
        logging.disable_progress_bar()
