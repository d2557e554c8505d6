"""What a training run reports while it runs and when it has ended, and the interfaces of those that it reports to."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Protocol, runtime_checkable

from asyncpipe.core.predict.report import Report
from asyncpipe.core.records.compilations import CompiledStage

__all__ = [
    "Meter",
    "ProgressSink",
    "RunStarted",
    "StepListener",
    "StepProgress",
    "TrainingSummary",
    "devices_text",
]

RECENT = 20
"""Losses and speeds are means over this many last steps."""


@dataclass(frozen=True, slots=True)
class RunStarted:
    """The model is split into stages and its devices are ready."""

    name: str
    steps: int
    parameters: int
    devices: tuple[str, ...]
    """The names that the job file has, replica by replica."""
    workers: tuple[str, ...] = ()
    """The worker processes that have them; empty if they are threads."""
    done: int = 0
    """The step of the snapshot from which it goes on; 0 at the beginning."""
    replicas: int = 1

    @property
    def where(self) -> str:
        """The devices, and which of them a replica has."""
        return devices_text(self.devices, self.replicas)


def devices_text(devices: Sequence[str], replicas: int) -> str:
    """``cpu:0, cpu:1``; with replicas ``cpu:0, cpu:1 | cpu:2, cpu:3``."""
    size = len(devices) // replicas
    return " | ".join(", ".join(devices[first : first + size]) for first in range(0, len(devices), size or 1))


@dataclass(frozen=True, slots=True)
class StepProgress:
    """One step is done, including its weight update. Times are in seconds, losses in the loss function's unit."""

    step: int
    """Number of finished steps."""
    steps: int
    loss: float
    learning_rate: float
    gradient_norm: float
    """Of all gradients together, before clipping."""
    seconds: float
    """From the request for the batch to the end of the update."""
    samples: int
    tokens: int
    tokens_per_second: float
    """Mean of the last 20 steps."""
    remaining_seconds: float
    """Estimate for the steps that are left, at that speed."""
    report: Report
    skipped: bool = False
    """Whether the weights were not updated, because the loss or the gradient norm was not finite."""


@dataclass(frozen=True, slots=True)
class TrainingSummary:
    """How a run ended. Means are over the last 20 steps, and ``nan`` if no step was done."""

    name: str
    steps: int
    """Number of finished steps."""
    stopped: bool
    """Whether the run was asked to stop early."""
    loss: float
    """Mean training loss."""
    seconds: float
    """Spent on steps: batches, forward, backward and update."""
    tokens_per_second: float
    """Mean of all steps."""
    bubble_ratio: float
    """Mean idle share of the devices inside a step."""
    evaluation: float | None = None
    """Mean loss on the held-out batches, if the workload has some."""
    sample: str | None = None
    """Text that the model generated, if the workload can sample."""
    trace: Path | None = None
    """The trace file that was written."""
    timeline: Path | None = None
    """The timeline picture that was written."""
    snapshot: Path | None = None
    """The folder of the newest snapshot."""
    skipped: int = 0
    """Number of steps without a weight update, because the loss or the gradient norm was not finite."""
    finished: Path | None = None
    """What the workload has written at the end of all steps."""
    compiled: tuple[CompiledStage, ...] = ()
    """What was compiled of the stages."""


class ProgressSink:
    """Is told how a run proceeds; this base class ignores everything.

    Its methods are called on the run's loop and must not block; an exception ends the run.
    """

    def started(self, run: RunStarted) -> None:
        """Called once, before the first step."""

    def stepped(self, progress: StepProgress) -> None:
        """Called after each step."""

    def entered(self, phase: str) -> None:
        """Called when a phase other than training begins: ``"evaluating"``, ``"sampling"``."""

    def noted(self, level: int, text: str) -> None:
        """Called with a message for people: a retried step, a skipped update, a failed snapshot.

        ``level`` is one of ``logging``'s. The message is in the process's log as well.
        """

    def said(self, stream: str, text: str) -> None:
        """Called with what the job's code says, whole lines of it: prints, log records, tracebacks. From any thread.

        ``stream`` is ``stdout``, ``stderr``, ``traceback``, or the name of a level of ``logging``, as ``warning``.
        """

    def waiting(self, reason: str | None) -> None:
        """Called when the run waits for lost workers, with the reason, and with ``None`` when it does not any more."""

    def snapshot(self, step: int, path: Path) -> None:
        """Called when the snapshot of ``step`` is on disk, at the latest before the run ends."""

    async def keep(self) -> None:
        """Awaited before a snapshot is written: returns when what was told before is where a kill does not reach it.

        Here it is by then. So what is known of a run that goes on from a snapshot has no gap before it.
        """


@runtime_checkable
class StepListener(Protocol):
    """An observer that is told the figures of each training step, as plain numbers."""

    def training_step(self, loss: float, samples: int, tokens: int, duration: float) -> None:
        """Called on the run's loop after each step; must not block. ``duration`` is in seconds, update included."""


class _Recent(NamedTuple):
    loss: float | None
    """``None`` if the update was skipped: a NaN would make the mean of all recent losses NaN."""
    seconds: float
    tokens: int
    bubble_ratio: float


class Meter:
    """Counts the steps of a run, with sums over all steps and means over the last ones."""

    def __init__(self, steps: int) -> None:
        self.step = 0
        """Number of finished steps."""
        self.seconds = 0.0
        self.tokens = 0
        self.skipped = 0
        """Number of steps whose update was skipped."""
        self.skipped_in_a_row = 0
        """Number of skipped updates since the last one that was made."""
        self._steps = steps
        self._recent: deque[_Recent] = deque(maxlen=RECENT)

    def add(self, loss: float, seconds: float, tokens: int, bubble_ratio: float, *, skipped: bool = False) -> None:
        """Count one step. ``seconds`` must be greater than 0."""
        self.step += 1
        self.skipped += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        self.seconds += seconds
        self.tokens += tokens
        self._recent.append(_Recent(None if skipped else loss, seconds, tokens, bubble_ratio))

    def state_dict(self) -> dict[str, Any]:
        """All counts, as plain values."""
        recent = [recent._asdict() for recent in self._recent]
        skipped = {"skipped": self.skipped, "skipped_in_a_row": self.skipped_in_a_row}
        return {"step": self.step, "seconds": self.seconds, "tokens": self.tokens, "recent": recent, **skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``."""
        self.step, self.seconds, self.tokens = state["step"], state["seconds"], state["tokens"]
        self.skipped, self.skipped_in_a_row = state["skipped"], state["skipped_in_a_row"]
        self._recent.clear()
        self._recent.extend(_Recent(**recent) for recent in state["recent"])

    @property
    def loss(self) -> float:
        """Mean loss of the last steps; ``nan`` before the first."""
        losses = [recent.loss for recent in self._recent if recent.loss is not None]
        return fmean(losses) if losses else nan

    @property
    def bubble_ratio(self) -> float:
        """Mean bubble of the last steps; ``nan`` before the first."""
        return fmean(recent.bubble_ratio for recent in self._recent) if self._recent else nan

    @property
    def tokens_per_second(self) -> float:
        """Over all steps; ``nan`` before the first."""
        return self.tokens / self.seconds if self.seconds else nan

    @property
    def recent_tokens_per_second(self) -> float:
        """Mean of the last steps."""
        return sum(recent.tokens for recent in self._recent) / self._recent_seconds

    @property
    def remaining_seconds(self) -> float:
        """Estimate for the steps that are left, at the speed of the last ones."""
        return (self._steps - self.step) * self._recent_seconds / len(self._recent)

    @property
    def _recent_seconds(self) -> float:
        return sum(recent.seconds for recent in self._recent)
