"""From the journals of measured steps to what a layer, a task and the way between two devices take.

Two kinds of steps were measured: *fine* ones, where every layer is a stage, and *coarse* ones with few stages::

    fine     │ o + layer 0 │ o + layer 1 │ o + layer 2 │ …          L tasks, each with its overhead o
    coarse   │ o + layers 0, 1, 2 … │ …                             S tasks
    ────────────────────────────────────────────────────
    so       o = (fine - coarse) / (L - S), and no more than the shortest fine task

Between two tasks of a device that was not kept waiting lies a *gap*, which is added to the overhead. Between the end
of a task and the start of one on another, idle device lies a gap and the *latency*. Times of a step are means over
its micro-batches, and medians over steps: so they add up to the step that is typical, not to the best one.

Tasks of a kind do not all take the same time, and whoever waits for several waits for the slowest. So a real step
takes longer than one whose tasks all take the mean. By how much is seen on the coarse steps, which are simulated at
their own mean times: all times are multiplied by this *stretch*. On a quiet machine it is about 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from math import inf
from statistics import fmean, median
from typing import Any, NamedTuple

from asyncpipe.core.engine.events import StepRecord
from asyncpipe.core.graph.task import WHOLE_STEP, Lane, Queue, Task
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.layer_profile import LayerCosts, Measurement
from asyncpipe.core.predict.report import TaskTime, report
from asyncpipe.core.predict.simulate import simulate

__all__ = ["MeasuredStep", "StepVariant", "combine", "layer_seconds"]

_F, _R, _B = TaskKind.FORWARD, TaskKind.RECOMPUTE, TaskKind.BACKWARD
_I, _W = TaskKind.INPUT_GRADIENT, TaskKind.WEIGHT_GRADIENT


class StepVariant(StrEnum):
    """The variants of steps that are measured."""

    KEPT = "kept"
    """Nothing is recomputed, backwards are whole."""
    RECOMPUTED = "recomputed"
    """Every micro-batch is recomputed."""
    SPLIT = "split"
    """Nothing is recomputed, backwards are in halves."""


class MeasuredStep(NamedTuple):
    """One measured step: its seconds as the caller sees them, and its journal."""

    seconds: float
    record: StepRecord


StepsByVariant = Mapping[StepVariant, Sequence[MeasuredStep]]


def layer_seconds(step: MeasuredStep) -> list[float]:
    """What each stage of one step took for a micro-batch, all kinds of tasks together."""
    means = _means([step])
    stages = step.record.graph.shape.stages
    return [sum(seconds for (_, at), seconds in means.items() if at == stage) for stage in range(stages)]


def combine(
    fine: StepsByVariant, coarse: StepsByVariant, sizes: Sequence[Mapping[str, int]], *, instant: bool
) -> Measurement:
    """What was measured, from steps whose stages are layers and steps with few stages.

    ``sizes`` are the bytes of each layer, by the names of ``LayerCosts``. ``instant`` says that tensors are handed
    over as they are. Steps of the variant ``kept`` must be there. Without those of ``recomputed``, recomputing counts
    as a forward; without those of ``split``, the halves of a backward count half of it each.
    """
    forward, o_forward = _share((_F,), fine[StepVariant.KEPT], coarse[StepVariant.KEPT])
    backward, o_backward = _share((_B,), fine[StepVariant.KEPT], coarse[StepVariant.KEPT])
    light, again, o_again = forward, forward, o_forward
    if fine.get(StepVariant.RECOMPUTED):
        light, _ = _share((_F,), fine[StepVariant.RECOMPUTED], coarse[StepVariant.RECOMPUTED])
        again, o_again = _share((_R,), fine[StepVariant.RECOMPUTED], coarse[StepVariant.RECOMPUTED])
    if fine.get(StepVariant.SPLIT):
        # Together: which half has what of a backward depends on where stages begin.
        halves, o_half = _share((_I, _W), fine[StepVariant.SPLIT], coarse[StepVariant.SPLIT])
        inputs, weights = halves[: len(forward)], halves[len(forward) :]
    else:
        inputs = weights = [seconds / 2 for seconds in backward]
        o_half = o_backward
    rows = zip(forward, light, again, backward, inputs, weights, sizes, strict=True)
    gap, handoff = _waits(coarse[StepVariant.KEPT])
    stretch = _stretch(coarse, gap, max(0.0, handoff - gap))
    copying, bandwidth = (0.0, inf) if instant else _transfers(fine[StepVariant.KEPT], sizes)
    kinds = zip((_F, _R, _B, _I, _W), (o_forward, o_again, o_backward, o_half, o_half), strict=True)
    return Measurement(
        layers=tuple(LayerCosts(*(stretch * each for each in seconds), **of) for *seconds, of in rows),
        overhead={kind.value: stretch * (overhead + gap) for kind, overhead in kinds},
        step=max(0.0, median(step.seconds - report(step.record).seconds for step in coarse[StepVariant.KEPT])),
        latency=stretch * max(0.0, handoff - gap - copying),
        bandwidth=bandwidth,
    )


def _share(
    kinds: tuple[TaskKind, ...], fine: Sequence[MeasuredStep], coarse: Sequence[MeasuredStep]
) -> tuple[list[float], float]:
    """The seconds of each layer without the task around it, kind by kind, and those of a task."""
    each = [seconds for kind in kinds for seconds in _by_stage(kind, fine)]
    stages = [seconds for kind in kinds for seconds in _by_stage(kind, coarse)]
    surplus = len(each) - len(stages)
    overhead = (sum(each) - sum(stages)) / surplus if surplus else 0.0
    overhead = min(max(0.0, overhead), *each)
    bare = [seconds - overhead for seconds in each]
    wanted = max(0.0, sum(stages) - overhead * len(stages))
    factor = wanted / sum(bare) if sum(bare) > 0 else 0.0
    return [seconds * factor for seconds in bare], overhead


def _stretch(variants: StepsByVariant, gap: float, latency: float) -> float:
    """How much longer steps take than simulated ones whose tasks all take the mean."""
    measured = simulated = 0.0
    for steps in variants.values():
        means = _means(steps)

        def cost(task: Task, means: Mapping[tuple[TaskKind, int], float] = means) -> float:
            return latency if task.kind is TaskKind.COPY else means.get((task.kind, task.stage), 0.0) + gap

        measured += median(report(step.record).seconds for step in steps)
        simulated += report(simulate(steps[0].record.graph, cost)).seconds
    return measured / simulated if simulated else 1.0


def _by_stage(kind: TaskKind, steps: Sequence[MeasuredStep]) -> list[float]:
    means = _means(steps)
    return [means[kind, stage] for stage in range(steps[0].record.graph.shape.stages)]


def _means(steps: Iterable[MeasuredStep]) -> dict[tuple[TaskKind, int], float]:
    """What a task of each kind and stage takes: the mean over micro-batches, the median over steps."""
    columns: dict[tuple[TaskKind, int], list[float]] = defaultdict(list)
    for step in steps:
        times: dict[tuple[TaskKind, int], list[float]] = defaultdict(list)
        for time in report(step.record).tasks:
            if time.task.lane.queue is Queue.COMPUTE and time.task.microbatch != WHOLE_STEP:
                times[time.task.kind, time.task.stage].append(time.seconds)
        for key, seconds in times.items():
            columns[key].append(fmean(seconds))
    return {key: median(column) for key, column in columns.items()}


def _waits(steps: Iterable[MeasuredStep]) -> tuple[float, float]:
    """The gap between two tasks of a busy device, and from a task's end to the start of what waits elsewhere."""
    gaps: list[float] = []
    handoffs: list[float] = []
    for step in steps:
        found: dict[bool, list[float]] = {True: [], False: []}
        for busy, seconds in _pauses(step.record):
            found[busy].append(seconds)
        gaps += [fmean(found[True])] if found[True] else []
        handoffs += [fmean(found[False])] if found[False] else []
    return (median(gaps) if gaps else 0.0), (median(handoffs) if handoffs else 0.0)


def _pauses(record: StepRecord) -> Iterator[tuple[bool, float]]:
    """For each task that did not wait for its device (false), or for nothing else (true): how late it began."""
    times = {time.task.number: time for time in report(record).tasks}
    lanes: dict[Lane, list[TaskTime]] = defaultdict(list)
    for time in times.values():
        if time.task.lane.queue is Queue.COMPUTE:
            lanes[time.task.lane].append(time)
    for lane in lanes.values():
        for before, after in pairwise(sorted(lane, key=lambda time: time.start)):
            # The schedule's order is no reason: what came before is over anyway.
            makers = [k for k in _made_by(record, after.task.number) if k != before.task.number]
            ready = max((times[k].end for k in makers), default=0.0)
            if ready <= before.start and not any(
                # A copy that was under way, and not queued behind this very task, is what was waited for.
                times[k].start < before.end < times[k].end
                for k in record.graph.dependencies[after.task.number]
            ):
                yield True, after.start - before.end
            elif ready > before.end:
                yield False, after.start - ready


def _made_by(record: StepRecord, task: int) -> Iterator[int]:
    """The compute tasks that ``task`` waits for, through copies."""
    for dependency in record.graph.dependencies[task]:
        if record.graph.tasks[dependency].kind is TaskKind.COPY:
            yield from record.graph.dependencies[dependency]
        else:
            yield dependency


def _transfers(steps: Iterable[MeasuredStep], sizes: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Seconds of a copy, and bytes per second, of copies between neighbouring layers."""
    seconds: list[float] = []
    moved = 0
    for step in steps:
        for time in report(step.record).tasks:
            source, stage = time.task.source, time.task.stage
            if source is not None and time.task.microbatch != WHOLE_STEP and abs(source - stage) == 1:
                seconds.append(time.seconds)
                moved += sizes[min(source, stage)]["output"]
    if not seconds or not sum(seconds) or not moved:
        return 0.0, inf
    return fmean(seconds), moved / sum(seconds)
