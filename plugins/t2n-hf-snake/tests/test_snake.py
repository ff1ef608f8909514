"""The library's operator and layer, exported: t2n-hf's conformance suites on what this distribution declares."""

import pytest
import torch
from t2n_hf_snake import Fading, Snake

from t2n_hf.testing import EmitterConformance, RewriteConformance, SeamCase


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


class TestSnake(EmitterConformance):
    overload = "t2n_hf_snake.snake.default"

    def cases(self):
        free = ({0: torch.export.Dim("B", max=64), 1: torch.export.Dim("S", max=4096)},)
        return {
            "free lengths": SeamCase(Snake(6), (numbers(2, 5, 6),), free, [(numbers(1, 9, 6),), (numbers(3, 1, 6),)]),
            "fixed lengths": SeamCase(Snake(3), (numbers(4, 3),)),
        }


class TestFading(RewriteConformance):
    module_class = Fading

    def cases(self):
        free = ({0: torch.export.Dim("B", max=64), 1: torch.export.Dim("S", max=4096)},)
        return {
            "free lengths": SeamCase(Fading(4), (numbers(2, 5, 4),), free, [(numbers(1, 9, 4),), (numbers(3, 2, 4),)])
        }


def test_the_layer_without_its_rewrite_has_one_length():
    free = ({1: torch.export.Dim("S", max=4096)},)
    with pytest.raises(Exception, match="5"):
        torch.export.export(Fading(4), (numbers(2, 5, 4),), dynamic_shapes=free)
