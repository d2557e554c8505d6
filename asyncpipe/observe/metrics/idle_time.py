"""Busy and idle seconds of devices, summed over many steps at once: ``core/predict/idle_reasons.py`` with arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from asyncpipe.core.graph.task import Lane, Queue
from asyncpipe.core.predict.idle_reasons import DividedGap, IdleReason, divide_gap
from asyncpipe.observe.metrics.graph_arrays import Floats, GraphArrays, Numbers, in_order, summed

__all__ = ["Account", "InputTimes", "device_time"]

Account = tuple[Floats, Floats]
"""Moments, in seconds since the step was submitted, and for how long others had had a lane until then."""


class InputTimes(NamedTuple):
    """When the last input of each task was where, as in ``DividedGap``; arrays of shape (steps, tasks + 1)."""

    made: Floats
    landed: Floats
    left: Floats
    there: Floats


def device_time(
    arrays: GraphArrays,
    started: Floats,
    ended: Floats,
    inputs: InputTimes,
    taken: Sequence[Mapping[Lane, Account]],
) -> tuple[Floats, dict[IdleReason, Floats]]:
    """Busy and idle seconds of the devices, summed over k steps of one graph, by position in ``GraphArrays.places``.

    All arrays have the shape (k, tasks + 1), in seconds since each step was submitted: when tasks ``started`` (∞ for
    never) and ``ended`` (-∞), and those of ``inputs``. The last column means "no task"; the rows of ``arrays.compute``
    are filled up with it. ``taken`` has for each step the accounts of the lanes that other jobs used meanwhile.
    """
    tasks, cells, before, after = in_order(arrays.compute, started, ended)
    # Clocks of threads and devices differ a little: time in which two tasks seem to overlap is counted once.
    begin = np.minimum(np.maximum(started.ravel()[cells], before), after)
    made, landed, left, there = (times.ravel()[cells] for times in inputs)
    gap = DividedGap(before, made, landed, left, there, begin)
    gap = divide_gap(gap, larger=np.maximum, smaller=np.minimum)
    places = arrays.place[tasks].ravel()

    def total(seconds: Floats) -> Floats:
        return summed(seconds.ravel(), places, len(arrays.places))

    idle = {reason: total(seconds) for reason, seconds in gap.seconds(_shared(arrays, taken, gap)).items()}
    idle[IdleReason.DRAIN] = _drained(arrays, tasks, ended, after[:, :, -1])
    return total(after - begin), idle


def _shared(arrays: GraphArrays, taken: Sequence[Mapping[Lane, Account]], gap: DividedGap) -> Floats:
    """The seconds in which others had the device while each task, or a copy for it, waited for its dispatch.

    What computes waits for the lane that computes, and copies for any: on a CPU one thread serves all lanes.
    """
    copies, compute = np.zeros_like(gap.free), np.zeros_like(gap.free)
    for step, accounts in enumerate(taken):
        for lane, account in accounts.items():
            row = step, arrays.devices.index((lane.device,))
            copies[row] += np.interp(gap.left[row], *account) - np.interp(gap.landed[row], *account)
            if lane.queue is Queue.COMPUTE:
                compute[row] += np.interp(gap.begins[row], *account) - np.interp(gap.there[row], *account)
    # Lanes may have been taken at the same time.
    shared: Floats = np.minimum(copies, gap.left - gap.landed) + np.minimum(compute, gap.begins - gap.there)
    return shared


def _drained(arrays: GraphArrays, tasks: Numbers, ended: Floats, last: Floats) -> Floats:
    """Seconds from each device's ``last`` moment of work to the end of its step, by place."""
    left = np.maximum(ended.max(axis=1), 0.0)[:, np.newaxis] - last
    ran = (ended > -np.inf)[:, arrays.compute].sum(axis=2)
    final = np.take_along_axis(tasks, np.maximum(ran - 1, 0)[:, :, np.newaxis], axis=2)[:, :, 0]
    places = np.where(ran > 0, arrays.place[final], arrays.home)
    return summed(left.ravel(), places.ravel(), len(arrays.places))
