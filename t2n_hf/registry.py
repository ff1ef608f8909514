"""What distributions declare by entry points, imported on first use: classes by OFFLOAD_STATE_TAG, and functions."""

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from t2n_hf.contract import ENTRY_POINT_GROUP, SupportsOffloadState, Tag, WeightFormat, defined_classes
from t2n_hf.errors import ConfigError, TagClashError, UnknownTagError

__all__ = [
    "PluginInfo",
    "class_of_tag",
    "declared_function",
    "declared_names",
    "format_class",
    "installed_tags",
    "list_plugins",
    "resolve_offload_state",
]


@dataclass(frozen=True, kw_only=True)
class PluginInfo:
    """One declared tag: who declares it, and what came of importing it (`error` is None when it loads).

    `quantizes`: weights can be quantized to the class. False for a stored form that only holds other classes.
    """

    tag: str
    short: str
    distribution: str
    version: str
    target: str
    quantizes: bool
    error: str | None


def _distribution(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown distribution"


def _declared(group: str = ENTRY_POINT_GROUP) -> dict[str, list[EntryPoint]]:
    return _declared_in(tuple((folder, _changed_ns(folder)) for folder in sys.path), entry_points, group)


def _changed_ns(folder: str) -> int:
    try:
        return os.stat(folder or os.curdir).st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=4)
def _declared_in(
    folders: tuple[tuple[str, int], ...], find: Callable[..., Iterable[EntryPoint]], group: str
) -> dict[str, list[EntryPoint]]:
    """Read the metadata of all distributions (milliseconds), once for each state of the folders that they are in."""
    found: dict[str, list[EntryPoint]] = {}
    for point in find(group=group):
        others = found.setdefault(point.name, [])
        # The same distribution can be seen twice (an editable install beside its build folder).
        if all(_distribution(other) != _distribution(point) or other.value != point.value for other in others):
            others.append(point)
    return found


def declared_names(group: str) -> list[str]:
    """Every name that installed distributions declare in a group of entry points, sorted. Imports nothing."""
    return sorted(_declared(group))


def declared_function(group: str, name: str) -> Callable[..., Any] | None:
    """Import the function that a distribution declares under `name`; None when none does.

    Raises TagClashError when two distributions do, ConfigError when it does not load or is no function: what was asked
    for cannot be done without it.
    """
    points = _declared(group).get(name, [])
    if not points:
        return None
    owners = " and ".join(sorted(f"{_distribution(p)} ({p.value})" for p in points))
    if len(points) > 1:
        raise TagClashError(f"{name!r} in {group} is declared by {owners}; uninstall one of them")
    try:
        function = points[0].load()
    except Exception as error:
        raise ConfigError(
            f"{name!r} in {group} is declared by {owners}, which does not load: {type(error).__name__}: {error}; "
            "repair it, or uninstall it"
        ) from error
    if not callable(function):
        raise ConfigError(f"{name!r} in {group} is declared by {owners}, which is no function; repair it")
    return function


def installed_tags() -> list[str]:
    """Every tag that can be used, sorted. Imports nothing."""
    return sorted({*defined_classes(), *_declared()})


def _load(point: EntryPoint) -> type[SupportsOffloadState]:
    cls = point.load()
    if not (isinstance(cls, type) and issubclass(cls, SupportsOffloadState)):
        raise ConfigError(f"{point.value} is not a class with SupportsOffloadState")
    if getattr(cls, "OFFLOAD_STATE_TAG", None) != point.name:
        raise ConfigError(f"{point.value} declares tag {getattr(cls, 'OFFLOAD_STATE_TAG', None)!r}, not {point.name!r}")
    return cls


def _unknown(name: str, kind: str, why: str = "") -> UnknownTagError:
    known = ", ".join(installed_tags()) or "none"
    package = name.partition(".")[0].replace("_", "-") if "." in name else f"t2n-hf-{name}"
    return UnknownTagError(
        f"no installed class for {kind} {name!r}{why}; installed tags: {known}. "
        f"Install the distribution that declares it (by its name, perhaps `pip install {package}`); "
        "`t2n-hf plugins` lists what is installed"
    )


def class_of_tag(tag: str) -> type[SupportsOffloadState]:
    """Find the class that declares `tag`, importing its distribution if need be.

    Raises UnknownTagError when none does or its import fails, TagClashError when two distributions do.
    """
    points = _declared().get(tag, [])
    if len(points) > 1:
        owners = " and ".join(sorted(f"{_distribution(p)} ({p.value})" for p in points))
        raise TagClashError(f"tag {tag!r} is declared by {owners}; uninstall one of them")
    cls = defined_classes().get(tag)
    if cls is not None:
        return cls
    if not points:
        raise _unknown(tag, "offload-state tag")
    try:
        return _load(points[0])
    except Exception as error:
        warnings.warn(
            f"plugin {points[0].value} of {_distribution(points[0])} is skipped: {type(error).__name__}: {error}",
            stacklevel=2,
        )
        raise _unknown(
            tag, "offload-state tag", f" ({_distribution(points[0])} declares it but does not load)"
        ) from error


def format_class(name: str) -> type[WeightFormat]:
    """Find a quantized class by tag or short name ("q4_0").

    Of one distribution the newest version of a format is taken. Raises UnknownTagError when nothing has the name,
    TagClashError when two distributions do, ConfigError when the class cannot quantize.
    """
    tag = name if "." in name else _tag_of_short(name)
    cls = class_of_tag(tag)
    if not issubclass(cls, WeightFormat):
        raise ConfigError(f"{tag!r} is a stored form, not a format that weights can be quantized to")
    return cls


def _tag_of_short(short: str) -> str:
    tags = [(Tag.parse(t), t) for t in installed_tags() if _is_tag(t)]
    matches = [(tag.distribution, tag.version, text) for tag, text in tags if tag.short == short]
    if not matches:
        raise _unknown(short, "format")
    if len({distribution for distribution, _, _ in matches}) > 1:
        found = " and ".join(sorted(text for _, _, text in matches))
        raise TagClashError(f"format {short!r} means {found}; write the whole tag")
    return max(matches)[2]


def _is_tag(text: str) -> bool:
    try:
        Tag.parse(text)
    except ConfigError:
        return False
    return True


def resolve_offload_state(state: Any) -> type[SupportsOffloadState] | None:  # noqa: ANN401
    """Return the class able to rebuild `state`, or None when `state` is no offload state at all.

    Raises UnknownTagError for a state whose tag no installed class declares.
    """
    if not (isinstance(state, Mapping) and isinstance(state.get("tag"), str) and "tensors" in state):
        return None
    return class_of_tag(state["tag"])


def list_plugins() -> list[PluginInfo]:
    """Load every declared tag and say what came of it; classes that only this process defines are listed too."""
    rows = []
    declared = _declared()
    for name, points in sorted(declared.items()):
        clash = f"declared by {len(points)} distributions" if len(points) > 1 else None
        for point in points:
            error, quantizes = clash, False
            try:
                quantizes = issubclass(_load(point), WeightFormat)
            except Exception as problem:  # noqa: BLE001 - a plugin may raise anything while it is imported
                error = f"{type(problem).__name__}: {problem}"
            short = Tag.parse(name).short if _is_tag(name) else ""
            dist, version = (point.dist.name, point.dist.version) if point.dist else ("?", "?")
            rows.append(
                PluginInfo(
                    tag=name,
                    short=short,
                    distribution=dist,
                    version=version,
                    target=point.value,
                    quantizes=quantizes,
                    error=error,
                )
            )
    for tag, cls in sorted(defined_classes().items()):
        if tag not in declared:
            where = f"{cls.__module__}:{cls.__qualname__}"
            rows.append(
                PluginInfo(
                    tag=tag,
                    short=Tag.parse(tag).short,
                    distribution="(this process)",
                    version="",
                    target=where,
                    quantizes=issubclass(cls, WeightFormat),
                    error=None,
                )
            )
    return rows
