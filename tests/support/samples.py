"""Samples of all combinations: a matrix of whole steps costs seconds, and its dimensions hardly depend on each other.

Both are used like ``pytest.mark.parametrize``, with a (names, values) for each dimension. A campaign has the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest

__all__ = ["each_value", "pairs"]

Dimension = tuple[str, Sequence[Any]]
"""Names as ``parametrize`` takes them, and values, of which some may be ``pytest.param``."""


def each_value(*dimensions: Dimension) -> pytest.MarkDecorator:
    """Each value of each dimension at least once."""
    longest = max(len(values) for _, values in dimensions)
    return _marked(dimensions, [tuple(k % len(values) for _, values in dimensions) for k in range(longest)])


def pairs(*dimensions: Dimension) -> pytest.MarkDecorator:
    """Each pair of values of any two dimensions at least once."""
    combined = list(product(*(range(len(values)) for _, values in dimensions)))
    missing = set().union(*map(_pairs_of, combined))
    chosen = []
    while missing:
        best = max(combined, key=lambda row: len(_pairs_of(row) & missing))
        missing -= _pairs_of(best)
        chosen.append(best)
    return _marked(dimensions, chosen)


def _pairs_of(row: Sequence[int]) -> set[tuple[tuple[int, int], ...]]:
    return set(combinations(enumerate(row), 2))


def _marked(dimensions: Sequence[Dimension], rows: Sequence[Sequence[int]]) -> pytest.MarkDecorator:
    names, params = ", ".join(names for names, _ in dimensions), []
    for row in rows:
        cells = [values[k] for (_, values), k in zip(dimensions, row, strict=True)]
        marks = [mark for cell in cells for mark in getattr(cell, "marks", ())]
        given: list[Any] = []
        for (of, _), cell in zip(dimensions, cells, strict=True):
            value = cell.values if hasattr(cell, "marks") else (cell,) if "," not in of else cell
            given += value
        params.append(pytest.param(*given, marks=marks))
    return pytest.mark.parametrize(names, params)
