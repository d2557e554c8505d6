"""Pipelines for ``y = pipe(x)``, what they are called with, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from asyncpipe import Microbatches, Pipeline

__all__ = ["assert_equal", "gradients", "parts", "pipeline", "rows"]


def pipeline(model: nn.Module | list[nn.Module], devices: int = 3, **options: Any) -> Pipeline:
    options = {"microbatches": 4, "schedule": "gpipe", "checkpoint": "always"} | options
    return Pipeline(model, [f"cpu:{k}" for k in range(devices)], **options)


def parts(workload: Any) -> Microbatches:
    """The workload's batch as the four micro-batches that a pipeline would cut."""
    return Microbatches(list(workload.x.split(3)))


def rows(samples: int, width: int = 6) -> Tensor:
    torch.manual_seed(samples)
    return torch.randn(samples, width, dtype=torch.float64)


def gradients(loss: Tensor, leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """What ``loss.backward()`` leaves at ``leaves``, which are cleared again."""
    loss.backward()
    made = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return made


def assert_equal(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None], case: object = "") -> None:
    """A tensor that no gradient reaches has none."""
    assert any(wanted is not None for wanted in theirs)
    for made, wanted in zip(ours, theirs, strict=True):
        assert (made is None) == (wanted is None), case
        assert made is None or (made - wanted).abs().max() < 1e-10, case
