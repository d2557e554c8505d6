"""Measured costs of a model's layers, and from them the costs of every split of the model into stages.

Each layer was measured as a stage of its own. A stage of several layers takes the sum of their times plus the overhead
of one task. It keeps what its layers save for the backward; a tensor between two layers counts once::

    layer           seconds, without the overhead of a task      bytes
    0 Linear        F B I W R                                    input │ saved │ output, and what of them is saved
    1 ReLU          F B I W R                                    input │ saved │ output
    ─ stage ─       overhead(kind) + sum                         input + Σ saved, shared tensors once + output

Tensors that travel are known one by one (``SentTensor``), and so are parameters that several layers share
(``TiedTensor``), so the messages and the memory of stages are right also where values jump over layers.

All figures belong to one number of micro-batches. Smaller micro-batches are not proportionally cheaper, so every number
of micro-batches is measured, and none is interpolated.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate, pairwise
from math import inf, isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from asyncpipe.core.graph.lower import CheckpointMode
from asyncpipe.core.graph.task_graph import Wiring
from asyncpipe.core.kinds import COMPUTE_KINDS, TaskKind
from asyncpipe.core.predict.balance import check_balance
from asyncpipe.core.predict.costs import StageCosts
from asyncpipe.core.predict.memory import StageMemory
from asyncpipe.errors import ProfileError

__all__ = [
    "ADAMW_SCALE",
    "CALLER",
    "PARAMETER_SCALE",
    "LayerCosts",
    "Measurement",
    "Profile",
    "ProfiledLayer",
    "SentTensor",
    "TiedTensor",
    "message_sizes",
    "replicas",
]

FORMAT, VERSION = "asyncpipe-profile", 2

CALLER = -1
"""Who gives the inputs and gets the outputs, in the place of a layer."""

PARAMETER_SCALE = 2.0
"""Bytes of training per byte of a parameter: the parameter and its gradient."""
ADAMW_SCALE = 4.0
"""The same, with AdamW's two moving averages."""


@dataclass(frozen=True, slots=True)
class ProfiledLayer:
    """The properties of a layer that do not depend on the number of micro-batches."""

    name: str
    parameters: int
    """Bytes of its parameters."""
    trained: int
    """Bytes of its parameters that get a gradient."""
    inner: bool = True
    """Whether its input gets a gradient. If the first layer of a stage has no such input, I does nothing there, and W
    takes the time of the whole backward."""


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """The costs of one layer for one micro-batch: seconds, without the overhead of a task, and bytes."""

    forward: float
    light_forward: float
    """A forward that saves nothing, because it is recomputed."""
    recompute: float
    backward: float
    input_gradient: float
    weight_gradient: float
    input: int
    """Bytes of its input."""
    saved: int
    """Bytes that its forward saves for its backward, without its input; with its output, if that is saved."""
    saved_input: int
    """Bytes of its input that are saved."""
    saved_output: int
    """Bytes of ``saved`` that belong to the output."""
    output: int
    """Bytes of its output."""

    def seconds(self, kind: TaskKind, checkpoint: CheckpointMode) -> float:
        """Its share of a task of ``kind``. With ``except_last``, the last micro-batch counts like the others."""
        if kind is TaskKind.FORWARD and checkpoint is not CheckpointMode.NEVER:
            return self.light_forward
        return float(getattr(self, kind.name.lower()))


@dataclass(frozen=True, slots=True)
class SentTensor:
    """A tensor of one micro-batch that a layer, or the caller, sends to layers, or to the caller."""

    source: int
    users: tuple[int, ...]
    size: int
    """Bytes."""
    saved_by: tuple[int, ...]
    """Which of source and users keep it for their backward."""
    memory: int
    """Equal for tensors that are the same memory, since a layer passes on what it has received."""


@dataclass(frozen=True, slots=True)
class TiedTensor:
    """A parameter that several layers use. The first of them owns it."""

    users: tuple[int, ...]
    size: int
    """Bytes."""
    trained: bool


@dataclass(frozen=True, slots=True)
class Measurement:
    """The costs measured with one number of micro-batches, for one micro-batch of that size."""

    layers: tuple[LayerCosts, ...]
    overhead: Mapping[str, float]
    """Seconds that a task takes in addition to its layers, by the letter of its kind (F, R, B, I, W)."""
    step: float
    """Seconds of a step before its first task and after its last one."""
    latency: float
    """Seconds from the end of a task to the start of a dependent on another device."""
    bandwidth: float
    """Bytes per second between two devices; infinite where tensors are passed without a copy."""
    sent: tuple[SentTensor, ...] = ()
    """What travels; nothing if each layer sends its output to the next one, and no more."""
    adding: float = inf
    """Bytes per second at which gradients of tied parameters are added up; infinite if there are none."""
    host_bandwidth: float = inf
    """Bytes per second between a device and the host's memory; infinite where that is the device's own."""

    @property
    def travelling(self) -> tuple[SentTensor, ...]:
        """``sent``; for a chain, its inputs and outputs."""
        return self.sent or tuple(_chain(self.layers))


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
    ) -> StageCosts:
        """The cost model of a split: seconds of each kind of task at each stage, and of copies.

        ``balance`` is the number of layers of each stage, ``placement`` the device of each, by default its own. Raises
        ``BalanceError``, and ``ProfileError`` if that number of micro-batches was not measured.
        """
        measured = self.measurement(microbatches)
        borders = self._borders(balance)
        messages = message_sizes(measured.travelling, self._stage_of(balance))
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
        )

    def memory(
        self,
        balance: Sequence[int],
        microbatches: int,
        parameter_scale: float = PARAMETER_SCALE,
        placement: Sequence[int] | None = None,
    ) -> StageMemory:
        """The bytes that each stage keeps for a micro-batch and for its parameters.

        ``parameter_scale`` is the memory of a trained parameter, its gradient and its optimizer state, as a multiple of
        the parameter's own: 2 without optimizer state, 4 with AdamW. Frozen parameters count once, and a tied one once
        where it is owned, and on each other device of its users as a replica with a gradient. ``placement`` is the
        device of each stage, by default its own. Raises as ``costs``.
        """
        measured = self.measurement(microbatches)
        borders = self._borders(balance)
        kept = [_kept(measured, start, end) for start, end in borders]
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
            inputs=[inputs for _, inputs in kept],
            fixed=[round(each) for each in fixed],
        )

    def wiring(self, balance: Sequence[int], placement: Sequence[int] | None = None) -> Wiring:
        """The links between the stages, skips included, and their ties; ``placement`` is that of ``memory``."""
        stage_of = self._stage_of(balance)
        links = {(stage_of[source], stage_of[user]) for source, user in self.links}
        ties = {(owner, user) for owner, user, _ in self._replicas(balance, placement)}
        return Wiring(tuple(sorted(link for link in links if link[0] != link[1])), tuple(sorted(ties)))

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
        """The bytes that a layer sends on for one micro-batch, as a mean over the layers but the last."""
        sent = [layer.output for layer in self.measurement(microbatches).layers]
        return fmean(sent[:-1] or sent)

    def layer_bytes(self, microbatches: int, parameter_scale: float = PARAMETER_SCALE) -> list[int]:
        """The bytes of each layer for one micro-batch and its parameters."""
        measured = self.measurement(microbatches)
        return [
            _kept(measured, number, number + 1)[0] + round(_fixed(layer, parameter_scale))
            for number, layer in enumerate(self.layers)
        ]

    def _borders(self, balance: Sequence[int]) -> list[tuple[int, int]]:
        return list(pairwise([0, *accumulate(check_balance(balance, len(self.layers)))]))

    def document(self) -> dict[str, Any]:
        """The profile as plain data for ``json.dumps``."""
        measurements = []
        for microbatches in self.measured:
            row = asdict(self.measurements[microbatches])
            for speed in ("bandwidth", "adding", "host_bandwidth"):  # JSON has no infinity.
                row[speed] = row[speed] if isfinite(row[speed]) else None
            measurements.append({"microbatches": microbatches, **row})
        return {
            "format": FORMAT,
            "version": VERSION,
            "devices": self.devices,
            "layers": [asdict(layer) for layer in self.layers],
            "links": self.links,
            "ties": [asdict(tensor) for tensor in self.ties],
            "measurements": measurements,
        }

    def write(self, path: str | Path) -> None:
        """Write the profile as JSON; raises ``ProfileError`` if the file cannot be written."""
        try:
            Path(path).write_text(json.dumps(self.document(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ProfileError(f"{path}: cannot be written: {error.strerror or error}") from error

    @classmethod
    def read(cls, path: str | Path) -> Profile:
        """The profile in a file that ``write`` wrote; raises ``ProfileError`` for any other file."""
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ProfileError(f"{path}: cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise ProfileError(f"{path}: is not JSON: {error}") from error
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ProfileError(f"{path}: is no profile; 'asyncpipe profile JOB.toml --output FILE' writes one")
        if document.get("version") != VERSION:
            raise ProfileError(
                f"{path}: has version {document.get('version')!r} of the format, this asyncpipe reads {VERSION}; "
                "measure again with 'asyncpipe profile'"
            )
        try:
            return _parsed(document)
        except (KeyError, TypeError, ValueError) as error:
            raise ProfileError(f"{path}: is damaged: {type(error).__name__}: {error}") from error


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


def _chain(layers: Sequence[LayerCosts]) -> Iterator[SentTensor]:
    """The inputs and outputs of layers that send to the next one alone, in parts that are saved by the same layers."""
    memory = 0
    ends = (None, *layers, None)
    for number, (before, after) in enumerate(pairwise(ends)):
        source = number - 1 if before else CALLER
        user = number if after else CALLER
        size = before.output if before else layers[0].input
        first = min(size, before.saved_output) if before else 0
        second = min(size, after.saved_input) if after else 0
        both = min(first, second)
        parts = {(source, user): both, (source,): first - both, (user,): second - both, (): size - max(first, second)}
        for saved_by, part in parts.items():
            if part:
                yield SentTensor(source, (user,), part, saved_by, memory)
                memory += 1


def _kept(measured: Measurement, start: int, end: int) -> tuple[int, int]:
    """The bytes that a stage of the layers from ``start`` to ``end`` keeps of a micro-batch, and those of its input.

    It keeps its input, its output, and what its layers save. What layers save of their own is in ``LayerCosts.saved``,
    the output with it; what they save of their input is not.
    """
    inputs: dict[int, int] = {}
    others: dict[int, int] = {}
    counted: set[int] = set()
    for tensor in measured.travelling:
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


def _parsed(document: Mapping[str, Any]) -> Profile:
    layers = tuple(_made(ProfiledLayer, row) for row in document["layers"])
    measurements: dict[int, Measurement] = {}
    for row in document["measurements"]:
        measured = Measurement(
            layers=tuple(_made(LayerCosts, costs) for costs in row["layers"]),
            overhead={TaskKind(letter).value: _number(seconds) for letter, seconds in row["overhead"].items()},
            step=_number(row["step"]),
            latency=_number(row["latency"]),
            bandwidth=inf if row["bandwidth"] is None else _number(row["bandwidth"]),
            sent=tuple(_sent(each, len(layers)) for each in row["sent"]),
            adding=inf if row["adding"] is None else _number(row["adding"]),
            host_bandwidth=inf if row.get("host_bandwidth") is None else _number(row["host_bandwidth"]),
        )
        if len(measured.layers) != len(layers):
            raise ValueError(f"{len(measured.layers)} layers were measured, {len(layers)} are listed")
        measurements[int(row["microbatches"])] = measured
    links = tuple((int(source), int(user)) for source, user in document["links"])
    if any(not 0 <= source < user < len(layers) for source, user in links):
        raise ValueError(f"links must join {len(layers)} layers, from earlier to later ones, got {list(links)}")
    ties = tuple(_tied(each, len(layers)) for each in document["ties"])
    return Profile(layers, links, measurements, tuple(map(str, document["devices"])), ties)


def _sent(row: Mapping[str, Any], layers: int) -> SentTensor:
    tensor = SentTensor(
        source=int(row["source"]),
        users=tuple(map(int, row["users"])),
        size=_number(row["size"]),
        saved_by=tuple(map(int, row["saved_by"])),
        memory=int(row["memory"]),
    )
    if not all(CALLER <= each < layers for each in (tensor.source, *tensor.users, *tensor.saved_by)):
        raise ValueError(f"a tensor travels between {layers} layers and the caller (-1), got {dict(row)}")
    return tensor


def _tied(row: Mapping[str, Any], layers: int) -> TiedTensor:
    tensor = TiedTensor(tuple(map(int, row["users"])), _number(row["size"]), bool(row["trained"]))
    if len(tensor.users) < 2 or not all(0 <= each < layers for each in tensor.users):
        raise ValueError(f"a tied parameter has several users among {layers} layers, got {dict(row)}")
    return tensor


def _made(kind: Any, row: Mapping[str, Any]) -> Any:
    """An instance of the dataclass ``kind`` from ``row``, whose keys must be its fields."""
    names = [field.name for field in fields(kind)]
    if sorted(row) != sorted(names):
        raise ValueError(f"{kind.__name__} needs {', '.join(names)}, got {', '.join(row)}")
    return kind(**{name: value if name in ("name", "inner") else _number(value) for name, value in row.items()})


def _number(value: Any) -> Any:
    """``value``; raises ``ValueError`` unless it is a finite number, zero or more."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < inf:
        raise ValueError(f"a cost must be a finite number, zero or more, got {value!r}")
    return value
