"""A module run on shapes alone: no weight is read."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch._export.utils import _compiling_state_context
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from t2n_hf.errors import CaptureError, T2NError
from t2n_hf.trace.swap import FunctionReplaced, plain_tensors_kept, tensors_of, tensors_replaced
from t2n_hf.trace.undo import changes_undone
from t2n_hf.trace.walk import modules_of

__all__ = ["fake_run", "own_line", "shapes_only"]


@contextmanager
def fake_run() -> Iterator[None]:
    """Let tensors that are made inside the block have no values.

    Code that keeps results for later calls does not while a graph is captured, so it is told that one is: what it kept
    of this would be given to the user's next call. What it only checks holds.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), _compiling_state_context(), _checks_hold():
        yield


def _checks_hold() -> FunctionReplaced:
    """Answer `torch._check_tensor_all`, which asks for a value that nothing depends on but an error."""
    return FunctionReplaced(torch.Tensor._is_all_true, lambda *_args, **_kwargs: torch.tensor(True))


@contextmanager
def shapes_only(module: nn.Module) -> Iterator[None]:
    """Let `module` be run on tensors made inside the block: everything in it has a shape and a type, and no values.

    The module is as it was after any exit: what it notes of this run is not what the next one is to find. Raises
    CaptureError where it asks for a value, or fails.
    """
    with changes_undone(modules_of(module)), fake_run(), plain_tensors_kept(module):
        fakes: dict[int, torch.Tensor] = {}
        stand_ins = {
            name: fakes.setdefault(id(tensor), torch.empty(tuple(tensor.shape), dtype=tensor.dtype))
            for name, tensor in tensors_of(module).items()
        }
        try:
            with tensors_replaced(module, stand_ins):
                yield
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise CaptureError(
                f"forward of {type(module).__name__} reads a tensor's value (item(), tolist(), nonzero(), an `if`) at "
                f"{own_line(error)}; what it decides would be fixed in the archive. Export the model with example_args "
                "of its own and capture='dispatch' if it may be"
            ) from error
        except T2NError:
            raise
        except Exception as error:
            raise CaptureError(
                f"{type(module).__name__} fails when it is called as its task says: {type(error).__name__}: {error} "
                f"(at {own_line(error)}). Export the model with example_args of its own"
            ) from error


def own_line(error: BaseException) -> str:
    """Say which line of code outside of torch, and of what stands in for its functions, an error came from."""
    found = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in found if "/torch/" not in frame.filename and frame.name != "__torch_function__"]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else "a line that is not known"
