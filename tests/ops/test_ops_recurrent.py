"""Recurrent layers and cells, against PyTorch, at lengths that were not traced."""

import pytest
import torch
from op_harness import Case, build_and_run, compare, floats, seeded
from torch import nn

# torch says so whenever it runs one.
PROJECTED = "ignore:LSTM with projections is not supported with oneDNN"
pytestmark = [pytest.mark.tract, pytest.mark.filterwarnings(PROJECTED)]

SEQUENCE, FREE = floats(2, 5, 4), {(0, 0): "B", (0, 1): "S"}
# The last one again: nothing may stay from run to run.
OTHERS = ((floats(1, 1, 4, seed=1),), (floats(3, 8, 4, seed=2),), (SEQUENCE,))


class Started(nn.Module):
    """A layer with its first states as inputs."""

    def __init__(self, layer, count):
        super().__init__()
        self.layer, self.count = layer, count

    def forward(self, x, *states):
        return self.layer(x, states if self.count > 1 else states[0])


HALF = seeded(nn.LSTM(4, 3, batch_first=True)).half()


def layer(name, module, **options):
    return Case(name, seeded(module), (SEQUENCE,), FREE, OTHERS, 1e-5, **options)


def plain(name, module, *inputs, lengths=None, others=()):
    return Case(name, seeded(module), inputs, lengths or {}, others, 1e-5)


CASES = [
    layer("lstm", nn.LSTM(4, 3, batch_first=True)),
    layer("lstm_without_bias", nn.LSTM(4, 3, bias=False, batch_first=True)),
    layer("lstm_of_two_layers_both_ways", nn.LSTM(4, 3, num_layers=2, bidirectional=True, batch_first=True)),
    layer("lstm_projected", nn.LSTM(4, 5, proj_size=3, num_layers=2, batch_first=True)),
    layer("lstm_projected_without_bias", nn.LSTM(4, 5, proj_size=3, bias=False, bidirectional=True, batch_first=True)),
    layer("gru", nn.GRU(4, 3, batch_first=True)),
    layer("gru_without_bias", nn.GRU(4, 3, bias=False, batch_first=True)),
    layer("gru_of_two_layers_both_ways", nn.GRU(4, 3, num_layers=2, bidirectional=True, batch_first=True)),
    layer("rnn_tanh", nn.RNN(4, 3, batch_first=True)),
    layer("rnn_relu_both_ways", nn.RNN(4, 3, nonlinearity="relu", bidirectional=True, batch_first=True)),
    layer("lstm_along_the_first_axis", nn.LSTM(4, 3)),
    Case("lstm_in_half_precision", HALF, (SEQUENCE.half(),), FREE, (), 3e-3, torch.float16),
    plain("lstm_fixed", nn.LSTM(4, 3), SEQUENCE),
    plain("lstm_of_one_step", nn.LSTM(4, 3, bidirectional=True), SEQUENCE[:1]),
    plain("gru_without_batch", nn.GRU(4, 3), floats(6, 4), lengths={(0, 0): "S"}, others=((floats(2, 4),),)),
    plain("lstm_started", Started(nn.LSTM(4, 3), 2), SEQUENCE, floats(1, 5, 3, seed=1), floats(1, 5, 3, seed=2)),
    plain(
        "gru_started",
        Started(nn.GRU(4, 3, num_layers=2), 1),
        SEQUENCE,
        floats(2, 5, 3, seed=1),
        lengths={(0, 0): "S"},
        others=((floats(1, 5, 4), floats(2, 5, 3)),),
    ),
    plain("lstm_cell", Started(nn.LSTMCell(4, 3), 2), floats(5, 4), floats(5, 3), floats(5, 3, seed=1)),
    plain("gru_cell", Started(nn.GRUCell(4, 3), 1), floats(5, 4), floats(5, 3)),
    plain("rnn_cell", Started(nn.RNNCell(4, 3), 1), floats(5, 4), floats(5, 3)),
    plain("rnn_cell_relu", Started(nn.RNNCell(4, 3, nonlinearity="relu", bias=False), 1), floats(5, 4), floats(5, 3)),
]


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    return build_and_run(CASES, tmp_path_factory.mktemp("recurrent"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_torch(case, archives):
    compare(case, archives / case.name)
