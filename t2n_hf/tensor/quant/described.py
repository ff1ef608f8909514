"""Described: what schemes and compressors share, so that tensors that use them can be saved: a name, JSON, tensors."""

import copy
import json
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from typing_extensions import Self

from t2n_hf.errors import ConfigError, FormatError, UnsupportedOpError

__all__ = ["Described"]

_NAMED: dict[tuple[str, str], type["Described"]] = {}


class Described:
    """Something that may hold tensors and numbers.

    A class that sets `STATE_NAME` in its own body can be saved: it is found again by that name (in a process where its
    module has been imported), and rebuilt by `from_state` of what `state_meta` and `tensors` gave.
    """

    KIND: ClassVar[str]
    STATE_NAME: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:  # noqa: ANN401 - of any class that is mixed in
        """Note the class under its name. Raises ConfigError when another class has it."""
        super().__init_subclass__(**kwargs)
        name = cls.__dict__.get("STATE_NAME")
        if not name:
            return
        known = _NAMED.get((cls.KIND, name))
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ConfigError(f"{cls.KIND} {name!r} is {known.__module__}.{known.__qualname__} already")
        _NAMED[cls.KIND, name] = cls

    def tensors(self) -> dict[str, torch.Tensor]:
        """Name the tensors that are held. Default: the attributes that are tensors."""
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}

    def to_device(self, new_device: Any) -> Self:  # noqa: ANN401 - whatever torch takes as a device
        """Move the tensors that are held to `new_device`, in place; returns self."""
        for name, value in self.tensors().items():
            setattr(self, name, value.to(new_device))
        return self

    def over(self, tensors: Mapping[str, torch.Tensor]) -> Self:
        """Give one that holds `tensors`, named as `tensors()` does, and is else like this one. Default: a copy.

        A class whose `tensors()` does not name attributes defines it too.
        """
        other = copy.copy(self)
        vars(other).update(tensors)
        return other

    def state_meta(self) -> dict[str, Any]:
        """Give what JSON can hold, beside `tensors()`. Default: nothing."""
        return {}

    @classmethod
    def from_state(cls, meta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Self:
        """Rebuild from what `state_meta` and `tensors` gave. Default: for a class whose constructor takes nothing.

        What is given comes from a file: raise FormatError when it does not fit.
        """
        if meta or tensors:
            raise FormatError(f"{cls.__name__} holds nothing, got {sorted(meta)} and tensors {sorted(tensors)}")
        return cls()

    def description(self) -> dict[str, Any]:
        """Give name and meta, as JSON holds them. Raises UnsupportedOpError for a class without a name, or no JSON."""
        cls = type(self)
        if not cls.__dict__.get("STATE_NAME"):
            raise UnsupportedOpError(
                f"{cls.__name__} has no STATE_NAME, so a tensor that uses it cannot be saved or offloaded; set one, "
                "and define state_meta() and from_state()"
            )
        described = {"name": cls.STATE_NAME, **self.state_meta()}
        try:
            same = json.loads(json.dumps(described)) == described
        except (TypeError, ValueError):
            same = False
        if not same:
            raise UnsupportedOpError(f"{cls.__name__}.state_meta() gave what JSON cannot hold: {described!r:.200}")
        return described

    @classmethod
    def rebuilt(cls, description: Any, tensors: Mapping[str, torch.Tensor]) -> Any:  # noqa: ANN401 - JSON -> an instance
        """Rebuild what `description` gave. Raises FormatError when nothing that is imported has the name."""
        if not isinstance(description, Mapping) or not isinstance(description.get("name"), str):
            raise FormatError(f"a stored {cls.KIND} is an object with a name; got {description!r:.200}")
        found = _NAMED.get((cls.KIND, description["name"]))
        if found is None:
            known = ", ".join(sorted(name for kind, name in _NAMED if kind == cls.KIND))
            raise FormatError(
                f"no {cls.KIND} {description['name']!r} is defined in this process; known are {known}. "
                "Import the module that defines it"
            )
        return found.from_state({key: value for key, value in description.items() if key != "name"}, tensors)
