"""What a step computes, and the tables of tensors through which its tasks pass values to each other.

A task removes an entry when it uses it, so no tensor lives longer than the task graph needs it::

    activations[i, s, j]    what stage s sent to stage j; put by F(i, s), moved by C(i, s>j), taken by F(i, j)
    local_graphs[i, j]      put by F(i, j), recomputed by R(i, j), taken by B(i, j) or I(i, j)
    gradients[i, j, s]      gradients of what s sent to j; put by B(i, j), moved by C(i, j>s), taken by B(i, s)
    split_backwards[i, j]   put by I(i, j), which replaces B(i, j), and taken by W(i, j)
    kept[i, j]              put by F(i, j), moved by O(i, j) and L(i, j), taken by the first of R, B and I of (i, j)

``CALLER`` is the index of the caller where one of a stage stands. Where forward and backward are two task graphs
(``pipe(x)``), both use the same tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.ops.autograd.checkpoint import Recomputation
from asyncpipe.ops.autograd.split_backward import SplitBackward
from asyncpipe.ops.device.copies import to_device
from asyncpipe.ops.execute.offloading import KeptActivations
from asyncpipe.ops.execute.replica_sums import Contribution
from asyncpipe.ops.execute.shared_values import Readers, shared_readers
from asyncpipe.ops.model.microbatch import Packet
from asyncpipe.ops.model.stage import CALLER
from asyncpipe.ops.torch_internals import tree_leaves

__all__ = ["LocalGraph", "StepPlan", "StepTensors"]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a step computes, besides the model."""

    loss: Callable[..., Any] | None
    """Called with the last stage's output, and with the target if there are targets."""
    weights: Sequence[float]
    """The weight of each micro-batch's loss, which its gradient starts from; unused where the loss returns counts."""
    scale: Tensor | None
    """What every gradient is multiplied by (the scale of a ``GradScaler``)."""
    seed: int
    checkpoint: CheckpointMode
    keep_outputs: bool
    training: bool
    whole_step: bool
    """Whether losses and backwards are part of it. In ``pipe(x)`` they are the caller's."""
    learning_rate: float | None = None
    """What the optimizers set before they update, if it is given."""
    gradient_norms: bool = False
    """Whether the norm of what each optimizer uses is kept."""
    clip_norm: float | None = None
    """What the norm of all gradients is at most, when optimizers use them."""
    clip_value: float | None = None
    """What each gradient's size is at most then."""
    sizes: Sequence[int] = ()
    """Of the micro-batches, if they differ."""
    batch_dim: int = 0
    items: float | None = None
    """What takes the place of the sum of the losses' counts, if it is given."""


@dataclass(slots=True, eq=False)
class LocalGraph:
    """What a forward keeps for its backward: the inputs and outputs of the stage's autograd graph, by link."""

    inputs: dict[int, list[Tensor]]
    outputs: dict[int, list[Tensor]]
    recomputation: Recomputation | None


@dataclass(slots=True, eq=False)
class StepTensors:
    """The tables of one step, used on the devices' threads; the task graph orders the tasks that use one entry."""

    activations: dict[tuple[int, int, int], Packet] = field(default_factory=dict)
    local_graphs: dict[tuple[int, int], LocalGraph] = field(default_factory=dict)
    readers: dict[tuple[int, int, int], Readers] = field(default_factory=dict)
    """By micro-batch, source and user, where memory is shared: who else reads the activations."""
    gradients: dict[tuple[int, int, int], list[Tensor | None]] = field(default_factory=dict)
    split_backwards: dict[tuple[int, int], SplitBackward] = field(default_factory=dict)
    """By micro-batch and stage: backwards whose W is still to come."""
    kept: dict[tuple[int, int], KeptActivations] = field(default_factory=dict)
    """By micro-batch and stage: activations that are offloaded, or about to be."""
    targets: dict[int, Any] = field(default_factory=dict)
    """By micro-batch; empty where the loss needs none. F of the last stage moves them to its device."""
    tied_gradients: dict[tuple[int, int], list[Tensor | None]] = field(default_factory=dict)
    """By (user, owner): gradients of replicas, copied to the owner's device and not added to its gradients yet."""
    tied_arrived: dict[tuple[int, int], list[Tensor | None]] = field(default_factory=dict)
    """By (source, user): values or gradients of tied parameters that another worker sent and no copy has taken yet."""
    shares: dict[tuple[int, int, int], Contribution] = field(default_factory=dict)
    """By stage, bucket and stage of another replica: what this one's worker has sent for A."""
    reduced: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By stage and bucket: what A has added up, here or in the stage's worker, and which parameters have gradients."""
    updated: dict[tuple[int, int, int], Sequence[Tensor]] = field(default_factory=dict)
    """By stage, bucket and stage of another replica: the parameters that this one's worker has updated and sent."""
    losses: dict[int, Tensor] = field(default_factory=dict)
    counts: dict[int, Tensor] = field(default_factory=dict)
    """The count that the loss returned for each micro-batch, if it returns counts; on the CPU if it was a number."""
    items: float | None = None
    """As in ``StepPlan``."""
    outputs: dict[int, Packet] = field(default_factory=dict)
    gradient_norms: dict[int, Tensor] = field(default_factory=dict)
    """By stage: of the gradients that its optimizer has used, before clipping, if they are wanted. Under
    ``WHOLE_STEP``, where N adds it up: of all gradients."""
    norms: dict[int, Tensor] = field(default_factory=dict)
    """By stage: the norms of its gradients, for the N that takes that of all, from here or the stage's worker."""
    totals: dict[int, Tensor] = field(default_factory=dict)
    """By stage: the norm of all gradients for its U, where another worker has sent it."""
    rates: list[float] = field(default_factory=list)
    """What a scheduler has set: the learning rate of the first optimizer here that has used one."""
    gradients_ready: dict[int, torch.Event] = field(default_factory=dict)
    """By micro-batch: the event after which the gradients of its outputs, which the caller made, may be read."""
    caller_ready: Mapping[torch.device, torch.Event] = field(default_factory=dict)
    """By device: the event behind what the caller had queued there when the step began."""
    retain: bool = False
    """Whether the backward that runs keeps the local graphs for another backward."""

    @classmethod
    def of(cls, caller_values: Sequence[Mapping[int, Any]], targets: Sequence[Any] = ()) -> StepTensors:
        """The tables of a new step, from what stages take of each micro-batch, and the targets."""
        tensors = cls(targets=dict(enumerate(targets)))
        for i, values in enumerate(caller_values):
            packets = {stage: Packet(value) for stage, value in values.items()}
            tensors.activations.update(((i, CALLER, stage), packet) for stage, packet in packets.items())
            shared = shared_readers({stage: packet.tensors for stage, packet in packets.items()})
            tensors.readers.update(((i, CALLER, stage), readers) for stage, readers in shared.items())
        return tensors

    def given(self) -> Iterator[Tensor]:
        """The caller's tensors, before the step has begun."""
        for packet in self.activations.values():
            yield from packet.tensors
        for target in self.targets.values():
            leaves = (target,) if isinstance(target, Tensor) else tree_leaves(target)
            yield from (leaf for leaf in leaves if isinstance(leaf, Tensor))

    def normalizer(self, device: torch.device) -> Tensor | None:
        """One over the sum of all counts, to multiply tensors on ``device`` with; ``None`` without counts.

        Counts that are numbers are summed on the host, and read by kernels like other numbers. Blocks only where the
        host needs a count that was made on an accelerator.
        """
        total = self.count_of(sorted(self.counts), device) if self.items is None else self._items(bool(self.counts))
        return None if total is None else total.reciprocal()

    def count_of(self, microbatches: Iterable[int], device: torch.device) -> Tensor | None:
        """The sum of the counts of these micro-batches, as far as they are known here; ``None`` if there are none.

        It is on ``device`` or, without counts of accelerators, on the host. Blocks as ``normalizer``.
        """
        by_device: dict[torch.device, list[Tensor]] = {}
        known = [i for i in microbatches if i in self.counts]
        if self.items is not None:
            # The replica with the first micro-batch has it, and the others nothing, so that the sum is exact.
            total = self._items(bool(known))
            return total if total is None or 0 in known else torch.zeros_like(total)
        for count in [self.counts[i] for i in known]:
            by_device.setdefault(count.device, []).append(count.to(torch.float64))
        totals = [torch.stack(counts).sum() for counts in by_device.values()]
        moved = [total if total.is_cpu else to_device(total, device) for total in totals]
        return sum(moved[1:], moved[0]) if moved else None

    def _items(self, known: bool) -> Tensor | None:
        return torch.tensor(self.items, dtype=torch.float64) if known else None

    def close(self) -> None:
        """Drop every tensor that is left: the traceback of a failed step may keep this object alive."""
        for kept in self.kept.values():
            kept.abandon()
        for table in fields(self):
            if table.name not in ("retain", "caller_ready", "items"):
                getattr(self, table.name).clear()
