"""Measured costs of a model's layers, and from them the costs of every split of the model into stages.

Each layer was measured as a stage of its own. A stage of several layers takes the sum of their times plus the overhead
of one task. It keeps what its layers save for the backward; a tensor between two layers counts once::

    layer           seconds, without the overhead of a task      bytes
    0 Linear        F B I W R                                    saved
    1 ReLU          F B I W R                                    saved
    ─ stage ─       overhead(kind) + sum                         input + Σ saved, shared tensors once + output

Tensors that travel are known one by one (``SentTensor``), and so are parameters that several layers share
(``TiedTensor``), so the messages and the memory of stages are right also where values jump over layers.

All figures belong to one number of micro-batches. Smaller micro-batches are not proportionally cheaper, so every number
of micro-batches is measured, and none is interpolated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from statistics import fmean
from typing import Annotated

from annotated_types import Ge

from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.task_graph import Wiring
from asyncpipe.core.kinds import COMPUTE_KINDS, TaskKind
from asyncpipe.core.predict.balance import check_balance
from asyncpipe.core.predict.costs import StageCosts
from asyncpipe.core.predict.memory import StageMemory
from asyncpipe.errors import ProfileError

__all__ = [
    "ADAMW_SCALE",
    "BUCKET_BYTES",
    "CALLER",
    "PARAMETER_SCALE",
    "LayerCosts",
    "Measurement",
    "Profile",
    "ProfiledLayer",
    "SelectiveCosts",
    "SentTensor",
    "TiedTensor",
    "message_sizes",
    "replicas",
]

Seconds = Annotated[float, Ge(0)]
Bytes = Annotated[int, Ge(0)]

_REPEATED = (TaskKind.FORWARD, TaskKind.RECOMPUTE)

CALLER = -1
"""Who gives the inputs and gets the outputs, in the place of a layer."""

BUCKET_BYTES = 25 << 20
"""Gradients that replicas reduce at once, unless one parameter has more."""

PARAMETER_SCALE = 2.0
"""Bytes of training per byte of a parameter: the parameter and its gradient."""
ADAMW_SCALE = 4.0
"""The same, with AdamW's two moving averages."""


@dataclass(frozen=True, slots=True)
class ProfiledLayer:
    """The properties of a layer that do not depend on the number of micro-batches."""

    name: str
    parameters: Bytes
    """Bytes of its parameters."""
    trained: Bytes
    """Bytes of its parameters that get a gradient."""
    inner: bool = True
    """Whether its input gets a gradient. If the first layer of a stage has no such input, I does nothing there, and W
    takes the time of the whole backward."""


@dataclass(frozen=True, slots=True)
class SelectiveCosts:
    """The costs of one layer for one micro-batch with ``checkpoint="selective"``."""

    forward: Seconds
    recompute: Seconds
    kept: Bytes
    """Bytes that products have made, and that are kept besides the inputs."""


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """The costs of one layer for one micro-batch: seconds, without the overhead of a task, and bytes."""

    forward: Seconds
    light_forward: Seconds
    """A forward that saves nothing, because it is recomputed."""
    recompute: Seconds
    backward: Seconds
    input_gradient: Seconds
    weight_gradient: Seconds
    saved: Bytes
    """Bytes that its forward saves for its backward, without its input; with its output, if that is saved."""
    working: Bytes = 0
    """Bytes that a forward or backward needs at most besides, while it runs; of the last layer, with the loss."""
    selective: SelectiveCosts | None = None
    """``None`` where that was not measured."""

    def seconds(self, kind: TaskKind, checkpoint: CheckpointMode) -> float:
        """Its share of a task of ``kind``. With ``except_last``, the last micro-batch counts like the others."""
        if checkpoint is CheckpointMode.SELECTIVE and self.selective and kind in _REPEATED:
            return float(getattr(self.selective, kind.name.lower()))
        if kind is TaskKind.FORWARD and checkpoint is not CheckpointMode.NEVER:
            return self.light_forward
        return float(getattr(self, kind.name.lower()))


@dataclass(frozen=True, slots=True)
class SentTensor:
    """A tensor of one micro-batch that a layer, or the caller, sends to layers, or to the caller."""

    source: int
    users: tuple[int, ...]
    size: Bytes
    """Bytes."""
    saved_by: tuple[int, ...]
    """Which of source and users keep it for their backward."""
    memory: int
    """Equal for tensors that are the same memory, since a layer passes on what it has received."""


@dataclass(frozen=True, slots=True)
class TiedTensor:
    """A parameter that several layers use. The first of them owns it."""

    users: tuple[int, ...]
    size: Bytes
    """Bytes."""
    trained: bool


@dataclass(frozen=True, slots=True)
class Measurement:
    """The costs measured with one number of micro-batches, for one micro-batch of that size."""

    layers: tuple[LayerCosts, ...]
    overhead: Mapping[str, Seconds]
    """Seconds that a task takes in addition to its layers, by the letter of its kind (F, R, B, I, W)."""
    step: Seconds
    """Seconds of a step before its first task and after its last one."""
    latency: Seconds
    """Seconds from the end of a task to the start of a dependent on another device."""
    bandwidth: float
    """Bytes per second between two devices; infinite where tensors are passed without a copy."""
    sent: tuple[SentTensor, ...] = ()
    """What travels between layers, and from and to the caller."""
    adding: float = inf
    """Bytes per second at which gradients of tied parameters are added up; infinite if there are none."""
    host_bandwidth: float = inf
    """Bytes per second between a device and the host's memory; infinite where that is the device's own."""
    updating: float = inf
    """Bytes of parameters per second that the optimizer updates; infinite if it was not measured."""
    reducing: float = inf
    """Bytes of gradients per second that a replica adds up (``StageCosts.reducing``)."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The measured costs of a model's layers; ``costs`` and ``memory`` give those of its stages."""

    layers: tuple[ProfiledLayer, ...]
    links: tuple[tuple[int, int], ...]
    """(source, user) for every pair of layers between which values travel."""
    measurements: Mapping[int, Measurement]
    """By number of micro-batches."""
    devices: tuple[str, ...] = ()
    """The devices on which it was measured."""
    ties: tuple[TiedTensor, ...] = ()
    """Parameters that layers share."""

    def __post_init__(self) -> None:
        """Raises ``ProfileError`` for what does not fit the number of layers."""
        count = len(self.layers)
        if any(not 0 <= source < user < count for source, user in self.links):
            raise ProfileError(f"links must join {count} layers, from earlier to later ones, got {list(self.links)}")
        for tie in self.ties:
            if len(tie.users) < 2 or not all(0 <= user < count for user in tie.users):
                raise ProfileError(f"a tied parameter has several users among {count} layers, got {tie.users}")
        for measured in self.measurements.values():
            if len(measured.layers) != count:
                raise ProfileError(f"{len(measured.layers)} layers were measured, {count} are listed")
            for tensor in measured.sent:
                if not all(CALLER <= each < count for each in (tensor.source, *tensor.users, *tensor.saved_by)):
                    raise ProfileError(f"a tensor travels between {count} layers and the caller (-1), got {tensor}")

    @property
    def knows_selective(self) -> bool:
        """Whether ``checkpoint="selective"`` was measured."""
        return all(layer.selective for each in self.measurements.values() for layer in each.layers)

    @property
    def measured(self) -> list[int]:
        """The numbers of micro-batches that were measured."""
        return sorted(self.measurements)

    def measurement(self, microbatches: int) -> Measurement:
        """The costs measured with ``microbatches``; raises ``ProfileError`` that lists the measured numbers."""
        if microbatches not in self.measurements:
            known = ", ".join(map(str, self.measured)) or "none"
            raise ProfileError(
                f"{microbatches} micro-batches were not measured; the profile knows {known}; "
                f"measure again with --microbatches {microbatches}"
            )
        return self.measurements[microbatches]

    def costs(
        self,
        balance: Sequence[int],
        microbatches: int,
        checkpoint: CheckpointMode = CheckpointMode.NEVER,
        placement: Sequence[int] | None = None,
        *,
        replicas: int = 1,
        shards: bool = False,
    ) -> StageCosts:
        """The cost model of a split: seconds of each kind of task at each stage, and of copies.

        ``balance`` is the number of layers of each stage, ``placement`` the device of each, by default its own.
        ``microbatches`` are those of all replicas together, which share the updates if ``shards``. Raises
        ``BalanceError``, and ``ProfileError`` if that number of micro-batches was not measured.
        """
        measured = self.measurement(microbatches)
        borders = self._borders(balance)
        messages = message_sizes(measured.sent, self._stage_of(balance))
        tied: dict[tuple[int, int], int] = {}
        summed = [0] * len(borders)
        for owner, user, tensor in self._replicas(balance, placement):
            tied[owner, user] = tied.get((owner, user), 0) + tensor.size
            summed[owner] += tensor.size if tensor.trained else 0
        stages = [measured.layers[start:end] for start, end in borders]
        held = [_kept(measured, start, end) for start, end in borders]
        rows = {
            kind: [sum(layer.seconds(kind, checkpoint) for layer in layers) for layers in stages]
            for kind in COMPUTE_KINDS
        }
        inputs, weights = rows[TaskKind.INPUT_GRADIENT], rows[TaskKind.WEIGHT_GRADIENT]
        for stage, (start, _) in enumerate(borders):
            if not self.layers[start].inner:
                inputs[stage], weights[stage] = 0.0, inputs[stage] + weights[stage]
        return StageCosts(
            seconds={
                kind: [measured.overhead.get(kind.value, 0.0) + each for each in row] for kind, row in rows.items()
            },
            sent=[messages.get((stage, stage + 1), 0) for stage in range(len(stages) - 1)],
            latency=measured.latency,
            bandwidth=measured.bandwidth,
            skips={link: size for link, size in messages.items() if link[1] != link[0] + 1},
            tied=tied,
            sums=[size / measured.adding for size in summed],
            kept=[kept for kept, _ in held],
            kept_recomputed=[inputs for _, inputs in held],
            recomputed=sum(checkpoint.recomputes(i, microbatches) for i in range(microbatches)),
            host_bandwidth=measured.host_bandwidth,
            update=[size / measured.updating / (replicas if shards else 1) for size in self._trained(balance)],
            buckets=self.buckets(balance),
            rows=replicas,
            reducing=measured.reducing,
        )

    def memory(
        self,
        balance: Sequence[int],
        microbatches: int,
        parameter_scale: float = PARAMETER_SCALE,
        placement: Sequence[int] | None = None,
        checkpoint: CheckpointMode = CheckpointMode.NEVER,
    ) -> StageMemory:
        """The bytes that each stage keeps for a micro-batch and for its parameters.

        ``parameter_scale`` is the memory of a trained parameter, its gradient and its optimizer state, as a multiple of
        the parameter's own: 2 without optimizer state, 4 with AdamW. Frozen parameters count once, and a tied one once
        where it is owned, and on each other device of its users as a replica with a gradient. ``placement`` is the
        device of each stage, by default its own. With ``SELECTIVE`` recomputation, products are kept
        besides the inputs. Raises as ``costs``.
        """
        measured = self.measurement(microbatches)
        borders = self._borders(balance)
        kept = [_kept(measured, start, end) for start, end in borders]
        chosen = [sum(la.selective.kept for la in measured.layers[a:b] if la.selective) for a, b in borders]
        inputs = [held for _, held in kept]
        if checkpoint is CheckpointMode.SELECTIVE:
            inputs = [held + more for held, more in zip(inputs, chosen, strict=True)]
        fixed = [sum(_fixed(la, parameter_scale) for la in self.layers[start:end]) for start, end in borders]
        stage_of = self._stage_of(balance)
        for tensor in self.ties:
            for user in tensor.users[1:]:
                # Counted as another parameter so far.
                fixed[stage_of[user]] -= tensor.size * (parameter_scale if tensor.trained else min(parameter_scale, 1))
        for _, user, tensor in self._replicas(balance, placement):
            fixed[user] += tensor.size * min(parameter_scale, PARAMETER_SCALE if tensor.trained else 1)
        return StageMemory(
            saved=[saved for saved, _ in kept],
            inputs=inputs,
            fixed=[round(each) for each in fixed],
            working=[max(layer.working for layer in measured.layers[start:end]) for start, end in borders],
        )

    def wiring(self, balance: Sequence[int], placement: Sequence[int] | None = None) -> Wiring:
        """The links between the stages, skips included, and their ties; ``placement`` is that of ``memory``."""
        stage_of = self._stage_of(balance)
        links = {(stage_of[source], stage_of[user]) for source, user in self.links}
        ties = {(owner, user) for owner, user, _ in self._replicas(balance, placement)}
        has_optimizer = any(measured.updating < inf for measured in self.measurements.values())
        updates = range(len(balance) if has_optimizer else 0)
        return Wiring(tuple(sorted(link for link in links if link[0] != link[1])), tuple(sorted(ties)), tuple(updates))

    def buckets(self, balance: Sequence[int]) -> list[list[int]]:
        """The bytes of the buckets of each stage, as if no parameter were larger."""
        counts = [(size, -(-size // BUCKET_BYTES)) for size in self._trained(balance)]
        return [[size // max(1, count)] * count for size, count in counts]

    def _trained(self, balance: Sequence[int]) -> list[int]:
        """The bytes that the optimizer of each stage updates."""
        trained = [sum(layer.trained for layer in self.layers[start:end]) for start, end in self._borders(balance)]
        stage_of = self._stage_of(balance)
        for tensor in self.ties:
            for user in tensor.users[1:]:
                trained[stage_of[user]] -= tensor.size if tensor.trained else 0
        return trained

    def _stage_of(self, balance: Sequence[int]) -> list[int]:
        """The stage of each layer."""
        return [stage for stage, size in enumerate(check_balance(balance, len(self.layers))) for _ in range(size)]

    def _replicas(
        self, balance: Sequence[int], placement: Sequence[int] | None
    ) -> Iterator[tuple[int, int, TiedTensor]]:
        return replicas(self.ties, self._stage_of(balance), placement)

    def layer_seconds(self, microbatches: int, checkpoint: CheckpointMode = CheckpointMode.NEVER) -> list[float]:
        """The time of each layer for one micro-batch: forward, backward and, if it is recomputed, recomputation."""
        kinds = [TaskKind.FORWARD, TaskKind.BACKWARD]
        if checkpoint is not CheckpointMode.NEVER:
            kinds.append(TaskKind.RECOMPUTE)
        layers = self.measurement(microbatches).layers
        return [sum(layer.seconds(kind, checkpoint) for kind in kinds) for layer in layers]

    def message_size(self, microbatches: int) -> float:
        """The bytes that a layer sends another one for one micro-batch, as a mean over those that send any."""
        sizes = message_sizes(self.measurement(microbatches).sent, range(len(self.layers)))
        return fmean(sizes.values() or [0.0])

    def layer_bytes(self, microbatches: int, parameter_scale: float = PARAMETER_SCALE) -> list[int]:
        """The bytes of each layer for one micro-batch and its parameters."""
        measured = self.measurement(microbatches)
        return [
            _kept(measured, number, number + 1)[0] + round(_fixed(layer, parameter_scale))
            for number, layer in enumerate(self.layers)
        ]

    def _borders(self, balance: Sequence[int]) -> list[tuple[int, int]]:
        return list(pairwise([0, *accumulate(check_balance(balance, len(self.layers)))]))


def message_sizes(tensors: Sequence[SentTensor], stage_of: Sequence[int]) -> dict[tuple[int, int], int]:
    """By (source, user) of stages: the bytes of ``tensors`` that one sends the other; ``stage_of`` is by layer.

    What several layers of a stage use is sent there once.
    """
    found: dict[tuple[int, int], int] = {}
    for tensor in tensors:
        if tensor.source != CALLER:
            source = stage_of[tensor.source]
            for user in {stage_of[each] for each in tensor.users if each != CALLER} - {source}:
                found[source, user] = found.get((source, user), 0) + tensor.size
    return found


def replicas(
    ties: Sequence[TiedTensor], stage_of: Sequence[int], placement: Sequence[int] | None = None
) -> Iterator[tuple[int, int, TiedTensor]]:
    """(owner, user, tensor) for each stage that has a replica, since the owner is on another device.

    ``stage_of`` is by layer; ``placement`` the device of each stage, by default its own.
    """
    for tensor in ties:
        owner, *users = dict.fromkeys(stage_of[each] for each in tensor.users)
        for user in users:
            if placement is None or placement[user] != placement[owner]:
                yield owner, user, tensor


def _kept(measured: Measurement, start: int, end: int) -> tuple[int, int]:
    """The bytes that a stage of the layers from ``start`` to ``end`` keeps of a micro-batch, and those of its input.

    It keeps its input, its output, and what its layers save. What layers save of their own is in ``LayerCosts.saved``,
    the output with it; what they save of their input is not.
    """
    inputs: dict[int, int] = {}
    others: dict[int, int] = {}
    counted: set[int] = set()
    for tensor in measured.sent:
        made_here = start <= tensor.source < end
        used_here = [start <= user < end for user in tensor.users]
        if not made_here:
            if any(used_here):
                inputs[tensor.memory] = tensor.size
        elif tensor.source in tensor.saved_by:
            counted.add(tensor.memory)
        elif not all(used_here) or any(start <= each < end for each in tensor.saved_by):
            others[tensor.memory] = tensor.size
    received = sum(inputs.values())
    more = sum(size for memory, size in others.items() if memory not in counted and memory not in inputs)
    return received + sum(layer.saved for layer in measured.layers[start:end]) + more, received


def _fixed(layer: ProfiledLayer, scale: float) -> float:
    return layer.trained * scale + (layer.parameters - layer.trained) * min(scale, 1.0)
