"""What a worker says of its threads when it is asked what it is at: what they run, and where in the code they are.

On the thread that answers pings. Nothing here waits for another thread, nor reads a file.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence

from asyncpipe.core.hangs.reports import RunningReport, StackFrame
from asyncpipe.pipeline.resident.resident import Resident
from asyncpipe.runtime.driver import Driver

__all__ = ["running_reports", "stacks"]

MOST_FRAMES = 60
"""Of a thread, the innermost ones."""


def running_reports(driver: Driver, residents: Mapping[int, Resident], asked: int) -> list[RunningReport]:
    """What the devices run. ``residents`` by step; ``asked`` is the step that the question is about."""
    found = []
    for each in driver.running():
        number, task = each.execution.number, each.execution.graph.tasks[each.task]
        resident = residents.get(number)
        step = None if resident is None else resident.links.steps.get(number)
        if step is None:
            continue  # It has ended for the controller.
        whose = ""
        if resident is not residents.get(asked):
            whose = f" of job {job!r}" if (job := each.execution.tenant.share.job) else " of another pipeline"
        seconds = time.perf_counter() - each.started
        name = f"{task.id}{whose}"
        found.append(RunningReport(task.lane.device, number, step.part.name(each.task), name, seconds))
    return found


def stacks() -> dict[str, Sequence[StackFrame]]:
    """What each thread of this process is in, by its name."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {names[ident]: _calls(frame) for ident, frame in sys._current_frames().items() if ident in names}


def _calls(frame: object) -> Sequence[StackFrame]:
    calls = [(each.f_code.co_filename, line, each.f_code.co_name) for each, line in traceback.walk_stack(frame)]  # type: ignore[arg-type]
    return calls[:MOST_FRAMES][::-1]
