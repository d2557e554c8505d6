"""Figures of steps for programs that draw them over time: what the observers for TensorBoard and MLflow share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Literal, TypeAlias

from asyncpipe.core.engine.events import Outcome
from asyncpipe.core.predict.report import Report, report
from asyncpipe.core.records.step_record import StepRecord

__all__ = ["CLOSE_SECONDS", "RunEnd", "ScalarObserver", "report_scalars"]

RunEnd: TypeAlias = Literal["finished", "failed", "killed"]
"""How what was observed has ended."""

CLOSE_SECONDS = 10.0
"""How long ``close`` waits for a store that does not answer."""


class ScalarObserver(ABC):
    """An observer that writes figures of each step to a store; the store's library writes them on other threads.

    As an observer of a pipeline it writes seconds, bubble and utilization of every step that succeeds, under the
    pipeline's number of the step. ``add`` writes any figures. Call ``close`` at the end, or use the observer as a
    context manager.
    """

    def __enter__(self) -> ScalarObserver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close("finished" if kind is None else "failed" if issubclass(kind, Exception) else "killed")

    def step_completed(self, record: StepRecord) -> None:
        """Write the figures of a step that succeeded. Takes about 5 µs for each task of the step."""
        if record.outcome is Outcome.OK:
            self.add(record.step, report_scalars(report(record)))

    @abstractmethod
    def add(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        """Write ``values`` by name, of ``step``, at a Unix time (default: now). Quick; raises nothing."""

    @abstractmethod
    def close(self, end: RunEnd = "finished") -> None:
        """Write what is left and note how the run ended. Blocks, for ``CLOSE_SECONDS`` at most; may be called again."""


def report_scalars(of: Report) -> dict[str, float]:
    """The figures of a step's report, by name."""
    return {
        "seconds": of.seconds,
        "bubble_ratio": of.bubble_ratio,
        **{f"utilization/{device}": busy for device, busy in of.device_utilization.items()},
    }
