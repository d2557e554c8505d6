"""From packed steps to what they add to the metrics: all steps of one graph at once, as arrays of (steps, tasks).

A task's row of times, and what the fold makes of it::

    produced ≤ arrived                       started            ended
        ┊         ┊◀──────── queue ──────────▶├───── duration ────┤
        └ the last thing that it reads was computed, and was on its device

Gaps between the tasks of a device are split in ``idle.py``. Buckets and sums are counted by position in the plan's
labels, so that labels are looked up once a series and not once a task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from asyncpipe.core.engine.events import Outcome
from asyncpipe.observe.metrics.idle import device_time
from asyncpipe.observe.metrics.pack import PackedStep
from asyncpipe.observe.metrics.plan import Floats, Numbers, Plan, summed
from asyncpipe.observe.metrics.totals import HISTOGRAMS, Totals, bucket_of

__all__ = ["fold"]


@dataclass(frozen=True, slots=True, eq=False)
class _Times:
    """What tasks did, of shape (steps, tasks), in seconds; those that did not complete take and wait 0."""

    done: NDArray[np.bool_]
    duration: Floats
    queued: Floats
    started: Floats
    """(steps, tasks + 1), since the step was submitted; ∞ for no task and where one did not complete."""
    ended: Floats
    """The same, but -∞."""
    seconds: Floats
    """Of each step."""


def fold(steps: Sequence[PackedStep], plan: Plan) -> Totals:
    """What ``steps``, which all ran the graph of ``plan``, add to the totals."""
    change = Totals()
    started, ended = _stacked(steps, "started", inf), _stacked(steps, "ended", -inf)
    produced, sent, arrived = _reads(steps, plan, started, ended)
    done = ended[:, :-1] > -inf
    times = _Times(
        done=done,
        duration=np.subtract(ended[:, :-1], started[:, :-1], out=np.zeros(done.shape), where=done),
        queued=np.subtract(started, arrived, out=np.zeros(arrived.shape), where=started < inf)[:, :-1].clip(min=0.0),
        started=started,
        ended=ended,
        seconds=np.maximum(ended.max(axis=1), 0.0),
    )
    _count(change, steps, plan, times)
    _add_seconds(change, steps, plan, times)
    used = device_time(plan, started, ended, produced, sent, arrived)
    _add(change, "stage_busy_seconds", plan.places, used.busy)
    for reason, seconds in used.idle.items():
        _add(change, "stage_idle_seconds", [(*place, reason.value) for place in plan.places], seconds)
    _add_notes(change, steps, plan)
    _tell_last(change, steps, plan, times)
    return change


def _stacked(steps: Sequence[PackedStep], name: str, missing: float) -> Floats:
    """One of the arrays of all steps, in seconds since they were submitted, and a column of no task."""
    stack = np.full((len(steps), len(steps[0].started) + 1), missing)
    for row, step in zip(stack, steps, strict=True):
        np.subtract(getattr(step, name), step.submitted, out=row[:-1])
    return stack


def _reads(steps: Sequence[PackedStep], plan: Plan, started: Floats, ended: Floats) -> tuple[Floats, Floats, Floats]:
    """When what each task reads was produced, sent on its way, and had arrived; from the submission of the step on.

    What a copy brings was produced when the copy had what it reads. Dependencies that did not complete do not count.
    """
    arrived = np.zeros_like(ended)
    np.maximum(plan.reads.latest(ended), 0.0, out=arrived[:, :-1])
    made = ended.copy()
    made[:, plan.copies] = arrived[:, plan.copies]
    produced = arrived.copy()
    produced[:, plan.fed] = np.maximum(plan.fed_reads.latest(made), 0.0)
    made[:, plan.copies] = _begun(plan, started, ended, arrived)
    sent = produced.copy()
    sent[:, plan.fed] = np.maximum(plan.fed_reads.latest(made), produced[:, plan.fed])
    for row, step in enumerate(steps):
        for task, opened in step.opened:
            since = opened - step.submitted
            produced[row, task] = max(produced[row, task], since)
            arrived[row, task] = max(arrived[row, task], since)
    return produced, sent, arrived


def _begun(plan: Plan, started: Floats, ended: Floats, arrived: Floats) -> Floats:
    """(steps, copies): when each copy began, the time that it waited for its lane counted as part of it."""
    order = np.argsort(started[:, plan.copy_rows], axis=2, kind="stable")
    tasks = np.take_along_axis(plan.copy_rows[np.newaxis], order, axis=2)
    cells = tasks + ended.shape[1] * np.arange(len(ended))[:, np.newaxis, np.newaxis]
    after = np.maximum.accumulate(ended.ravel()[cells], axis=2)
    free = np.zeros_like(ended)
    free.ravel()[cells[:, :, 1:]] = np.maximum(after[:, :, :-1], 0.0)
    waited = np.maximum(free - arrived, 0.0)[:, plan.copies]
    begun = started[:, plan.copies] - waited
    return np.where(begun < inf, begun, -inf)


def _count(change: Totals, steps: Sequence[PackedStep], plan: Plan, times: _Times) -> None:
    """Steps and tasks by outcome, and the histograms."""
    for outcome in Outcome:
        change.add("steps", (outcome.value,), sum(step.outcome is outcome for step in steps))
    completed = summed(times.done.sum(axis=0).astype(np.float64), plan.kind, len(plan.kinds))
    for kind, count in zip(plan.kinds, completed.tolist(), strict=True):
        for outcome_of_task, number in (("completed", count), ("failed", 0), ("dropped", 0)):
            change.add("tasks", (kind, outcome_of_task), number)
    for step in steps:
        for task, how in step.lost:
            change.add("tasks", (plan.kinds[plan.kind[task]], how), 1)
    _observe(change, "task_duration_seconds", plan.sorts, plan.sort, times.duration, times.done)
    _observe(
        change, "task_queue_seconds", [(device,) for device in plan.devices], plan.device, times.queued, times.done
    )
    whole = times.seconds[[step.outcome is Outcome.OK for step in steps]]
    if len(whole):
        change.observe("step_duration_seconds", (), whole)


def _observe(
    change: Totals,
    name: str,
    series: Sequence[tuple[str, ...]],
    position: Numbers,
    values: Floats,
    done: NDArray[np.bool_],
) -> None:
    """Count ``values`` of completed tasks in the histogram ``name`` of each task's ``position`` in ``series``."""
    exponents = HISTOGRAMS[name][2]
    buckets = len(exponents) + 1
    cells = position * buckets + bucket_of(values, exponents)
    counts = np.bincount(cells[done], minlength=len(series) * buckets).reshape(-1, buckets)
    sums = summed(values.sum(axis=0), position, len(series))
    for labels, row, total in zip(series, counts, sums.tolist(), strict=True):
        if row.any():
            change.count(name, labels, row, total)


def _add(change: Totals, name: str, series: Sequence[tuple[str, ...]], values: Floats) -> None:
    for labels, value in zip(series, values.tolist(), strict=True):
        change.add(name, labels, value)


def _add_seconds(change: Totals, steps: Sequence[PackedStep], plan: Plan, times: _Times) -> None:
    """Seconds of copies, and of the devices' host threads."""
    taken = times.duration.sum(axis=0)
    _add(change, "copy_seconds", plan.routes, summed(taken[plan.copies], plan.route, len(plan.routes)))
    for step, duration in zip(steps, times.duration, strict=True):
        if step.issued is not None:
            taken += np.where(np.isnan(step.issued), duration, step.issued) - duration
    _add(
        change,
        "executor_busy_seconds",
        [(device,) for device in plan.devices],
        summed(taken, plan.device, len(plan.devices)),
    )


def _add_notes(change: Totals, steps: Sequence[PackedStep], plan: Plan) -> None:
    """What was noted beside the journals: bytes of copies, wake-ups of the scheduler."""
    copied = np.concatenate([step.copied for step in steps])
    sizes = np.concatenate([step.copied_bytes for step in steps])
    route = plan.route[np.searchsorted(plan.copies, copied)]
    _add(change, "copy_bytes", plan.routes, summed(sizes, route, len(plan.routes)))
    wakeups = np.concatenate([step.wakeups for step in steps])
    if len(wakeups):
        change.observe("scheduler_loop_lag_seconds", (), wakeups[:, 0])
        change.observe("scheduler_dispatch_seconds", (), wakeups[:, 1])


def _tell_last(change: Totals, steps: Sequence[PackedStep], plan: Plan, times: _Times) -> None:
    """Set the gauges to the last step, those that need all of its tasks to the last one that was whole."""
    for step in steps:
        change.set("last_step_timestamp_seconds", {(): step.at}, step.at)
        for name in ("allocated", "peak", "limit") if step.memory else ():
            found: dict[tuple[str, ...], float] = {
                (device,): float(getattr(memory, name)) for device, memory in step.memory.items()
            }
            change.set(f"memory_{name}_bytes", found, step.at)
    whole = [row for row, step in enumerate(steps) if step.outcome is Outcome.OK]
    row = max(whole, key=lambda row: steps[row].at, default=None)
    if row is None:
        return
    at, seconds = steps[row].at, float(times.seconds[row]) or inf
    waited = summed(times.queued[row], plan.device, len(plan.devices)) / seconds
    computed = np.append(times.duration[row], 0.0)[plan.compute].sum()
    idle = 1.0 - float(computed) / (seconds * len(plan.devices)) if seconds < inf else 0.0
    change.set("bubble_ratio", {(): idle}, at)
    change.set("ready_tasks", {(name,): mean for name, mean in zip(plan.devices, waited.tolist(), strict=True)}, at)
    if len(plan.releases):
        peaks = _peaks(plan, times.started[row], times.ended[row])
        change.set("inflight_microbatches", {(str(stage),): float(peak) for stage, peak in enumerate(peaks)}, at)


def _peaks(plan: Plan, started: Floats, ended: Floats) -> list[int]:
    """Per stage the most micro-batches between the start of their forward and the end of their backward."""
    when = np.concatenate([started[plan.forwards], ended[plan.releases]])
    change = np.repeat([1, -1], [len(plan.forwards), len(plan.releases)])
    stage = np.concatenate([plan.stage[plan.forwards], plan.stage[plan.releases]])
    # Ends count first where one micro-batch leaves at the moment at which another comes.
    order = np.lexsort((change, when, stage))
    live, stage = change[order].cumsum(), stage[order]
    # What came to a stage has left it at the end of a whole step, so that each stage begins to count from 0.
    peaks = np.zeros(plan.stages, np.intp)
    np.maximum.at(peaks, stage, live)
    return [int(peak) for peak in peaks]
