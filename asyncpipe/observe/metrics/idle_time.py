"""Why devices were idle: every gap of a compute lane, split by what the next task waited for.

The copies that a task reads divide the gap before it into parts::

    before ends      producer ends   message is here   copy begins   copy ends      task starts
    ─────┤                 ┊              ┊                ┊            ┊              ├─────
         │◀─ dependency ──▶│◀─── edge ───▶│◀── dispatch ──▶│◀── copy ──▶│◀─ dispatch ─▶│

Only what another worker has made has an edge to cross. A copy begins when it is dispatched, even if it then waits for
earlier copies of its lane. What of a wait for the dispatch another job had the device is *shared*, and no fault of the
scheduler. The time after the last task of a device is the drain. Busy and idle seconds of a device add
up to the step. A gap is counted for the stage of the task that ends it, the drain for the stage of the last task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from asyncpipe.core.graph.task import Lane, Queue
from asyncpipe.observe.metrics.graph_arrays import Floats, GraphArrays, Numbers, in_order, summed

__all__ = ["IdleReason", "InputTimes", "device_time"]


class IdleReason(StrEnum):
    """What a compute lane waited for."""

    DEPENDENCY = "dependency"
    """Another device, or the caller's part of a backward, had not yet computed what the next task reads."""
    EDGE = "edge"
    """It was computed in another worker and on its way to this one."""
    COPY = "copy"
    """It was computed and being copied."""
    SHARED = "shared"
    """All inputs were there, and another job had the device."""
    DISPATCH = "dispatch"
    """All inputs were there and no other job had the device, and the task or the copy before it had not begun."""
    DRAIN = "drain"
    """The device had no task left in this step."""


class InputTimes(NamedTuple):
    """When the last input of each task was where."""

    produced: Floats
    """Computed."""
    landed: Floats | None
    """In the task's worker; ``None`` if that is so at once, as nothing comes from another one."""
    sent: Floats
    """Taken by its copy."""
    arrived: Floats
    """On the task's device."""


def device_time(
    arrays: GraphArrays,
    started: Floats,
    ended: Floats,
    inputs: InputTimes,
    taken: Sequence[Mapping[Lane, tuple[Floats, Floats]]],
) -> tuple[Floats, dict[IdleReason, Floats]]:
    """Busy and idle seconds of the devices, summed over k steps of one graph, by position in ``GraphArrays.places``.

    All arrays have the shape (k, tasks + 1), in seconds since each step was submitted: when tasks ``started`` (∞ for
    never) and ``ended`` (-∞), and those of ``inputs``. The last column means "no task"; the rows of ``arrays.compute``
    are filled up with it. ``taken`` has for each step the accounts of the lanes that other jobs used meanwhile.
    """
    tasks, cells, before, after = in_order(arrays.compute, started, ended)
    # Clocks of threads and devices differ a little: time in which two tasks seem to overlap is counted once.
    begin = np.minimum(np.maximum(started.ravel()[cells], before), after)
    made = np.minimum(np.maximum(inputs.produced.ravel()[cells], before), begin)
    there = np.minimum(np.maximum(inputs.arrived.ravel()[cells], made), begin)
    landed = made if inputs.landed is None else np.minimum(np.maximum(inputs.landed.ravel()[cells], made), there)
    left = np.minimum(np.maximum(inputs.sent.ravel()[cells], landed), there)
    places = arrays.place[tasks].ravel()

    def total(seconds: Floats) -> Floats:
        return summed(seconds.ravel(), places, len(arrays.places))

    shared = _shared(arrays, taken, (landed, left), (there, begin))
    return total(after - begin), {
        IdleReason.DEPENDENCY: total(made - before),
        IdleReason.EDGE: np.zeros(len(arrays.places)) if landed is made else total(landed - made),
        IdleReason.COPY: total(there - left),
        IdleReason.SHARED: np.zeros(len(arrays.places)) if shared is None else total(shared),
        IdleReason.DISPATCH: total((left - landed) + (begin - there) - (0.0 if shared is None else shared)),
        IdleReason.DRAIN: _drained(arrays, tasks, ended, after[:, :, -1]),
    }


def _shared(
    arrays: GraphArrays,
    taken: Sequence[Mapping[Lane, tuple[Floats, Floats]]],
    copies: tuple[Floats, Floats],
    compute: tuple[Floats, Floats],
) -> Floats | None:
    """The seconds in which others had the device that each task, or a copy for it, waited for; ``None`` if nobody did.

    A wait is (since, until), of the shape (steps, devices, tasks). What computes waits for the lane that computes, and
    copies for any: on a CPU one thread serves all lanes.
    """
    if not any(taken):
        return None
    found = [np.zeros_like(copies[0]) for _ in range(2)]
    for step, accounts in enumerate(taken):
        for lane, account in accounts.items():
            row = arrays.devices.index((lane.device,))
            found[0][step, row] += _within(account, copies[0][step, row], copies[1][step, row])
            if lane.queue is Queue.COMPUTE:
                found[1][step, row] += _within(account, compute[0][step, row], compute[1][step, row])
    # Lanes may have been taken at the same time.
    waits = (copies, compute)
    return np.add(*(np.clip(each, 0.0, until - since) for each, (since, until) in zip(found, waits, strict=True)))


def _within(account: tuple[Floats, Floats], since: Floats, until: Floats) -> Floats:
    return np.interp(until, *account) - np.interp(since, *account)


def _drained(arrays: GraphArrays, tasks: Numbers, ended: Floats, last: Floats) -> Floats:
    """Seconds from each device's ``last`` moment of work to the end of its step, by place."""
    left = np.maximum(ended.max(axis=1), 0.0)[:, np.newaxis] - last
    ran = (ended > -np.inf)[:, arrays.compute].sum(axis=2)
    final = np.take_along_axis(tasks, np.maximum(ran - 1, 0)[:, :, np.newaxis], axis=2)[:, :, 0]
    places = np.where(ran > 0, arrays.place[final], arrays.home)
    return summed(left.ravel(), places.ravel(), len(arrays.places))
