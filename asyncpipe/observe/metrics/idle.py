"""Why devices stood idle: every gap of a compute lane, split by what the next task waited for.

The copies that a task reads cut the gap before it into four::

    before ends      producer ends   copy begins   copy ends      task starts
    ─────┤                 ┊               ┊            ┊              ├─────
         │◀─ dependency ──▶│◀─ dispatch ──▶│◀── copy ──▶│◀─ dispatch ─▶│

A copy begins as soon as it is handed out, also where it has to wait for the copies before it on its lane.
What is left after a device's last task is the drain. Busy and idle seconds of a device add up to the step. A gap
counts for the stage of the task that ends it, the drain for the stage of the last task.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from asyncpipe.observe.metrics.plan import Floats, Numbers, Plan, summed

__all__ = ["DeviceTime", "IdleReason", "device_time"]


class IdleReason(StrEnum):
    """What a compute lane waited for."""

    DEPENDENCY = "dependency"
    """Another device, or the caller's own part of a backward, had not yet computed what the next task reads."""
    COPY = "copy"
    """It was computed and on its way."""
    DISPATCH = "dispatch"
    """Everything was there, and the task had not begun."""
    DRAIN = "drain"
    """The device had nothing left to do in this step."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceTime:
    """Seconds of the compute lanes over several steps, by position in the plan's ``places``."""

    busy: Floats
    idle: dict[IdleReason, Floats]


def device_time(
    plan: Plan, started: Floats, ended: Floats, produced: Floats, sent: Floats, arrived: Floats
) -> DeviceTime:
    """Where the devices' time went in k steps of one graph.

    Everything has the shape (k, tasks + 1), in seconds since each step was submitted: when tasks ``started`` (∞ for
    never) and ``ended`` (-∞), when the last thing that they read was ``produced``, when its copy was ``sent`` on its
    way, and when it had ``arrived`` on their device. The last column belongs to no task; it fills the devices' rows up
    to one length.
    """
    steps, columns = ended.shape
    begin = started[:, plan.compute]
    order = np.argsort(begin, axis=2, kind="stable")
    begin = np.take_along_axis(begin, order, axis=2)
    tasks = np.take_along_axis(plan.compute[np.newaxis], order, axis=2)
    cells = tasks + columns * np.arange(steps)[:, np.newaxis, np.newaxis]
    # Clocks of other threads and devices may be a little off: tasks that seem to overlap are counted once.
    after = np.maximum(np.maximum.accumulate(ended.ravel()[cells], axis=2), 0.0)
    before = np.zeros_like(after)
    before[:, :, 1:] = after[:, :, :-1]
    begin = np.minimum(np.maximum(begin, before), after)
    made = np.minimum(np.maximum(produced.ravel()[cells], before), begin)
    there = np.minimum(np.maximum(arrived.ravel()[cells], made), begin)
    left = np.minimum(np.maximum(sent.ravel()[cells], made), there)
    places = plan.place[tasks].ravel()

    def total(seconds: Floats) -> Floats:
        return summed(seconds.ravel(), places, len(plan.places))

    return DeviceTime(
        busy=total(after - begin),
        idle={
            IdleReason.DEPENDENCY: total(made - before),
            IdleReason.COPY: total(there - left),
            IdleReason.DISPATCH: total(left - made) + total(begin - there),
            IdleReason.DRAIN: _drained(plan, tasks, ended, after[:, :, -1]),
        },
    )


def _drained(plan: Plan, tasks: Numbers, ended: Floats, last: Floats) -> Floats:
    """Seconds from each device's ``last`` moment of work to the end of its step, by place."""
    left = np.maximum(ended.max(axis=1), 0.0)[:, np.newaxis] - last
    ran = (ended > -np.inf)[:, plan.compute].sum(axis=2)
    final = np.take_along_axis(tasks, np.maximum(ran - 1, 0)[:, :, np.newaxis], axis=2)[:, :, 0]
    places = np.where(ran > 0, plan.place[final], plan.home)
    return summed(left.ravel(), places.ravel(), len(plan.places))
