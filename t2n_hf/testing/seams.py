"""What is asked of emitters and rewrites that a distribution declares: found by their names, and right in tract."""
# ruff: noqa: D102 - names of tests are sentences

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from t2n_hf.export import export_nnef
from t2n_hf.ops.plugins import OPS_GROUP
from t2n_hf.ops.table import EMITTERS
from t2n_hf.registry import declared_function
from t2n_hf.trace.rewrites import REWRITES_GROUP, rewrites_used
from t2n_hf.tract.runner import TractRunner

__all__ = ["EmitterConformance", "RewriteConformance", "SeamCase"]

_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class SeamCase:
    """A module and how it is called.

    Attributes:
        module: uses the operator, or is (or has) the module that is rewritten.
        args: tensors, at the lengths that are captured.
        dynamic_shapes: which lengths are free, as `torch.export.export` takes it.
        others: further arguments, at lengths that are not captured.
    """

    module: nn.Module
    args: tuple[torch.Tensor, ...]
    dynamic_shapes: Any = None
    others: Sequence[tuple[torch.Tensor, ...]] = ()


class _Conformance(ABC):
    """Tests that are the same for both. `max_relative_error` is what tract's values may differ by from PyTorch's."""

    max_relative_error: ClassVar[float] = 1e-5

    @abstractmethod
    def cases(self) -> Mapping[str, SeamCase]:
        """Name -> what to export and run."""

    def test_tract_computes_what_pytorch_does_at_all_lengths(self, tmp_path: Path) -> None:
        for number, (name, case) in enumerate(self.cases().items()):
            report = export_nnef(
                case.module,
                tmp_path / str(number),
                example_args=case.args,
                dynamic_shapes=case.dynamic_shapes,
                check=False,
            )
            with TractRunner(report.archive, timeout_s=_TIMEOUT_S) as runner:
                for args in (case.args, *case.others):
                    inputs = dict(zip(runner.inputs, (tensor.numpy() for tensor in args), strict=True))
                    got = list(runner.run(inputs).values())
                    _assert_close(got, _results(case.module, args), self.max_relative_error, name)


class EmitterConformance(_Conformance):
    """Tests of an emitter.

        class TestSnake(EmitterConformance):
            overload = "my_library.snake.default"

            def cases(self):
                return {"free lengths": SeamCase(Snake(6), (torch.randn(2, 5, 6),), ..., [(torch.randn(1, 9, 6),)])}

    `overload`: the name that the emitter is declared under. Each case's module calls that operator.
    """

    overload: ClassVar[str]

    def test_the_operator_has_one_emitter(self) -> None:
        assert declared_function(OPS_GROUP, self.overload) is not None
        assert self.overload not in map(str, EMITTERS.overloads()), "t2n_hf has an emitter of this operator itself"

    def test_each_case_calls_the_operator(self) -> None:
        for name, case in self.cases().items():
            graph = torch.export.export(case.module.eval(), case.args, dynamic_shapes=case.dynamic_shapes).graph
            assert self.overload in {str(node.target) for node in graph.nodes}, name


class RewriteConformance(_Conformance):
    """Tests of a rewrite: as `EmitterConformance`, for modules of one class.

    `module_class`: the class that the rewrite is declared for.
    """

    module_class: ClassVar[type[nn.Module]]

    def test_the_class_has_one_rewrite(self) -> None:
        name = f"{self.module_class.__module__}.{self.module_class.__qualname__}"
        assert declared_function(REWRITES_GROUP, name) is not None

    def test_the_rewrite_computes_what_the_module_does_and_goes_away(self) -> None:
        for name, case in self.cases().items():
            assert any(type(module) is self.module_class for module in case.module.modules()), name
            before = [dict(vars(module)) for module in case.module.eval().modules()]
            for args in (case.args, *case.others):
                with rewrites_used(case.module):
                    rewritten = _results(case.module, args)
                _assert_close(rewritten, _results(case.module, args), self.max_relative_error, name)
            assert [dict(vars(module)) for module in case.module.modules()] == before, name


def _results(module: nn.Module, args: tuple[torch.Tensor, ...]) -> list[np.ndarray]:
    with torch.no_grad():
        return [tensor.numpy() for tensor in pytree.tree_leaves(module.eval()(*args))]


def _assert_close(got: Sequence[np.ndarray], want: Sequence[np.ndarray], tolerance: float, name: str) -> None:
    assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in want], name
    for mine, theirs in zip(got, want, strict=True):
        scale = float(np.abs(theirs).max(initial=0)) or 1.0
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=tolerance * scale, err_msg=name)
