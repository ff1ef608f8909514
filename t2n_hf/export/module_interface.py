"""The Interface of any `nn.Module`, from examples given as for `torch.export.export`."""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from t2n_hf.errors import CaptureError, ConfigError
from t2n_hf.hf.capturable.rwkv import unscaled_rwkv
from t2n_hf.hf.tasks.settings import capture_settings
from t2n_hf.nnef.names import Namer, identifier
from t2n_hf.trace.automatic_types import AutomaticTypesError
from t2n_hf.trace.capture_dispatch import result_by_dispatch
from t2n_hf.trace.interface import Interface
from t2n_hf.trace.shapes import fake_run, own_line
from t2n_hf.trace.swap import plain_tensors_kept, tensors_of, tensors_replaced
from t2n_hf.trace.undo import changes_undone
from t2n_hf.trace.walk import modules_of

__all__ = ["evaluation_mode", "module_interface", "run_on_shapes"]


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put `module` in evaluation mode; every sub-module's own mode comes back after any exit, and so do its tensors."""
    with ExitStack() as stack:
        stack.enter_context(plain_tensors_kept(module))
        for child in module.modules():
            stack.callback(setattr, child, "training", child.training)
        module.eval()
        stack.enter_context(unscaled_rwkv(module))
        yield


def module_interface(
    module: nn.Module,
    *,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,  # noqa: ANN401 - what torch.export.export takes
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> Interface:
    """Describe how `module`, called as `module(*args, **kwargs)`, is exported.

    Names that are not given are made from the parameters of `forward` and the keys of its result. Each layer of an
    `nn.ModuleList` may be captured once per kind. Raises ConfigError when names and tensors differ in number,
    CaptureError when the module does not run on its examples.
    """
    args, kwargs = tuple(args), dict(kwargs or {})
    inputs = _names_of_inputs(module, args, kwargs) if input_names is None else list(input_names)
    _check_count("input_names", inputs, _tensors((args, kwargs)))
    outputs = _result_names(module, args, kwargs, set(inputs)) if output_names is None else list(output_names)
    return Interface(
        module=module,
        args=args,
        kwargs=kwargs,
        dynamic_shapes=dynamic_shapes,
        input_names=tuple(inputs),
        output_names=tuple(outputs),
        layers=tuple(_layer_lists(module)),
        task="",
        weight_owner=module,
        context=lambda: _capturable(module),
    )


@contextmanager
def _capturable(module: nn.Module) -> Iterator[None]:
    """Evaluation mode, and what models of transformers inside of `module` need to be captured."""
    with ExitStack() as stack:
        stack.enter_context(evaluation_mode(module))
        models = [name for name, child in module.named_modules() if isinstance(child, PreTrainedModel)]
        for name in models:
            if not any(name != outer and name.startswith(f"{outer}." if outer else "") for outer in models):
                stack.enter_context(capture_settings(module.get_submodule(name)))  # type: ignore[arg-type]
        yield


def _tensors(tree: Any) -> list[torch.Tensor]:  # noqa: ANN401 - a pytree
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _check_count(option: str, names: list[str], tensors: list[torch.Tensor]) -> None:
    if len(names) != len(tensors):
        raise ConfigError(
            f"{option} has {len(names)} names ({', '.join(names)}); the examples hold {len(tensors)} tensors"
        )


def _names_of_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    try:
        signature = inspect.signature(module.forward)
    except ValueError as error:
        raise ConfigError(
            f"{type(module).__name__} is not a module of Python code, which is what is captured"
        ) from error
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(f"the examples do not fit forward{signature}: {error}") from error
    # Keyword arguments come last, whatever their place in the signature: that is pytree's order of (args, kwargs).
    collected = {p.name for p in signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD}
    positional = [name for name in bound.arguments if name not in kwargs and name not in collected]
    values = [*((name, bound.arguments[name]) for name in positional), *kwargs.items()]
    return _unique([name for base, value in values for name in _leaf_names(base, value)])


def _unique(names: list[str], taken: Iterable[str] = ()) -> list[str]:
    namer = Namer(taken)
    return [namer.unique(name) for name in names]


def _leaf_names(base: str, value: Any) -> list[str]:  # noqa: ANN401 - a pytree
    paths = [path for path, leaf in pytree.tree_flatten_with_path(value)[0] if isinstance(leaf, torch.Tensor)]
    return [identifier("_".join([base, *(_key_text(key) for key in path)])) for path in paths]


def _key_text(key: Any) -> str:  # noqa: ANN401 - one of pytree's keys
    return str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))))


def _result_names(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], taken: set[str]) -> list[str]:
    names = _leaf_names("output", _result_shapes(module, args, kwargs))
    return _unique([f"{name}_out" if name in taken else name for name in names], taken)


def _result_shapes(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - a pytree
    """Run `module` on shapes alone: no weight is read, and nothing that it notes is kept for the next run."""
    try:
        with changes_undone(modules_of(module)):
            return run_on_shapes(module, args, kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        refusal = CaptureError(
            f"forward of {type(module).__name__} reads a tensor's value (item(), tolist(), an `if`) at "
            f"{own_line(error)}; what it decides would be fixed in the archive. Compute it before, as a "
            "plain attribute of the module, or choose with torch.where"
        )
        try:  # the value may be one that no weight has a part in
            with evaluation_mode(module):
                return result_by_dispatch(module, args, kwargs, _float_dtype(module))
        except AutomaticTypesError:
            raise
        except CaptureError:
            raise refusal from error
    except Exception as error:
        raise CaptureError(f"{type(module).__name__} does not run on its examples: {error}") from error


def run_on_shapes(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - a pytree
    """The result of a module on tensors without values, like its own and these arguments: fake tensors."""
    with fake_run(), _capturable(module):

        def fake(value: Any) -> Any:  # noqa: ANN401 - any leaf
            return torch.empty(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value

        fakes: dict[int, Any] = {}
        stand_ins = {name: fakes.setdefault(id(value), fake(value)) for name, value in tensors_of(module).items()}
        with tensors_replaced(module, stand_ins):
            return module(*pytree.tree_map(fake, args), **pytree.tree_map(fake, kwargs))


def _float_dtype(module: nn.Module) -> torch.dtype:
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)


def _layer_lists(module: nn.Module) -> list[str]:
    """Names of the outermost lists of layers."""
    found: list[str] = []
    for name, child in module.named_modules():
        if name and isinstance(child, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in found):
            found.append(name)
    return found
