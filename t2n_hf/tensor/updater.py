"""Replacing tensors of a module in every place where they are registered, so that ties stay ties."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import nn

from t2n_hf.errors import ConfigError

__all__ = ["ModTensorUpdater", "Registration"]


@dataclass(frozen=True)
class Registration:
    """One place: `module` has a tensor as parameter or buffer `attribute`; `name` is its dotted name in the model."""

    module: nn.Module
    attribute: str
    name: str

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter, not a buffer."""
        return self.attribute in self.module._parameters

    def put(self, tensor: torch.Tensor) -> None:
        """Register `tensor` here. What was registered must have been of the same sort (parameter or buffer)."""
        slots = self.module._parameters if self.is_parameter else self.module._buffers
        slots[self.attribute] = tensor  # type: ignore[assignment]


@final
class ModTensorUpdater:
    """Where each parameter and buffer of `model` is registered, when this is made."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors: dict[int, torch.Tensor] = {}
        self._places: dict[int, list[Registration]] = {}
        for path, module in model.named_modules():
            for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    name = f"{path}.{attribute}" if path else attribute
                    self._tensors[id(tensor)] = tensor
                    self._places.setdefault(id(tensor), []).append(Registration(module, attribute, name))

    def __iter__(self) -> Iterator[tuple[torch.Tensor, list[Registration]]]:
        """Give each tensor once, with its places; the first one has its canonical name."""
        return iter([(self._tensors[key], places) for key, places in self._places.items()])

    def places_of(self, tensor: torch.Tensor) -> list[Registration]:
        """Say where `tensor`, this very object, is registered. Raises ConfigError when it is not."""
        if id(tensor) not in self._places:
            raise ConfigError(
                f"a tensor of shape {tuple(tensor.shape)} is neither a parameter nor a buffer of the model"
            )
        return self._places[id(tensor)]

    def update_by_ref(self, ref: torch.Tensor, new_tensor: torch.Tensor) -> None:
        """Put `new_tensor` wherever `ref`, this very object, is. Raises ConfigError when it is nowhere."""
        places = self.places_of(ref)
        if any(place.is_parameter for place in places) and not isinstance(new_tensor, nn.Parameter):
            new_tensor._is_param = True  # what makes a subclass a Parameter to torch
        for place in places:
            place.put(new_tensor)
        del self._places[id(ref)], self._tensors[id(ref)]
        self._places[id(new_tensor)], self._tensors[id(new_tensor)] = places, new_tensor

    def update_all(self, change: Callable[[torch.Tensor, str], torch.Tensor]) -> None:
        """Replace each tensor by `change(tensor, canonical name)`, where that gives another object."""
        for tensor, places in self:
            new = change(tensor, places[0].name)
            if new is not tensor:
                self.update_by_ref(tensor, new)
