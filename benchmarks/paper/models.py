"""What the paper's models cost on an emulated device: seconds of each stage, and of each copy between two stages.

A layer's share of a forward is its share of the model's floating-point operations, which torch counts on tensors
without values; a recomputation costs a forward and a backward two. One figure of the paper sets the scale: the
throughput of U-Net on one GPU, and that of AmoebaNet-D with n=2, m=1, taken as a chain of F, R and B in which nothing
overlaps. Layers are split evenly by these costs, while the authors balanced by measured times. Copies take their bytes
through PCIe 3.0 x16, the bus of the P40. Costs are proportional to the samples of a micro-batch. So they have the
paper's proportions, and are no claim about any GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from asyncpipe.core.graph.task import Task
from asyncpipe.core.graph.task_graph import Wiring
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.balance import even_balance
from asyncpipe.ops.model.skip_layout import skip_layout
from asyncpipe.ops.model.skips import SkipStore, use_skips
from benchmarks.models.amoebanet import amoebanetd
from benchmarks.paper.figures import AMOEBANET, BARE_UNET, SEQUENTIAL_AMOEBANET, UNET
from benchmarks.unet.model import make_model

__all__ = ["LayeredModel", "SplitModel", "count_layers", "paper_model"]

BYTES_PER_SECOND = 8e9 * 16 * 128 / 130 / 8
"""PCIe 3.0 x16: 16 lanes of 8 gigatransfers per second, 128 bits of payload in 130."""
FORWARDS = {TaskKind.FORWARD: 1, TaskKind.RECOMPUTE: 1, TaskKind.BACKWARD: 2}
"""What tasks cost, in forwards."""


@dataclass(frozen=True, slots=True)
class LayeredModel:
    """The layers of a model, for one sample."""

    seconds: tuple[float, ...]
    """Of each layer's forward."""
    sent: tuple[int, ...]
    """Bytes that each layer hands to the next one."""
    skips: tuple[tuple[int, int, int], ...] = ()
    """(source, user, bytes): what a layer hands to a later one."""

    def split(self, stages: int, samples: float, *, portals: bool = True) -> SplitModel:
        """The model in even stages, for ``samples`` a micro-batch. Without ``portals`` skips go from stage to stage."""
        borders = [0, *accumulate(even_balance(self.seconds, stages))]
        stage_of = [stage for stage, (start, end) in enumerate(pairwise(borders)) for _ in range(start, end)]
        moved = {(stage, stage + 1): self.sent[end - 1] for stage, end in enumerate(borders[1:-1])}
        for source, user, size in self.skips:
            a, b = stage_of[source], stage_of[user]
            hops = [(a, b)] if portals else list(pairwise(range(a, b + 1)))
            for hop in hops if a != b else ():
                moved[hop] = moved.get(hop, 0) + size
        return SplitModel(
            forward=tuple(samples * sum(self.seconds[start:end]) for start, end in pairwise(borders)),
            copies={link: samples * size / BYTES_PER_SECOND for link, size in sorted(moved.items())},
        )


@dataclass(frozen=True, slots=True)
class SplitModel:
    """A cost model: the seconds of each task, for one size of micro-batches."""

    forward: tuple[float, ...]
    """Of each stage."""
    copies: Mapping[tuple[int, int], float]
    """By (source, user): of one micro-batch's values, and of their gradients on the way back."""

    @property
    def wiring(self) -> Wiring:
        """Which stages exchange values."""
        return Wiring(tuple(self.copies))

    def __call__(self, task: Task) -> float:
        """The seconds of ``task``."""
        if task.source is not None:
            return self.copies[min(task.source, task.stage), max(task.source, task.stage)]
        return FORWARDS[task.kind] * self.forward[task.stage]

    def scaled(self, factor: float) -> SplitModel:
        """The same with all times multiplied by ``factor``."""
        copies = {link: seconds * factor for link, seconds in self.copies.items()}
        return SplitModel(tuple(seconds * factor for seconds in self.forward), copies)


def paper_model(name: str) -> LayeredModel:
    """``UNET`` or ``AMOEBANET``, at the paper's size."""
    with torch.device("meta"):
        if name == UNET:
            return count_layers(make_model(5, 5, 64), torch.empty(1, 3, 192, 192), 1 / BARE_UNET / 3)
        assert name == AMOEBANET
        model = amoebanetd(1000, num_layers=18, num_filters=256)
        return count_layers(model, torch.empty(1, 3, 224, 224), 1 / SEQUENTIAL_AMOEBANET / 4)


def count_layers(model: nn.Sequential, sample: Tensor, seconds: float) -> LayeredModel:
    """The layers of ``model``, of which a forward of ``sample`` takes ``seconds``. Nothing is computed on ``meta``."""
    operations: list[int] = []
    sent: list[int] = []
    stashed: dict[object, int] = {}
    store = SkipStore()
    value = sample
    with torch.no_grad(), use_skips(store):
        for layer in model:
            with FlopCounterMode(display=False) as counter:
                value = layer(value)
            operations.append(counter.get_total_flops())
            sent.append(_bytes(value))
            stashed.update({key: _bytes(tensor) for key, tensor in store.outgoing.items()})
    total = sum(operations)
    return LayeredModel(
        tuple(seconds * count / total for count in operations),
        tuple(sent),
        tuple((*ends, stashed[key]) for key, ends in skip_layout([[layer] for layer in model]).items()),
    )


def _bytes(value: object) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
