"""What a training run tells while it runs and when it is over, and whom it tells."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Protocol, runtime_checkable

from asyncpipe.core.predict.report import Report

__all__ = ["Meter", "NullProgress", "ProgressSink", "RunStarted", "StepListener", "StepProgress", "TrainingSummary"]

RECENT = 20
"""Losses and speeds are means over this many last steps."""


@dataclass(frozen=True, slots=True)
class RunStarted:
    """The model is split and its devices are ready."""

    name: str
    steps: int
    parameters: int
    devices: tuple[str, ...]
    """As the job has them."""


@dataclass(frozen=True, slots=True)
class StepProgress:
    """One step is done, its update of the weights included. Times are seconds, losses the loss function's unit."""

    step: int
    """How many steps are done."""
    steps: int
    loss: float
    learning_rate: float
    gradient_norm: float
    """Of all gradients together, before clipping."""
    seconds: float
    """From the making of the batch to the end of the update."""
    samples: int
    tokens: int
    tokens_per_second: float
    """Over the last 20 steps."""
    remaining_seconds: float
    """At that speed."""
    report: Report
    skipped: bool = False
    """Whether the update of the weights was left out, as loss or gradient norm was no finite number."""


@dataclass(frozen=True, slots=True)
class TrainingSummary:
    """How a run ended. Means are over the last 20 steps; they are ``nan`` where no step was done."""

    name: str
    steps: int
    """How many were done."""
    stopped: bool
    """Whether it was asked to stop before it was through."""
    loss: float
    """Mean training loss."""
    seconds: float
    """Spent on steps: batches, forward, backward and update."""
    tokens_per_second: float
    """Over all steps."""
    bubble_ratio: float
    """Mean idle share of the devices inside a step."""
    evaluation: float | None = None
    """Mean loss on the held-out batches, where the workload has some."""
    sample: str | None = None
    """Text that the model generated, where the workload knows how."""
    trace: Path | None = None
    """The trace that was written."""
    timeline: Path | None = None
    """The picture that was written."""
    snapshot: Path | None = None
    """The folder of the last snapshot that was written."""
    skipped: int = 0
    """In how many steps the update of the weights was left out."""


class ProgressSink(Protocol):
    """Is told how a run goes. Called on the run's loop, so it is quick; what it raises ends the run."""

    def started(self, run: RunStarted) -> None:
        """Called once, before the first step."""

    def stepped(self, progress: StepProgress) -> None:
        """Called after each step."""

    def entered(self, phase: str) -> None:
        """Called when something else than training begins: ``"evaluating"``, ``"sampling"``."""

    def noted(self, level: int, text: str) -> None:
        """Called with a line for people: a step tried again, an update left out, a snapshot that failed.

        ``level`` is one of ``logging``'s. The line stands in the process's log as well.
        """

    def snapshot(self, step: int, path: Path) -> None:
        """Called when the snapshot of ``step`` is on disk, at the latest before the run ends."""


@runtime_checkable
class StepListener(Protocol):
    """Is told the figures of each training step, as numbers only: what counts steps or shows them to others."""

    def training_step(self, loss: float, samples: int, tokens: int, duration: float) -> None:
        """Called on the run's loop after each step, so it is quick. ``duration`` is in seconds, update included."""


class NullProgress:
    """Shows nothing."""

    def started(self, run: RunStarted) -> None:
        """Show nothing."""

    def stepped(self, progress: StepProgress) -> None:
        """Show nothing."""

    def entered(self, phase: str) -> None:
        """Show nothing."""

    def noted(self, level: int, text: str) -> None:
        """Show nothing."""

    def snapshot(self, step: int, path: Path) -> None:
        """Show nothing."""


class _Recent(NamedTuple):
    loss: float | None
    """``None`` where the update was skipped: one such step would make the mean of many no number."""
    seconds: float
    tokens: int
    bubble_ratio: float


class Meter:
    """Sums and recent means over the steps of a run."""

    def __init__(self, steps: int) -> None:
        self.step = 0
        """How many steps are done."""
        self.seconds = 0.0
        self.tokens = 0
        self.skipped = 0
        """In how many of them the update was left out."""
        self.skipped_in_a_row = 0
        """In how many of the last ones, without a break."""
        self._steps = steps
        self._recent: deque[_Recent] = deque(maxlen=RECENT)

    def add(
        self,
        *,
        loss: float,
        learning_rate: float,
        gradient_norm: float,
        seconds: float,
        samples: int,
        tokens: int,
        report: Report,
        skipped: bool = False,
    ) -> StepProgress:
        """Count one more step and say how far the run is; ``seconds`` is more than 0."""
        self.step += 1
        self.skipped += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        self.seconds += seconds
        self.tokens += tokens
        self._recent.append(_Recent(None if skipped else loss, seconds, tokens, report.bubble_ratio))
        recent_seconds = sum(recent.seconds for recent in self._recent)
        return StepProgress(
            step=self.step,
            steps=self._steps,
            loss=loss,
            learning_rate=learning_rate,
            gradient_norm=gradient_norm,
            seconds=seconds,
            samples=samples,
            tokens=tokens,
            tokens_per_second=sum(recent.tokens for recent in self._recent) / recent_seconds,
            remaining_seconds=(self._steps - self.step) * recent_seconds / len(self._recent),
            report=report,
            skipped=skipped,
        )

    def state_dict(self) -> dict[str, Any]:
        """What has been counted so far, as plain values."""
        recent = [recent._asdict() for recent in self._recent]
        skipped = {"skipped": self.skipped, "skipped_in_a_row": self.skipped_in_a_row}
        return {"step": self.step, "seconds": self.seconds, "tokens": self.tokens, "recent": recent, **skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Count on from there."""
        self.step, self.seconds, self.tokens = state["step"], state["seconds"], state["tokens"]
        # Snapshots from before updates could be skipped do not say.
        self.skipped, self.skipped_in_a_row = state.get("skipped", 0), state.get("skipped_in_a_row", 0)
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
