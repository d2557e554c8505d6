"""For tests of schedules and of code around a pipeline: executors without threads."""

from __future__ import annotations

import time
from collections.abc import Sequence

from asyncpipe.core.events import TaskCompleted, TaskDropped, TaskFailed
from asyncpipe.runtime.executor import Assignment, Report

__all__ = ["InlineExecutor"]


class InlineExecutor:
    """Runs each task on the loop's own thread as soon as it is submitted, one at a time over all devices.

    Give ``Pipeline(..., executors=InlineExecutor)``: the same stages in the same order on each device, without
    any concurrency. For work that is done when its call returns, so on CPU devices only.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self._report: Report | None = None

    def start(self, report: Report) -> None:
        """Take the way back to the scheduler."""
        self._report = report

    def submit(self, assignments: Sequence[Assignment]) -> None:
        """Run the tasks, now."""
        assert self._report is not None
        for step, task, work, _ in assignments:
            if step.aborted:
                self._report(TaskDropped(step.number, task))
                continue
            started = time.perf_counter()
            try:
                assert work() is None, "an InlineExecutor cannot wait for an asynchronous device"
            except BaseException as error:  # noqa: BLE001 - reported, as any executor does
                self._report(TaskFailed(step.number, task, error))
            else:
                self._report(TaskCompleted(step.number, task, started, time.perf_counter()))

    def close(self) -> None:
        """Nothing to end."""

    def join(self) -> None:
        """Nothing to wait for."""
