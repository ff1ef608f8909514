"""What is captured of a model: a module with example arguments, names of its inputs and outputs, its free lengths."""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from t2n_hf.errors import ConfigError

__all__ = ["Interface"]


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A module as it is to be exported.

    Attributes:
        module: called as `module(*args, **kwargs)`; returns tensors in any pytree.
        args: example positional arguments, pytrees of tensors (plain or fake; values are never read).
        kwargs: example keyword arguments.
        dynamic_shapes: as for `torch.export.export`, a tuple in the order of `args` followed by `kwargs` or a mapping
            by parameter name, or None. The name of a `torch.export.Dim` becomes the symbol of the length.
        input_names: one name per tensor of `(args, kwargs)`, in pytree order.
        output_names: one name per tensor of the result, in pytree order.
        asserts: facts about the symbols, each a line of `tract_assert` ("P >= 0", "tg: S==1").
        layers: names, relative to `module`, of the `nn.ModuleList`s whose children may be captured one kind at a time.
        task: what the module does ("text-generation"); free text here.
        weight_owner: module whose parameter names are the names of the weights (the model, in `module` or equal to it).
        prefix: name of `weight_owner` inside `module`; "" when they are one.
        precise: names of inputs that have no less than f32 in any archive: states, which a step may change by so little
            that f16 would not see it.
        context: makes a context manager that the capture enters around everything it runs (the model's own switches).
        extra: facts for the exporter and its check (maximal context, ...); not read by the capture.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    dynamic_shapes: Any = None
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    asserts: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    task: str = ""
    weight_owner: nn.Module
    prefix: str = ""
    precise: frozenset[str] = frozenset()
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check what can be checked without a capture. Raises ConfigError."""
        if self.prefix and self.module.get_submodule(self.prefix) is not self.weight_owner:
            raise ConfigError(f"prefix {self.prefix!r} of {type(self.module).__name__} is not its weight_owner")
        if not self.prefix and self.module is not self.weight_owner:
            raise ConfigError("weight_owner is not the module itself: give the prefix it has inside the module")
        names = [*self.input_names, *self.output_names]
        repeated = sorted(name for name, count in Counter(names).items() if count > 1)
        if repeated:
            raise ConfigError(f"input and output names must differ from each other; repeated: {', '.join(repeated)}")
