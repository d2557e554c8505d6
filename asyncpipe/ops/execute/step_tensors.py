"""What a step is to compute, and every tensor that it keeps meanwhile.

A forward leaves values for later stages and a *residue* for its own backward. Both are taken out where they are
used, so that nothing lives longer than the graph says::

    activations[i, s, j]   what stage s sent to stage j; put by F(i, s), moved by C(i, s>j), taken by F(i, j)
    residues[i, j]         put by F(i, j), recomputed by R(i, j), taken by B(i, j) or I(i, j)
    gradients[i, j, s]     gradients of what s sent to j; put by B(i, j), moved by C(i, j>s), taken by B(i, s)
    halves[i, j]           what I(i, j), in the place of B(i, j), leaves for W(i, j)

The caller stands among the stages as ``CALLER``. A forward and a backward that are two graphs share these tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from asyncpipe.core.graph.lower import CheckpointMode
from asyncpipe.ops.autograd.checkpoint import Recomputation
from asyncpipe.ops.autograd.split_backward import SplitBackward
from asyncpipe.ops.model.microbatch import Packet
from asyncpipe.ops.model.stage import CALLER

__all__ = ["LocalGraph", "StepPlan", "StepTensors"]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a step is to compute."""

    loss: Callable[..., Any] | None
    """Called with the last stage's output, and with the target if there are targets."""
    weights: Sequence[float]
    """By how much each micro-batch's loss counts, unless the loss returns a count: its gradient's start."""
    scale: Tensor | None
    """By what every gradient is multiplied (a ``GradScaler``'s)."""
    seed: int
    checkpoint: CheckpointMode
    keep_outputs: bool
    training: bool
    whole_step: bool
    """Whether losses and backwards are part of it, rather than the caller's business."""


@dataclass(slots=True, eq=False)
class LocalGraph:
    """What a forward keeps for its backward: the ends of the stage's local graph, by link."""

    inputs: dict[int, list[Tensor]]
    outputs: dict[int, list[Tensor]]
    recomputation: Recomputation | None


@dataclass(slots=True, eq=False)
class StepTensors:
    """The tables of one step. Filled on the devices' threads; the graph orders whoever touches the same entry."""

    activations: dict[tuple[int, int, int], Packet] = field(default_factory=dict)
    residues: dict[tuple[int, int], LocalGraph] = field(default_factory=dict)
    gradients: dict[tuple[int, int, int], list[Tensor | None]] = field(default_factory=dict)
    halves: dict[tuple[int, int], SplitBackward] = field(default_factory=dict)
    """By micro-batch and stage: backwards whose second half is still to come."""
    targets: dict[int, Any] = field(default_factory=dict)
    """By micro-batch; empty where the loss needs none. F at the last stage brings them to its device."""
    tied: dict[tuple[int, int], list[Tensor | None]] = field(default_factory=dict)
    """(user, owner): gradients of replicas on their way to their owner."""
    losses: dict[int, Tensor] = field(default_factory=dict)
    counts: dict[int, Tensor] = field(default_factory=dict)
    """What the loss counted in each micro-batch, if it returns counts."""
    outputs: dict[int, Packet] = field(default_factory=dict)
    arrivals: dict[int, torch.Event] = field(default_factory=dict)
    """Behind which the caller's gradient of a micro-batch may be read."""
    retain: bool = False
    """Whether the backward that runs leaves its residues for another one."""

    @classmethod
    def of(cls, takes: Sequence[Mapping[int, Any]], targets: Sequence[Any] = ()) -> StepTensors:
        """The tables of a step that begins, from what stages receive of each micro-batch and from its target."""
        tensors = cls(targets=dict(enumerate(targets)))
        for i, takes_of in enumerate(takes):
            for stage, value in takes_of.items():
                tensors.activations[i, CALLER, stage] = Packet(value)
        return tensors

    def normalizer(self, device: torch.device) -> Tensor | None:
        """One over everything that the losses counted, on ``device``; ``None`` if they count nothing."""
        if not self.counts:
            return None
        total = torch.stack([count.to(torch.float64) for _, count in sorted(self.counts.items())]).sum()
        return total.reciprocal().to(device, non_blocking=True)

    def close(self) -> None:
        """Drop every tensor that is left; the tracebacks of a failed step may keep the tables alive."""
        for table in (
            self.activations,
            self.residues,
            self.gradients,
            self.halves,
            self.targets,
            self.tied,
            self.losses,
            self.counts,
            self.outputs,
            self.arrivals,
        ):
            table.clear()
