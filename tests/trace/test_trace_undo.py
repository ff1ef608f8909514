"""Each attempt to capture a module begins with the module as it was given, and leaves it so."""

import pytest
import torch
from torch import nn
from torch.export import Dim

from t2n_hf.errors import CaptureError
from t2n_hf.trace.capture import capture
from t2n_hf.trace.interface import Interface
from t2n_hf.trace.undo import changes_undone

LONG = 40


class Blocks(nn.Module):
    def forward(self, x):
        return x.cumsum(1)


class Whole(nn.Module):
    def forward(self, x):
        return x - x.mean(1, keepdim=True)


class SwitchesByAttribute(nn.Module):
    """As BigBird: a short text turns sparse attention off, and it stays off."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = "blocks"

    def forward(self, x):
        if self.kind == "blocks" and x.shape[1] < LONG:
            self.kind = "whole"
        return x.cumsum(1) if self.kind == "blocks" else x - x.mean(1, keepdim=True)


class SwitchesByPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Blocks()

    def forward(self, x):
        if isinstance(self.attention, Blocks) and x.shape[1] < LONG:
            self.attention = Whole()
        return self.attention(x)


class SwitchesByHook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Blocks()

    def forward(self, x):
        if not self.attention._forward_hooks and x.shape[1] < LONG:
            self.attention.register_forward_hook(lambda _module, args, _result: args[0] - args[0].mean(1, keepdim=True))
        return self.attention(x)


KINDS = [SwitchesByAttribute, SwitchesByPart, SwitchesByHook]


def interface(module: nn.Module) -> Interface:
    lengths = {0: Dim("B", min=1), 1: Dim("L", min=2, max=200)}
    x = torch.zeros(2, 9, 4)
    return Interface(
        module=module,
        weight_owner=module,
        args=(x,),
        dynamic_shapes=(lengths,),
        input_names=("x",),
        output_names=("y",),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["whole", "auto"])
def test_what_a_first_attempt_sets_does_not_take_the_condition_from_the_second(kind, mode: str):
    module = kind().eval()
    with pytest.raises(CaptureError, match="L"):
        capture(interface(module), torch.float32, mode)
    # It is as it was: a long text is still what it was at first.
    x = torch.randn(1, 60, 4)
    assert torch.equal(module(x), x.cumsum(1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("refused", [False, True])
def test_attributes_parts_and_hooks_are_as_before_after_any_exit(kind, refused: bool):
    module, short = kind().eval(), torch.randn(1, 5, 4)
    before = [(part, dict(vars(part)), dict(part._modules), dict(part._forward_hooks)) for part in module.modules()]
    try:
        with changes_undone(list(module.modules())) as undo:
            for _ in range(2):
                module(short)
                undo()
            assert torch.equal(module(torch.ones(1, 60, 4)), torch.ones(1, 60, 4).cumsum(1))
            module(short)
            module.added = 1
            if refused:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert refused
    assert list(module.modules()) == [part for part, *_ in before]
    for part, own, parts, hooks in before:
        assert list(vars(part).items()) == list(own.items())
        assert list(part._modules.items()) == list(parts.items())
        assert list(part._forward_hooks.items()) == list(hooks.items())
