"""How packed tensors are named in a saved checkpoint, and how config.json says what they are.

A parameter `x.weight` whose state has parts `qs` and `d` is stored as the tensors `x.weight_qs` and `x.weight_d`, under
the name that the model itself has for it (older checkpoints may have others); its tag and meta are in config.json, in
`quantization_config["tensors"]`. (Not in the files' own metadata: safetensors writes two or more entries of it in a
random order, and a checkpoint should have the same bytes each time.)
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from t2n_hf.errors import FormatError

__all__ = ["StoredForm", "StoredForms", "key_of_part"]

_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")


def key_of_part(name: str, part: str) -> str:
    """Name the tensor of a checkpoint that holds one part of parameter `name`.

    The joint is a word character: patterns of transformers that rename weights end at the end of a word.
    """
    return f"{name}_{part}"


@dataclass(frozen=True)
class StoredForm:
    """What one stored parameter is: the tag of its class, its meta, and the names of its parts."""

    tag: str
    parts: tuple[str, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Give the form as JSON holds it."""
        return {"tag": self.tag, "parts": list(self.parts), "meta": dict(self.meta)}


class StoredForms:
    """The forms of all packed parameters of a checkpoint, by parameter name.

    Equal forms of numbered layers are written once, the number as "*".
    """

    def __init__(self, forms: Mapping[str, StoredForm]) -> None:
        self._forms = dict(forms)
        self._parts = sorted({part for form in forms.values() for part in form.parts}, key=len, reverse=True)

    def __bool__(self) -> bool:
        return bool(self._forms)

    def find(self, name: str, base_model_prefix: str = "") -> StoredForm | None:
        """Find the form of a parameter, None for one that is stored plainly.

        The prefix lets a model with a head read the checkpoint of one without, and the other way round.
        """
        for candidate in _candidates(name, base_model_prefix):
            form = self._forms.get(candidate) or self._forms.get(_NUMBER.sub("*", candidate))
            if form is not None:
                return form
        return None

    def name_of_part(self, key: str) -> str | None:
        """Give the parameter that a tensor of the checkpoint, `key`, is a part of; None for a plain tensor."""
        for part in self._parts:
            name = key.removesuffix(f"_{part}")
            form = self.find(name) if name != key else None
            if form is not None and part in form.parts:
                return name
        return None

    def stored_name(self, name: str, base_model_prefix: str = "") -> str:
        """Give the name that parameter `name` has in the checkpoint: see `find`."""
        return next(n for n in _candidates(name, base_model_prefix) if self.find(n) is not None)

    def serialized_names(self) -> dict[str, list[str]]:
        """Map the last part of parameter names to those that their parts are stored under, longest first."""
        found: dict[str, set[str]] = {}
        for name, form in self._forms.items():
            leaf = name.rpartition(".")[2]
            found.setdefault(leaf, set()).update(key_of_part(leaf, part) for part in form.parts)
        return {leaf: sorted(found[leaf]) for leaf in sorted(found, key=lambda leaf: (-len(leaf), leaf))}

    def to_json(self) -> dict[str, Any]:
        """Give the forms as config.json keeps them."""
        groups: dict[str, dict[str, StoredForm]] = {}
        for name, form in self._forms.items():
            groups.setdefault(_NUMBER.sub("*", name), {})[name] = form
        result = {}
        for pattern, members in groups.items():
            kinds = {json.dumps(form.to_json(), sort_keys=True) for form in members.values()}
            names: Iterable[str] = [pattern] if len(kinds) == 1 else members
            for name in names:
                result[name] = (members.get(name) or next(iter(members.values()))).to_json()
        return dict(sorted(result.items()))

    @classmethod
    def from_json(cls, value: Any) -> "StoredForms":  # noqa: ANN401 - JSON
        """Read what `to_json` gave (None: nothing is packed). Raises FormatError when it is something else."""
        if value is None:
            return cls({})
        try:
            forms = {
                name: StoredForm(str(entry["tag"]), tuple(map(str, entry["parts"])), dict(entry["meta"]))
                for name, entry in value.items()
            }
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FormatError(
                f'config.json: quantization_config["tensors"] must map names to tag, parts and meta; got {value!r:.200}'
            ) from error
        for name, form in forms.items():
            if not form.parts or not all(part.isidentifier() for part in form.parts):
                raise FormatError(
                    f"config.json: the parts of {name!r} must be identifiers, got {list(form.parts)!r:.200}"
                )
        return cls(forms)


def _candidates(name: str, base_model_prefix: str) -> list[str]:
    if not base_model_prefix:
        return [name]
    return [name, f"{base_model_prefix}.{name}", name.removeprefix(f"{base_model_prefix}.")]
