"""Constants repeated to a free length, and reshapes around products: what tract must not move too far."""

import pytest
import torch
from op_harness import Case, build_and_run, compare, floats, seeded
from torch import nn

pytestmark = pytest.mark.tract

WINDOWS, FREE = floats(2, 8, 8, 4), {(0, 0): "B"}
OTHERS = ((floats(1, 8, 8, 4, seed=1),), (floats(5, 8, 8, 4, seed=2),))


class Queries(nn.Module):
    """Learnt queries, one set for each element of the batch, projected and joined with what was given."""

    def __init__(self, repeat):
        super().__init__()
        self.queries, self.project = nn.Parameter(torch.zeros(1, 3, 4)), nn.Linear(4, 4)
        self.repeat = repeat

    def forward(self, x):
        batch = x.shape[0]
        queries = self.queries.repeat(batch, 1, 1) if self.repeat else self.queries.expand(batch, -1, -1)
        rows = self.project(queries)
        return torch.cat([x.flatten(1, 2), rows], 1), rows, rows.sum(0)


class Pooling(nn.Module):
    """A learnt query that attends to all positions: heads are split off the batch and joined again."""

    def __init__(self):
        super().__init__()
        self.probe, self.attention = nn.Parameter(torch.zeros(1, 1, 4)), nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        rows = x.flatten(1, 2)
        return self.attention(self.probe.repeat(x.shape[0], 1, 1), rows, rows)[0]


class Began(nn.Module):
    """Queries that begin as zeros with learnt places, as decoders of detection have them."""

    def __init__(self):
        super().__init__()
        self.places, self.value, self.query = nn.Parameter(torch.zeros(3, 4)), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        places = self.places.unsqueeze(0).repeat(x.shape[0], 1, 1)
        start = torch.zeros_like(places)
        value = self.value(start).view(x.shape[0], 3, 2, 2).transpose(1, 2)
        query = self.query(start + places).view(x.shape[0], 3, 2, 2).transpose(1, 2)
        return (query @ value.transpose(2, 3)).softmax(-1) @ value, torch.cat([value, query], 1)


class Readout(nn.Module):
    """A token beside each of the others, both projected together."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 4)

    def forward(self, x):
        rows = x.flatten(1, 2)
        return self.project(torch.cat([rows, rows[:, 0].unsqueeze(1).expand_as(rows)], -1)).relu()


class Windowed(nn.Module):
    """A linear layer on the windows of an image, which are put back behind it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, x):
        batch = x.shape[0]
        windows = x.view(batch, 2, 4, 2, 4, 4).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, 4, 4)
        rows = self.layer(windows).reshape(batch, 2, 2, 4, 4, 6)
        return rows.permute(0, 1, 3, 2, 4, 5).reshape(batch, 8, 8, 6)


def free(name, module):
    return Case(name, seeded(module), (WINDOWS,), FREE, OTHERS, 1e-5)


CASES = [
    free("queries_expanded", Queries(False)),
    free("queries_repeated", Queries(True)),
    free("pooling_by_a_query", Pooling()),
    free("queries_of_zeros", Began()),
    free("windows", Windowed()),
    free("a_token_beside_the_others", Readout()),
]


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    return build_and_run(CASES, tmp_path_factory.mktemp("repetition"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_torch(case, archives):
    compare(case, archives / case.name)
