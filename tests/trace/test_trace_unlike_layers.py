"""Layers that look alike and are not, by what is around them: they are told apart, or the model is captured whole."""

import pytest
import torch
from torch import nn
from torch.export import Dim

from t2n_hf.errors import CaptureError
from t2n_hf.export.config import ExportConfig
from t2n_hf.export.graph import make_graph
from t2n_hf.trace.capture import capture
from t2n_hf.trace.interface import Interface

LAYERS = 6


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.gain = 1.0

    def forward(self, x, does=None):
        x = torch.tanh(self.linear(x)) * self.gain
        return x if does is None else does(x)


class Other(Layer):
    pass


class Stack(nn.Module):
    def __init__(self, walk, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.walk = walk

    def forward(self, x):
        return self.walk(self.layers, x)


def interface(walk, layer=Layer, layers=None, outputs=1):
    module = Stack(walk, layers or [layer() for _ in range(LAYERS)])
    return Interface(
        module=module,
        args=(torch.zeros(5, 4),),
        dynamic_shapes=({0: Dim("S", min=2, max=64)},),
        input_names=("x",),
        output_names=tuple(f"y_{at}" for at in range(outputs)),
        weight_owner=module,
        layers=("layers",),
    )


def text_of(face, mode):
    return make_graph(face, ExportConfig(dtype="f32", capture=mode)).text


def captured_alike(face):
    return text_of(face, "pieces") == text_of(face, "whole")


def chain(layers, x):
    for layer in layers:
        x = layer(x)
    return x


def test_a_switch_that_the_model_turns_between_two_layers():
    switch = {"on": False}

    class Switched(Layer):
        def forward(self, x):
            return super().forward(x) * (3 if switch["on"] else 1)

    def walk(layers, x):
        for at, layer in enumerate(layers):
            switch["on"] = at == 4
            x = layer(x)
        return x

    face = interface(walk, Switched)
    assert captured_alike(face)
    assert len(capture(face, torch.float32, "pieces").pieces) == 2


def test_types_chosen_for_one_call_only():
    def walk(layers, x):
        for at, layer in enumerate(layers):
            with torch.autocast("cpu", torch.bfloat16, enabled=at == 3):
                x = layer(x)
            x = x.float()
        return x

    with pytest.raises(CaptureError, match=r"layers\.3 .*autocast"):
        capture(interface(walk), torch.float32, "pieces")


def test_what_a_model_asks_of_a_length_after_a_layer_when_torch_export_has_to_run_it_again():
    def walk(layers, x):
        for layer in layers:
            x = layer(x)
            if x.shape[0] > 3:
                x = x * 2
        return x

    for mode in ("pieces", "whole"):
        with pytest.raises(CaptureError, match="does not hold at S=2: there `S > 3` is false"):
            capture(interface(walk), torch.float32, mode)


def test_the_class_of_a_layer_as_the_model_sees_it():
    def walk(layers, x):
        for layer in layers:
            x = layer(x) * (2 if isinstance(layer, Other) else 1)
        return x

    assert captured_alike(interface(walk, layers=[Layer(), Other(), Layer(), Other(), Layer(), Other()]))


def sets_an_attribute(layers, x):
    for at, layer in enumerate(layers):
        layer.gain = 1.0 + at
        x = layer(x)
    return x


class Counting(Layer):
    def forward(self, x, counts):
        counts["calls"] += 1
        return super().forward(x) * counts["calls"]


def counts_in_a_dict(layers, x):
    counts = {"calls": 0}
    for layer in layers:
        x = layer(x, counts)
    return x


class GivesAPart(Layer):
    def forward(self, x):
        x = super().forward(x)
        return x, x[:, :2]


class LooksAtItsArgument(Layer):
    def forward(self, x, other):
        return super().forward(x), other[:, :2]


def writes_into_a_part(layers, x):
    for layer in layers:
        x, part = layer(x)
        part.mul_(3.0)
    return x


def writes_into_a_part_of_an_argument(layers, x):
    other = x * 1
    for layer in layers:
        x, part = layer(x, other)
        part.add_(1.0)
    return x + other


def writes_into_an_argument(layers, x):
    other, parts = x * 1, []
    for layer in layers:
        x, part = layer(x, other)
        parts.append(part)
    other.add_(1.0)
    return x + torch.cat(parts[:2], -1)


@pytest.mark.parametrize(
    ("walk", "layer", "reason"),
    [
        (sets_an_attribute, Layer, "the model sets attribute 'gain' of a Layer"),
        (counts_in_a_dict, Counting, "it changes 0 in its argument 'counts' to 1"),
        (writes_into_a_part, GivesAPart, r"the model writes into a tensor that layers\.0 gives or takes"),
        (writes_into_a_part_of_an_argument, LooksAtItsArgument, r"writes into a tensor that layers\.0 gives or takes"),
        (writes_into_an_argument, LooksAtItsArgument, r"writes into a tensor that layers\.0 gives or takes"),
    ],
)
def test_what_stand_ins_would_not_show_is_captured_whole(walk, layer, reason):
    face = interface(walk, layer)
    with pytest.raises(CaptureError, match=reason):
        capture(face, torch.float32, "pieces")
    assert text_of(face, "auto") == text_of(face, "whole")


def test_numbers_that_a_layer_gives_are_its_own():
    class Numbered(Layer):
        def __init__(self, number):
            super().__init__()
            self.numbers = [number]

        def forward(self, x):
            return super().forward(x), next(iter(self.numbers))

    def walk(layers, x):
        for layer in layers:
            layer.numbers[0] += 1
            x, number = layer(x)
            x = x * number
            layer.numbers[0] -= 1
        return x

    layers = [Numbered(1) for _ in range(LAYERS)]
    layers[4].numbers = layers[5].numbers = layers[3].numbers
    face = interface(walk, layers=layers)
    assert captured_alike(face)


@pytest.mark.filterwarnings("ignore:The tensor attributes .* were assigned")
def test_lists_and_dicts_that_parts_share_are_shared_after_a_capture():
    log, options = [], {"factor": 2}

    class Logging(Layer):
        def __init__(self):
            super().__init__()
            self.log, self.options = log, options

        def forward(self, x):
            self.log.append(x)
            return super().forward(x) * self.options["factor"]

    face = interface(chain, Logging)
    capture(face, torch.float32, "whole")
    assert all(layer.log is log and layer.options is options for layer in face.module.layers)
    assert log == []
