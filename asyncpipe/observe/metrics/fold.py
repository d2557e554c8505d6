"""What completed steps add to the metrics: all steps of one graph at once, as arrays of shape (steps, tasks).

The times of one task, and what they are counted as::

    produced ≤ arrived                       started            ended
        ┊         ┊◀──────── queue ──────────▶├───── duration ────┤
        └ the last of the task's inputs was computed, then copied to the task's device

``idle_time.py`` divides the gaps between the tasks of a device. Sums and buckets are indexed by the positions of labels
in ``GraphArrays``, so a label is looked up once a series and not once a task.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from asyncpipe.core.engine.events import Outcome
from asyncpipe.core.records.worker_notes import WorkerState
from asyncpipe.observe.metrics.graph_arrays import Floats, GraphArrays, Numbers, in_order, summed
from asyncpipe.observe.metrics.idle_time import InputTimes, device_time
from asyncpipe.observe.metrics.metric_table import HISTOGRAMS, Labels
from asyncpipe.observe.metrics.step_arrays import StepArrays
from asyncpipe.observe.metrics.totals import Totals, bucket_of

__all__ = ["add_notes", "fold"]


def fold(totals: Totals, steps: Sequence[StepArrays], arrays: GraphArrays) -> None:
    """Add the times of ``steps`` to ``totals``; ``arrays`` are those of the graph that all of them ran."""
    started, ended = _stacked(steps, "started", inf), _stacked(steps, "ended", -inf)
    inputs = _input_times(steps, arrays, started, ended)
    done = ended[:, :-1] > -inf
    duration, queued = np.zeros(done.shape), np.zeros(done.shape)
    np.subtract(ended[:, :-1], started[:, :-1], out=duration, where=done)
    np.subtract(started[:, :-1], inputs.there[:, :-1], out=queued, where=done)
    queued.clip(min=0.0, out=queued)
    completed = summed(done.sum(axis=0).astype(np.float64), arrays.kind, len(arrays.kinds))
    for kind, count in zip(arrays.kinds, completed.tolist(), strict=True):
        for outcome, number in (("completed", count), ("failed", 0), ("dropped", 0)):
            totals.add("tasks", (kind, outcome), number)
    _observe(totals, "task_duration_seconds", arrays.sorts, arrays.sort, duration, done)
    _observe(totals, "task_queue_seconds", arrays.devices, arrays.device, queued, done)
    seconds = np.maximum(ended.max(axis=1), 0.0)
    whole = [row for row, step in enumerate(steps) if step.outcome is Outcome.OK]
    if whole:
        totals.observe("step_duration_seconds", (), seconds[whole])
        ready = summed(queued[whole[-1]], arrays.device, len(arrays.devices)) / (float(seconds[whole[-1]]) or inf)
        totals.set("ready_tasks", dict(zip(arrays.devices, ready.tolist(), strict=True)))
    taken = duration.sum(axis=0)
    _add(totals, "copy_seconds", arrays.routes, summed(taken[arrays.copies], arrays.route, len(arrays.routes)))
    for step, ran in zip(steps, duration, strict=True):
        if step.issued is not None:
            taken += np.where(np.isnan(step.issued), ran, step.issued) - ran
    _add(totals, "executor_busy_seconds", arrays.devices, summed(taken, arrays.device, len(arrays.devices)))
    copied = np.concatenate([step.copied for step in steps])
    sizes = np.concatenate([step.copied_bytes for step in steps])
    route = arrays.route[np.searchsorted(arrays.copies, copied)]
    _add(totals, "copy_bytes", arrays.routes, summed(sizes, route, len(arrays.routes)))
    wakeups = np.concatenate([step.wakeups for step in steps])
    if len(wakeups):
        totals.observe("scheduler_loop_lag_seconds", (), wakeups[:, 0])
        totals.observe("scheduler_dispatch_seconds", (), wakeups[:, 1])
    busy, idle = device_time(arrays, started, ended, inputs, [step.taken for step in steps])
    _add(totals, "stage_busy_seconds", arrays.places, busy)
    for reason, idle_seconds in idle.items():
        _add(totals, "stage_idle_seconds", [(*place, reason.value) for place in arrays.places], idle_seconds)


def add_notes(totals: Totals, step: StepArrays) -> None:
    """Add what is told once a step: how it ended, and what was noted of compilations, memory, workers and edges."""
    for outcome in Outcome:
        totals.add("steps", (outcome.value,), step.outcome is outcome)
    for task, how in step.lost:
        totals.add("tasks", (step.graph.tasks[task].kind.value, how), 1)
    for made in step.compilations:
        reason = "eager" if made.kind == "eager" else "again" if made.again else "first"
        totals.add("compilations", (str(made.stage), reason), 1)
        totals.add("compile_seconds", (str(made.stage),), made.seconds)
        totals.add("graph_breaks", (str(made.stage),), len(made.graph_breaks))
    totals.set("last_step_timestamp_seconds", {(): step.at})
    for name in ("allocated", "peak", "limit") if step.memory else ():
        totals.set(f"memory_{name}_bytes", {(device,): getattr(held, name) for device, held in step.memory.items()})
    if step.streams:
        totals.set("streams", {(device,): count for device, count in step.streams.items()})
    if step.workers:
        _add_workers(totals, step)


def _add_workers(totals: Totals, step: StepArrays) -> None:
    notes = {(name,): worker for name, worker in step.workers.items()}
    totals.set("worker_up", {name: worker.state is WorkerState.UP for name, worker in notes.items()})
    totals.set("worker_round_trip_seconds", {name: worker.round_trip for name, worker in notes.items()})
    totals.set("worker_clock_offset_seconds", {name: worker.clock_offset for name, worker in notes.items()})
    uses = {name: worker.use for name, worker in notes.items() if worker.use is not None}
    if uses:
        totals.set("worker_resident_bytes", {name: use.resident_bytes for name, use in uses.items()})
    for (source,), use in uses.items():
        for receiver, sent in use.sent.items():
            totals.add("edge_messages", (source, receiver), sent.messages)
            totals.add("edge_bytes", (source, receiver), sent.bytes)
            totals.add("edge_waiting_seconds", (source, receiver), sent.waited_seconds)


def _stacked(steps: Sequence[StepArrays], name: str, missing: float) -> Floats:
    """One array of all steps, in seconds since their submission, with a last column for "no task"."""
    stack = np.full((len(steps), len(steps[0].started) + 1), missing)
    for row, step in zip(stack, steps, strict=True):
        np.subtract(getattr(step, name), step.submitted, out=row[:-1])
    return stack


def _input_times(steps: Sequence[StepArrays], arrays: GraphArrays, started: Floats, ended: Floats) -> InputTimes:
    """The times of each task's inputs, in seconds since the step's submission.

    The result of a copy counts as made when the input of the copy was computed, as landed when that had come from the
    other worker, and as left when the copy began. Dependencies that did not complete are ignored.
    """
    came = np.zeros_like(ended)
    opened = np.zeros_like(ended)
    for row, step in enumerate(steps):
        came[row, step.waited] = step.came - step.submitted
        for task, at in step.opened:
            opened[row, task] = max(opened[row, task], at - step.submitted)

    def latest(of_copies: Floats | None = None) -> Floats:
        """When the last input of each task was there, if those that copies bring are where ``of_copies`` says."""
        times = ended
        if of_copies is not None:
            times = ended.copy()
            times[:, arrays.copies] = of_copies[:, arrays.copies]
        found = np.zeros_like(ended)
        np.maximum(arrays.reads.latest(times), 0.0, out=found[:, :-1])
        return found

    computed = latest()
    there = np.maximum(computed, came)
    landed = np.maximum(latest(there), came)
    left = np.maximum(latest(_copies_begun(arrays, started, ended, there)), landed)
    return InputTimes(np.maximum(latest(computed), opened), landed, left, np.maximum(there, opened))


def _copies_begun(arrays: GraphArrays, started: Floats, ended: Floats, there: Floats) -> Floats:
    """When each copy began, where waiting for the copies before it on its lane counts as copying; else -∞."""
    _, cells, before, _ = in_order(arrays.copy_rows, started, ended)
    free = np.zeros_like(ended)
    free.ravel()[cells] = before
    begun = started - np.maximum(free - there, 0.0)
    return np.where(begun < inf, begun, -inf)


def _observe(
    totals: Totals,
    name: str,
    series: Sequence[Labels],
    position: Numbers,
    values: Floats,
    done: NDArray[np.bool_],
) -> None:
    """Count the ``values`` of completed tasks in the histogram ``name``, by each task's ``position`` in ``series``."""
    exponents = HISTOGRAMS[name][2]
    buckets = len(exponents) + 1
    cells = position * buckets + bucket_of(values, exponents)
    counts = np.bincount(cells[done], minlength=len(series) * buckets).reshape(-1, buckets)
    sums = summed(values.sum(axis=0), position, len(series))
    for labels, row, total in zip(series, counts, sums.tolist(), strict=True):
        if row.any():
            totals.count(name, labels, row, total)


def _add(totals: Totals, name: str, series: Sequence[Labels], values: Floats) -> None:
    for labels, value in zip(series, values.tolist(), strict=True):
        totals.add(name, labels, value)
