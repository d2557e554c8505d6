"""Running statistics of batch norms: a recomputation does not update them a second time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

__all__ = ["StatisticsOf", "statistics_of", "untouched"]

_NAMES = ("running_mean", "running_var", "num_batches_tracked")

StatisticsOf = Sequence[tuple[nn.Module, str]]
"""(module, name of a buffer) for each running statistic of a stage."""


def statistics_of(stage: nn.Module) -> StatisticsOf:
    """The running statistics inside ``stage``: of batch norms, and of other layers with buffers of these names."""
    return [(module, name) for module in stage.modules() for name in _NAMES if module._buffers.get(name) is not None]


@contextmanager
def untouched(statistics: StatisticsOf) -> Iterator[None]:
    """Keep ``statistics`` unchanged: the forward inside updates copies. For the stage's thread."""
    kept = [(module._buffers, name, module._buffers[name]) for module, name in statistics]
    try:
        for buffers, name, value in kept:
            buffers[name] = None if value is None else value.clone()
        yield
    finally:
        for buffers, name, value in kept:
            buffers[name] = value
