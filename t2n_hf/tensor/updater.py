"""Replacing tensors of a module in every place where they are, so that ties stay ties."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import final

import torch
from torch import nn

from t2n_hf.errors import ConfigError

__all__ = ["ModTensorUpdater", "Registration", "TensorHoldKind"]


class TensorHoldKind(str, Enum):
    """How a module holds a tensor: as a parameter, as a buffer, or as a plain attribute."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    UNREGISTRED = "unregistred"


@dataclass(frozen=True)
class Registration:
    """One place: `module` has a tensor as `attribute`; `name` is its dotted name in the model."""

    module: nn.Module
    attribute: str
    name: str
    kind: TensorHoldKind

    def put(self, tensor: torch.Tensor) -> None:
        """Let `module` hold `tensor` here, as what was held."""
        if self.kind is TensorHoldKind.PARAMETER:
            self.module._parameters[self.attribute] = tensor  # type: ignore[assignment]
        elif self.kind is TensorHoldKind.BUFFER:
            self.module._buffers[self.attribute] = tensor
        else:
            self.module.__dict__[self.attribute] = tensor

    def now(self) -> torch.Tensor:
        """Give the tensor that is here."""
        tensor: torch.Tensor = getattr(self.module, self.attribute)
        return tensor


def _held(module: nn.Module, buffers: bool, attributes: bool) -> Iterator[tuple[str, torch.Tensor, TensorHoldKind]]:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter, TensorHoldKind.PARAMETER
    for name, buffer in module._buffers.items() if buffers else ():
        if buffer is not None:
            yield name, buffer, TensorHoldKind.BUFFER
    for name, value in module.__dict__.items() if attributes else ():
        if isinstance(value, torch.Tensor):
            yield name, value, TensorHoldKind.UNREGISTRED


@final
class ModTensorUpdater:
    """Update parameters, buffers and plain tensor attributes of a model without breaking what is shared between them.

    An example of what is shared is the table of a language model that is its first embedding and its last projection.
    What is where is found when this is made, and kept up to date by what this object replaces.

    `add_parameter_if_unset`: a plain tensor that replaces a parameter is made one (else refused with ConfigError).
    `add_buffers` and `add_unregistred_tensor`: buffers, and tensors that are plain attributes, are in scope as well.
    `disable_requires_grad`: nothing requires a gradient until `restore_require_grad` is called.
    """

    def __init__(
        self,
        model: nn.Module,
        add_parameter_if_unset: bool = True,
        add_buffers: bool = False,
        add_unregistred_tensor: bool = False,
        disable_requires_grad: bool = False,
    ) -> None:
        self.model = model
        self.add_parameter_if_unset = add_parameter_if_unset
        self._tensors: dict[int, torch.Tensor] = {}
        self._places: dict[int, list[Registration]] = {}
        self._by_name: dict[str, Registration] = {}
        self._gradless: list[str] = []
        for path, module in model.named_modules(remove_duplicate=False):
            for attribute, tensor, kind in _held(module, add_buffers, add_unregistred_tensor):
                place = Registration(module, attribute, f"{path}.{attribute}" if path else attribute, kind)
                self._tensors[id(tensor)] = tensor
                self._places.setdefault(id(tensor), []).append(place)
                self._by_name[place.name] = place
                if disable_requires_grad and tensor.requires_grad and kind is TensorHoldKind.PARAMETER:
                    tensor.requires_grad_(False)
                    self._gradless.append(place.name)

    # ---- what is where --------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[tuple[torch.Tensor, list[Registration]]]:
        """Give each tensor once, with its places; the first one has its canonical name."""
        return iter([(self._tensors[key], list(places)) for key, places in self._places.items()])

    def places_of(self, tensor: torch.Tensor) -> list[Registration]:
        """Say where `tensor`, this very object, is. Raises ConfigError when it is nowhere."""
        if id(tensor) not in self._places:
            raise ConfigError(
                f"a tensor of shape {tuple(tensor.shape)} is neither a parameter nor a buffer of the model that this "
                "updater knows of (buffers need add_buffers=True, plain attributes add_unregistred_tensor=True)"
            )
        return self._places[id(tensor)]

    def get_by_name(self, name: str) -> torch.Tensor:
        """Get a tensor by one of its dotted names. Raises ConfigError for an unknown one."""
        return self._place(name).now()

    @property
    def available_names(self) -> list[str]:
        """Every name in scope; a tied tensor has several."""
        return [place.name for places in self._places.values() for place in places]

    @property
    def id_to_names(self) -> dict[int, frozenset[str]]:
        """All names of each tensor, by its `id()`."""
        return {key: frozenset(place.name for place in places) for key, places in self._places.items()}

    @property
    def name_to_id(self) -> dict[str, int]:
        """The `id()` of the tensor that is held under each name."""
        return {place.name: key for key, places in self._places.items() for place in places}

    @property
    def id_to_kind(self) -> dict[int, TensorHoldKind]:
        """How each tensor is held, by its `id()`."""
        return {key: places[0].kind for key, places in self._places.items()}

    @property
    def id_to_modules(self) -> dict[int, list[nn.Module]]:
        """The modules that hold each tensor, by its `id()`."""
        return {key: [place.module for place in places] for key, places in self._places.items()}

    @property
    def name_to_parent_module(self) -> dict[str, nn.Module]:
        """The module that holds each name."""
        return {name: place.module for name, place in self._by_name.items()}

    @staticmethod
    def split_param_name(name: str) -> tuple[str, str]:
        """Split a dotted name into that of the module ("" for the model itself) and that of the tensor in it."""
        module, _, local = name.rpartition(".")
        return module, local

    def _place(self, name: str) -> Registration:
        place = self._by_name.get(name)
        if place is None:
            known = ", ".join(sorted(self._by_name)[:8]) or "none"
            raise ConfigError(
                f"no tensor of the model is called {name!r}; {len(self._by_name)} are known: {known}, ..."
            )
        return place

    # ---- replacing ------------------------------------------------------------------------------------------------

    def update_by_ref(
        self, ref: torch.Tensor, new_tensor: torch.Tensor, enforce_tensor_consistency: bool = True
    ) -> torch.Tensor:
        """Put `new_tensor` wherever `ref`, this very object, is; give it back as it is registered now.

        Raises ConfigError when `ref` is nowhere, and with `enforce_tensor_consistency` when device, dtype or shape
        differ.
        """
        return self._replace(ref, self.places_of(ref), new_tensor, enforce_tensor_consistency)

    def update_by_name(
        self,
        name: str,
        new_tensor: torch.Tensor,
        tie_replacements: bool = True,
        enforce_tensor_consistency: bool = True,
    ) -> torch.Tensor:
        """Replace the tensor called `name`, and what is tied to it (`tie_replacements=False`: here alone).

        Gives the new tensor back as it is registered now. Raises ConfigError as `update_by_ref` does.
        """
        place = self._place(name)
        old = place.now()
        places = self.places_of(old)
        if not tie_replacements:  # a module that is registered under two names is one place
            places = [p for p in places if (p.module, p.attribute) == (place.module, place.attribute)]
        return self._replace(old, places, new_tensor, enforce_tensor_consistency)

    def update_all(self, change: Callable[[torch.Tensor, str], torch.Tensor]) -> None:
        """Replace each tensor by `change(tensor, canonical name)`, where that gives another object."""
        for tensor, places in self:
            new = change(tensor, places[0].name)
            if new is not tensor:
                self.update_by_ref(tensor, new, enforce_tensor_consistency=False)

    def restore_require_grad(self) -> None:
        """Let what `disable_requires_grad` changed require gradients again, or what has taken its place since."""
        for name in self._gradless:
            self._place(name).now().requires_grad_(True)

    def _replace(
        self, old: torch.Tensor, places: list[Registration], new: torch.Tensor, consistent: bool
    ) -> torch.Tensor:
        if consistent:
            _check_same(old, new, places[0].name)
        new = self._as_held(old, places, new)
        for place in places:
            place.put(new)
        left = [place for place in self._places[id(old)] if place not in places]
        del self._places[id(old)], self._tensors[id(old)]
        if left:
            self._places[id(old)], self._tensors[id(old)] = left, old
        self._places[id(new)] = [*self._places.get(id(new), ()), *places]
        self._tensors[id(new)] = new
        return new

    def _as_held(self, old: torch.Tensor, places: list[Registration], new: torch.Tensor) -> torch.Tensor:
        if not any(place.kind is TensorHoldKind.PARAMETER for place in places):
            return new
        if not isinstance(new, nn.Parameter):
            if not self.add_parameter_if_unset:
                raise ConfigError(f"{places[0].name} is a parameter, and so has to be what replaces it")
            if type(new) is torch.Tensor:
                new = nn.Parameter(new, requires_grad=False)
            else:
                new._is_param = True  # what makes a subclass a Parameter to torch
        # A packed weight has no gradient, and one that does not train stays so.
        if old.requires_grad and new.is_floating_point() and type(new) is nn.Parameter:
            new.requires_grad_(True)
        return new


def _check_same(old: torch.Tensor, new: torch.Tensor, name: str) -> None:
    for what in ("device", "dtype", "shape"):
        mine, other = getattr(old, what), getattr(new, what)
        if mine != other:
            raise ConfigError(
                f"{name} has {what} {mine}, what should replace it has {other}; "
                "give enforce_tensor_consistency=False if that is meant"
            )
