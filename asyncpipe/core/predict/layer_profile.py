"""Measured costs of a model's layers, and from them the costs of every split of the model into stages.

Each layer was measured as a stage of its own. A stage of several layers takes the sum of their times plus the overhead
of one task. It keeps what its layers save for the backward; a tensor between two layers counts once::

    layer           seconds, without the overhead of a task      bytes
    0 Linear        F B I W R                                    input │ saved │ output, and what of them is saved
    1 ReLU          F B I W R                                    input │ saved │ output
    ─ stage ─       overhead(kind) + sum                         input + Σ saved, shared tensors once + output

All figures belong to one number of micro-batches. Smaller micro-batches are not proportionally cheaper, so every number
of micro-batches is measured, and none is interpolated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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

__all__ = ["ADAMW_SCALE", "PARAMETER_SCALE", "ProfiledLayer", "LayerCosts", "Measurement", "Profile"]

FORMAT, VERSION = "asyncpipe-profile", 1

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
    ) -> StageCosts:
        """The cost model of a split: seconds of each kind of task at each stage, and of copies.

        ``balance`` is the number of layers of each stage. Raises ``BalanceError``, and ``ProfileError`` if that number
        of micro-batches was not measured.
        """
        measured = self.measurement(microbatches)
        borders = self._borders(balance)
        stages = [measured.layers[start:end] for start, end in borders]
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
            sent=[layers[-1].output for layers in stages[:-1]],
            latency=measured.latency,
            bandwidth=measured.bandwidth,
        )

    def memory(
        self, balance: Sequence[int], microbatches: int, parameter_scale: float = PARAMETER_SCALE
    ) -> StageMemory:
        """The bytes that each stage keeps for a micro-batch and for its parameters.

        ``parameter_scale`` is the memory of a trained parameter, its gradient and its optimizer state, as a multiple of
        the parameter's own: 2 without optimizer state, 4 with AdamW. Frozen parameters count once. Raises as ``costs``.
        """
        measured = self.measurement(microbatches)
        borders = self._borders(balance)
        stages = [measured.layers[start:end] for start, end in borders]
        return StageMemory(
            saved=[_saved(layers) for layers in stages],
            inputs=[layers[0].input for layers in stages],
            fixed=[round(sum(_fixed(la, parameter_scale) for la in self.layers[start:end])) for start, end in borders],
        )

    def wiring(self, balance: Sequence[int]) -> Wiring:
        """The links between the stages, with skips; tied parameters are left out."""
        stage_of = [stage for stage, size in enumerate(check_balance(balance, len(self.layers))) for _ in range(size)]
        links = {(stage_of[source], stage_of[user]) for source, user in self.links}
        return Wiring(tuple(sorted(link for link in links if link[0] != link[1])))

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
        costs = self.measurement(microbatches).layers
        return [_saved([la]) + round(_fixed(of, parameter_scale)) for la, of in zip(costs, self.layers, strict=True)]

    def _borders(self, balance: Sequence[int]) -> list[tuple[int, int]]:
        return list(pairwise([0, *accumulate(check_balance(balance, len(self.layers)))]))

    def document(self) -> dict[str, Any]:
        """The profile as plain data for ``json.dumps``."""
        measurements = []
        for microbatches in self.measured:
            row = asdict(self.measurements[microbatches])
            # JSON has no infinity.
            row["bandwidth"] = row["bandwidth"] if isfinite(row["bandwidth"]) else None
            measurements.append({"microbatches": microbatches, **row})
        return {
            "format": FORMAT,
            "version": VERSION,
            "devices": self.devices,
            "layers": [asdict(layer) for layer in self.layers],
            "links": self.links,
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


def _saved(layers: Sequence[LayerCosts]) -> int:
    """The bytes that a stage keeps of a micro-batch: its input, its output, and what its layers save."""
    inner = sum(max(0, after.saved_input - before.saved_output) for before, after in pairwise(layers))
    first, last = layers[0], layers[-1]
    return first.input + sum(la.saved for la in layers) + inner + max(0, last.output - last.saved_output)


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
        )
        if len(measured.layers) != len(layers):
            raise ValueError(f"{len(measured.layers)} layers were measured, {len(layers)} are listed")
        measurements[int(row["microbatches"])] = measured
    links = tuple((int(source), int(user)) for source, user in document["links"])
    if any(not 0 <= source < user < len(layers) for source, user in links):
        raise ValueError(f"links must join {len(layers)} layers, from earlier to later ones, got {list(links)}")
    return Profile(layers, links, measurements, tuple(map(str, document["devices"])))


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
