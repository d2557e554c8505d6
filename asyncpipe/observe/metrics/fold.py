"""What completed steps add to the metrics: all steps of one graph at once, as arrays of shape (steps, tasks).

The times of one task, and what they are counted as::

    produced ≤ arrived                       started            ended
        ┊         ┊◀──────── queue ──────────▶├───── duration ────┤
        └ the last of the task's inputs was computed, then copied to the task's device

``idle_time.py`` divides the gaps between the tasks of a device. Sums and buckets are indexed by the positions of labels
in ``GraphArrays``, so a label is looked up once a series and not once a task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from asyncpipe.core.engine.events import Outcome
from asyncpipe.core.records.worker_notes import WorkerNotes, WorkerState
from asyncpipe.observe.metrics.graph_arrays import Floats, GraphArrays, Numbers, in_order, summed
from asyncpipe.observe.metrics.idle_time import InputTimes, device_time
from asyncpipe.observe.metrics.metric_table import HISTOGRAMS, Labels
from asyncpipe.observe.metrics.step_arrays import StepArrays
from asyncpipe.observe.metrics.totals import Totals, bucket_of

__all__ = ["fold"]


class _TaskTimes:
    """Times of tasks, of shape (steps, tasks), in seconds; 0 for the tasks that did not complete."""

    def __init__(self, started: Floats, ended: Floats, arrived: Floats) -> None:
        self.started, self.ended = started, ended
        """(steps, tasks + 1), since the submission; ∞ and -∞ for "no task" and where a task did not complete."""
        self.done = done = ended[:, :-1] > -inf
        self.duration = np.subtract(ended[:, :-1], started[:, :-1], out=np.zeros(done.shape), where=done)
        self.queued = np.subtract(started[:, :-1], arrived[:, :-1], out=np.zeros(done.shape), where=done).clip(min=0.0)
        self.seconds = np.maximum(ended.max(axis=1), 0.0)
        """The duration of each step."""


def fold(steps: Sequence[StepArrays], arrays: GraphArrays) -> Totals:
    """What ``steps`` add to the totals; ``arrays`` are those of the graph that all of them ran."""
    change = Totals()
    started, ended = _stacked(steps, "started", inf), _stacked(steps, "ended", -inf)
    inputs = _input_times(steps, arrays, started, ended)
    times = _TaskTimes(started, ended, inputs.there)
    _count(change, steps, arrays, times)
    _add_seconds(change, steps, arrays, times)
    busy, idle = device_time(arrays, started, ended, inputs, [step.taken for step in steps])
    _add(change, "stage_busy_seconds", arrays.places, busy)
    for reason, seconds in idle.items():
        _add(change, "stage_idle_seconds", [(*place, reason.value) for place in arrays.places], seconds)
    _add_notes(change, steps, arrays)
    _set_gauges(change, steps, arrays, times)
    return change


def _stacked(steps: Sequence[StepArrays], name: str, missing: float) -> Floats:
    """One array of all steps, in seconds since their submission, with a last column for "no task"."""
    stack = np.full((len(steps), len(steps[0].started) + 1), missing)
    for row, step in zip(stack, steps, strict=True):
        np.subtract(getattr(step, name), step.submitted, out=row[:-1])
    return stack


def _input_times(steps: Sequence[StepArrays], arrays: GraphArrays, started: Floats, ended: Floats) -> InputTimes:
    """The times of each task's inputs, in seconds since the step's submission.

    The result of a copy counts as produced when the input of the copy was computed, and as landed when that had come
    from the other worker. Dependencies that did not complete are ignored.
    """
    arrived = np.zeros_like(ended)
    np.maximum(arrays.reads.latest(ended), 0.0, out=arrived[:, :-1])
    made = ended.copy()
    made[:, arrays.copies] = arrived[:, arrays.copies]
    produced = arrived.copy()
    produced[:, arrays.fed] = np.maximum(arrays.fed_reads.latest(made), 0.0)
    landed = produced
    if any(len(step.waited) for step in steps):
        came = _messages_came(steps, ended)
        np.maximum(arrived, came, out=arrived)
        made[:, arrays.copies] = arrived[:, arrays.copies]
        landed = np.maximum(produced, came)
        landed[:, arrays.fed] = np.maximum(arrays.fed_reads.latest(made), landed[:, arrays.fed])
    made[:, arrays.copies] = _copies_begun(arrays, started, ended, arrived)
    sent = landed.copy()
    sent[:, arrays.fed] = np.maximum(arrays.fed_reads.latest(made), sent[:, arrays.fed])
    for row, step in enumerate(steps):
        for task, opened in step.opened:
            since = opened - step.submitted
            produced[row, task] = max(produced[row, task], since)
            arrived[row, task] = max(arrived[row, task], since)
    return InputTimes(produced, landed, sent, arrived)


def _messages_came(steps: Sequence[StepArrays], ended: Floats) -> Floats:
    """When the last message from another worker came for each task, in seconds since the step's submission."""
    came = np.full_like(ended, -inf)
    for row, step in zip(came, steps, strict=True):
        row[step.waited] = step.came - step.submitted
    return came


def _copies_begun(arrays: GraphArrays, started: Floats, ended: Floats, arrived: Floats) -> Floats:
    """(steps, copies): when each copy began, where waiting for the copies before it on its lane counts as copying."""
    _, cells, before, _ = in_order(arrays.copy_rows, started, ended)
    free = np.zeros_like(ended)
    free.ravel()[cells] = before
    waited = np.maximum(free - arrived, 0.0)[:, arrays.copies]
    begun = started[:, arrays.copies] - waited
    return np.where(begun < inf, begun, -inf)


def _count(change: Totals, steps: Sequence[StepArrays], arrays: GraphArrays, times: _TaskTimes) -> None:
    """Count steps and tasks by outcome, and their durations and queue times in histograms."""
    for outcome in Outcome:
        change.add("steps", (outcome.value,), sum(step.outcome is outcome for step in steps))
    completed = summed(times.done.sum(axis=0).astype(np.float64), arrays.kind, len(arrays.kinds))
    for kind, count in zip(arrays.kinds, completed.tolist(), strict=True):
        for outcome_of_task, number in (("completed", count), ("failed", 0), ("dropped", 0)):
            change.add("tasks", (kind, outcome_of_task), number)
    for step in steps:
        for task, how in step.lost:
            change.add("tasks", (arrays.kinds[arrays.kind[task]], how), 1)
    _observe(change, "task_duration_seconds", arrays.sorts, arrays.sort, times.duration, times.done)
    _observe(change, "task_queue_seconds", arrays.devices, arrays.device, times.queued, times.done)
    whole = times.seconds[[step.outcome is Outcome.OK for step in steps]]
    if len(whole):
        change.observe("step_duration_seconds", (), whole)


def _observe(
    change: Totals,
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
            change.count(name, labels, row, total)


def _add(change: Totals, name: str, series: Sequence[Labels], values: Floats) -> None:
    for labels, value in zip(series, values.tolist(), strict=True):
        change.add(name, labels, value)


def _add_seconds(change: Totals, steps: Sequence[StepArrays], arrays: GraphArrays, times: _TaskTimes) -> None:
    """Add the seconds of copies and of the devices' host threads."""
    taken = times.duration.sum(axis=0)
    _add(change, "copy_seconds", arrays.routes, summed(taken[arrays.copies], arrays.route, len(arrays.routes)))
    for step, duration in zip(steps, times.duration, strict=True):
        if step.issued is not None:
            taken += np.where(np.isnan(step.issued), duration, step.issued) - duration
    busy = summed(taken, arrays.device, len(arrays.devices))
    _add(change, "executor_busy_seconds", arrays.devices, busy)


def _add_notes(change: Totals, steps: Sequence[StepArrays], arrays: GraphArrays) -> None:
    """Add what was noted beside the journals: bytes of copies and edges, compilations, wake-ups of the scheduler."""
    copied = np.concatenate([step.copied for step in steps])
    sizes = np.concatenate([step.copied_bytes for step in steps])
    route = arrays.route[np.searchsorted(arrays.copies, copied)]
    _add(change, "copy_bytes", arrays.routes, summed(sizes, route, len(arrays.routes)))
    for step in steps:
        for source, worker in step.workers.items():
            for receiver, sent in worker.use.sent.items() if worker.use is not None else ():
                change.add("edge_messages", (source, receiver), sent.messages)
                change.add("edge_bytes", (source, receiver), sent.bytes)
                change.add("edge_waiting_seconds", (source, receiver), sent.waited_seconds)
        for made in step.compilations:
            reason = "eager" if made.kind == "eager" else "again" if made.again else "first"
            change.add("compilations", (str(made.stage), reason), 1)
            change.add("compile_seconds", (str(made.stage),), made.seconds)
            change.add("graph_breaks", (str(made.stage),), len(made.graph_breaks))
    wakeups = np.concatenate([step.wakeups for step in steps])
    if len(wakeups):
        change.observe("scheduler_loop_lag_seconds", (), wakeups[:, 0])
        change.observe("scheduler_dispatch_seconds", (), wakeups[:, 1])


def _set_gauges(change: Totals, steps: Sequence[StepArrays], arrays: GraphArrays, times: _TaskTimes) -> None:
    """Set the gauges to the last step; those that need all of its tasks, to the last step that completed."""
    for step in steps:
        change.set("last_step_timestamp_seconds", {(): step.at}, step.at)
        for name in ("allocated", "peak", "limit") if step.memory else ():
            found: dict[Labels, float] = {
                (device,): float(getattr(memory, name)) for device, memory in step.memory.items()
            }
            change.set(f"memory_{name}_bytes", found, step.at)
        if step.streams:
            change.set("streams", {(device,): float(count) for device, count in step.streams.items()}, step.at)
        if step.workers:
            _set_workers(change, step.workers, step.at)
    whole = [row for row, step in enumerate(steps) if step.outcome is Outcome.OK]
    row = max(whole, key=lambda row: steps[row].at, default=None)
    if row is None:
        return
    at, seconds = steps[row].at, float(times.seconds[row]) or inf
    waited = summed(times.queued[row], arrays.device, len(arrays.devices)) / seconds
    computed = np.append(times.duration[row], 0.0)[arrays.compute].sum()
    idle = 1.0 - float(computed) / (seconds * len(arrays.devices)) if seconds < inf else 0.0
    change.set("bubble_ratio", {(): idle}, at)
    change.set("ready_tasks", dict(zip(arrays.devices, waited.tolist(), strict=True)), at)
    if len(arrays.releases):
        peaks = _peaks(arrays, times.started[row], times.ended[row])
        change.set("inflight_microbatches", {(str(stage),): float(peak) for stage, peak in enumerate(peaks)}, at)


def _set_workers(change: Totals, workers: Mapping[str, WorkerNotes], at: float) -> None:
    def values(value: Callable[[WorkerNotes], float]) -> dict[Labels, float]:
        return {(name,): value(notes) for name, notes in workers.items()}

    change.set("worker_up", values(lambda notes: float(notes.state is WorkerState.UP)), at)
    change.set("worker_round_trip_seconds", values(lambda notes: notes.round_trip), at)
    change.set("worker_clock_offset_seconds", values(lambda notes: notes.clock_offset), at)
    told: dict[Labels, float] = {
        (name,): float(notes.use.resident_bytes) for name, notes in workers.items() if notes.use is not None
    }
    if told:
        change.set("worker_resident_bytes", told, at)


def _peaks(arrays: GraphArrays, started: Floats, ended: Floats) -> list[int]:
    """Per stage the most micro-batches that were between the start of their forward and the end of their backward."""
    when = np.concatenate([started[arrays.forwards], ended[arrays.releases]])
    change = np.repeat([1, -1], [len(arrays.forwards), len(arrays.releases)])
    stage = np.concatenate([arrays.stage[arrays.forwards], arrays.stage[arrays.releases]])
    # At equal times, ends are counted before starts.
    order = np.lexsort((change, when, stage))
    live, stage = change[order].cumsum(), stage[order]
    # In a whole step every micro-batch leaves each stage, so the running sum is 0 again where the next stage begins.
    peaks = np.zeros(arrays.stages, np.intp)
    np.maximum.at(peaks, stage, live)
    return [int(peak) for peak in peaks]
