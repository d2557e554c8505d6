"""The AmoebaNet-D of the benchmarks: the papers' model, and pairs from cell to cell."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from asyncpipe.errors import OptionError
from benchmarks.models import amoebanet
from benchmarks.models.amoebanet import amoebanetd


@pytest.mark.parametrize(
    ("num_layers", "num_filters", "millions"),
    [(18, 208, 81.5), (18, 416, 319.0), (18, 544, 542.7), (36, 544, 1060), (72, 512, 1840)],
)
def test_there_are_as_many_parameters_as_the_papers_count(num_layers, num_filters, millions):
    with torch.device("meta"):
        model = amoebanetd(1000, num_layers, num_filters)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.005)


def test_a_cell_makes_the_next_pair_of_its_output_and_the_newest_input():
    model = amoebanetd(10, 3, 16, input_channels=1, stem_reductions=1)
    values = [torch.randn(2, 1, 32, 32)]
    for layer in model:
        values.append(layer(values[-1]))
    assert values[-1].shape == (2, 10)
    values[-1].square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    pairs = values[1:-1]
    assert all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs)
    assert all(after[1] is before[0] for before, after in pairwise(pairs))
    # Stem, its reduction, and the normal cells with the other two reductions between them.
    assert [tuple(newest.shape[1:]) for newest, _ in pairs] == [
        (8, 16, 16),
        (3 * 16, 8, 8),
        (4 * 16, 8, 8),
        (3 * 32, 4, 4),
        (4 * 32, 4, 4),
        (3 * 64, 2, 2),
        (4 * 64, 2, 2),
    ]


class Times(nn.Module):
    """An operation that one can count with."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


@pytest.mark.parametrize(("kind", "joined"), [("NORMAL", [1, 16, 11, 1836]), ("REDUCTION", [33, 207, 277])])
def test_a_cell_is_wired_as_evolution_found(kind, joined):
    cell = amoebanet.Cell(getattr(amoebanet, kind), 4, 4, 4, False)
    cell.fit_newest = cell.fit_previous = nn.Identity()
    for position in range(10):
        cell.operations[position] = Times(position + 1)
    newest, previous = torch.full((1, 1, 1, 1), 1.0), torch.full((1, 1, 1, 1), 4.0)
    output, passed = cell((newest, previous))
    assert passed is newest
    assert output.flatten().tolist() == joined


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_layers": 4}, "num_layers must be a positive multiple of 3, got 4"),
        ({"num_layers": 0}, "num_layers must be a positive multiple of 3, got 0"),
        ({"num_filters": 12}, "num_filters must be a positive multiple of 8, got 12"),
        ({"num_filters": 6, "stem_reductions": 0}, "num_filters must be a positive multiple of 4, got 6"),
        ({"stem_reductions": -1}, "stem_reductions must be at least 0, got -1"),
    ],
)
def test_sizes_that_cannot_be_divided_are_turned_down(sizes, message):
    with pytest.raises(OptionError, match=message):
        amoebanetd(**sizes)
