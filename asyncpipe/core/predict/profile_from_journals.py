"""The costs of layers, tasks and transfers between devices, computed from the journals of measured steps.

Two kinds of steps are measured: *fine* ones, where every layer is a stage, and *coarse* ones with few stages::

    fine     │ o + layer 0 │ o + layer 1 │ o + layer 2 │ …          L tasks, each with its overhead o
    coarse   │ o + layers 0, 1, 2 … │ …                             S tasks
    ────────────────────────────────────────────────────
    so       o = (fine - coarse) / (L - S), and no more than the shortest fine task

Between two tasks on a device that did not wait for anything else there is a *gap*, which is added to the overhead.
Between the end of a task and the start of its dependent on another, idle device there are a gap and the *latency*.
Times are means over the micro-batches of a step, and medians over steps, so that they add up to a typical step, not to
the best one.

Tasks of a kind do not all take the same time, and a task that waits for several waits for the slowest. So a real step
takes longer than a simulated one whose tasks all take the mean. The ratio of the two, the *stretch*, is measured on the
coarse steps, and all times are multiplied by it. On a quiet machine it is about 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from itertools import pairwise
from math import inf
from statistics import fmean, median
from typing import NamedTuple

from asyncpipe.core.graph.task import WHOLE_STEP, Lane, Queue, Task
from asyncpipe.core.kinds import COMPUTE_KINDS, COPY_KINDS, TaskKind
from asyncpipe.core.predict.layer_profile import LayerCosts, Measurement, SelectiveCosts, SentTensor, message_sizes
from asyncpipe.core.predict.report import TaskTime, report
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.records.step_record import StepRecord

__all__ = ["MeasuredStep", "StepVariant", "combine", "layer_seconds", "task_seconds"]

_F, _R, _B = TaskKind.FORWARD, TaskKind.RECOMPUTE, TaskKind.BACKWARD
_I, _W = TaskKind.INPUT_GRADIENT, TaskKind.WEIGHT_GRADIENT
_COPIED = (*COPY_KINDS, TaskKind.SUM)
"""Kinds whose costs follow from their bytes."""


class StepVariant(StrEnum):
    """How the backwards of a measured step run."""

    KEPT = "kept"
    """Nothing is recomputed, backwards are whole."""
    RECOMPUTED = "recomputed"
    """Every micro-batch is recomputed."""
    SELECTIVE = "selective"
    """Every micro-batch is recomputed, but for what products have made."""
    SPLIT = "split"
    """Nothing is recomputed, backwards are split."""
    UPDATED = "updated"
    """As kept, and optimizers update the stages."""


class MeasuredStep(NamedTuple):
    """One measured step: the seconds that the caller waited for it, and its record."""

    seconds: float
    record: StepRecord


StepsByVariant = Mapping[StepVariant, Sequence[MeasuredStep]]


def layer_seconds(step: MeasuredStep) -> list[float]:
    """For each stage of a step, the seconds of a micro-batch there, summed over all kinds of tasks."""
    means = task_seconds([step])
    stages = step.record.graph.rows.stages
    return [sum(means.get((kind, stage), 0.0) for kind in COMPUTE_KINDS) for stage in range(stages)]


def combine(
    fine: StepsByVariant,
    coarse: StepsByVariant,
    saved: Sequence[int],
    working: Sequence[int],
    *,
    instant: bool,
    sent: Sequence[SentTensor],
    products: Sequence[int] = (),
    added: int = 0,
    updated: int = 0,
) -> Measurement:
    """The costs that follow from fine and coarse steps.

    ``saved`` and ``working`` are the bytes of each layer (``LayerCosts``). ``instant`` says that tensors are passed
    between devices without a copy. Steps of the variant ``kept`` are required. Without steps of ``recomputed``, a
    recomputation costs a forward; without steps of ``split``, I and W cost half a backward each. With steps of
    ``selective``, ``products`` are the bytes that each layer keeps there. ``sent`` is what travels, ``added`` how
    many bytes of tied parameters' gradients a coarse step adds to others, and ``updated`` how many bytes of parameters
    its optimizers update in the variant of that name.
    """
    forward, o_forward = _share((_F,), fine[StepVariant.KEPT], coarse[StepVariant.KEPT])
    backward, o_backward = _share((_B,), fine[StepVariant.KEPT], coarse[StepVariant.KEPT])
    light, again, o_again = forward, forward, o_forward
    if fine.get(StepVariant.RECOMPUTED):
        light, _ = _share((_F,), fine[StepVariant.RECOMPUTED], coarse[StepVariant.RECOMPUTED])
        again, o_again = _share((_R,), fine[StepVariant.RECOMPUTED], coarse[StepVariant.RECOMPUTED])
    if fine.get(StepVariant.SPLIT):
        # I and W share one overhead: how a backward divides between them depends on where stages begin.
        halves, o_half = _share((_I, _W), fine[StepVariant.SPLIT], coarse[StepVariant.SPLIT])
        inputs, weights = halves[: len(forward)], halves[len(forward) :]
    else:
        inputs = weights = [seconds / 2 for seconds in backward]
        o_half = o_backward
    gap, handoff = _waits(coarse[StepVariant.KEPT])
    stretch = _stretch(coarse, gap, max(0.0, handoff - gap))
    messages = message_sizes(sent, range(len(saved)))
    copying, bandwidth = (0.0, inf) if instant else _transfers(fine[StepVariant.KEPT], messages)
    columns = [[stretch * each for each in row] for row in (forward, light, again, backward, inputs, weights)]
    kinds = zip((_F, _R, _B, _I, _W), (o_forward, o_again, o_backward, o_half, o_half), strict=True)
    layers = list(map(LayerCosts, *columns, saved, working))
    if fine.get(StepVariant.SELECTIVE) and coarse.get(StepVariant.SELECTIVE):
        pair = fine[StepVariant.SELECTIVE], coarse[StepVariant.SELECTIVE]
        rows = [[stretch * each for each in _share((kind,), *pair)[0]] for kind in (_F, _R)]
        chosen = map(SelectiveCosts, *rows, products)
        layers = [replace(layer, selective=each) for layer, each in zip(layers, chosen, strict=True)]
    return Measurement(
        layers=tuple(layers),
        overhead={kind.value: stretch * (overhead + gap) for kind, overhead in kinds},
        step=max(0.0, median(step.seconds - report(step.record).seconds for step in coarse[StepVariant.KEPT])),
        latency=stretch * max(0.0, handoff - gap - copying),
        bandwidth=bandwidth,
        sent=tuple(sent),
        adding=_speed(TaskKind.SUM, coarse[StepVariant.KEPT], added) / stretch,
        updating=_speed(TaskKind.UPDATE, coarse.get(StepVariant.UPDATED, ()), updated) / stretch,
    )


def _share(
    kinds: tuple[TaskKind, ...], fine: Sequence[MeasuredStep], coarse: Sequence[MeasuredStep]
) -> tuple[list[float], float]:
    """The seconds of each layer without overhead, kind by kind, and the overhead of a task."""
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
    """The ratio of measured steps to simulated ones whose tasks all take the mean."""
    measured = simulated = 0.0
    for variant, steps in variants.items():
        if variant is StepVariant.UPDATED:
            continue
        means = task_seconds(steps)

        def cost(task: Task, means: Mapping[tuple[TaskKind, int], float] = means) -> float:
            return latency if task.kind is TaskKind.COPY else means.get((task.kind, task.stage), 0.0) + gap

        measured += median(report(step.record).seconds for step in steps)
        simulated += report(simulate(steps[0].record.graph, cost)).seconds
    return measured / simulated if simulated else 1.0


def _by_stage(kind: TaskKind, steps: Sequence[MeasuredStep]) -> list[float]:
    means = task_seconds(steps)
    return [means[kind, stage] for stage in range(steps[0].record.graph.rows.stages)]


def task_seconds(steps: Iterable[MeasuredStep]) -> dict[tuple[TaskKind, int], float]:
    """The seconds of a task of each kind and stage: the mean over micro-batches, the median over steps.

    Stages are those of one replica: the mean is also over replicas, and of A and G over buckets.
    """
    columns: dict[tuple[TaskKind, int], list[float]] = defaultdict(list)
    for step in steps:
        times: dict[tuple[TaskKind, int], list[float]] = defaultdict(list)
        for time in report(step.record).tasks:
            if time.task.kind not in _COPIED:
                times[time.task.kind, time.task.stage % step.record.graph.rows.stages].append(time.seconds)
        for key, seconds in times.items():
            columns[key].append(fmean(seconds))
    return {key: median(column) for key, column in columns.items()}


def _waits(steps: Iterable[MeasuredStep]) -> tuple[float, float]:
    """The gap between two tasks of a busy device, and the time from a task's end to the start of a remote dependent."""
    columns: dict[bool, list[float]] = defaultdict(list)
    for step in steps:
        found: dict[bool, list[float]] = defaultdict(list)
        for busy, seconds in _pauses(step.record):
            found[busy].append(seconds)
        for busy, pauses in found.items():
            columns[busy].append(fmean(pauses))
    return median(columns[True] or [0.0]), median(columns[False] or [0.0])


def _pauses(record: StepRecord) -> Iterator[tuple[bool, float]]:
    """(busy, seconds) for each task whose delay has one cause.

    If the task waited for its device only, busy is true, and the seconds count from the end of the task before. If the
    device was idle, busy is false, and the seconds count from the end of the last dependency.
    """
    times = {time.task.number: time for time in report(record).tasks}
    lanes: dict[Lane, list[TaskTime]] = defaultdict(list)
    for time in times.values():
        if time.task.lane.queue is Queue.COMPUTE:
            lanes[time.task.lane].append(time)
    for lane in lanes.values():
        for before, after in pairwise(sorted(lane, key=lambda time: time.start)):
            # An order edge to the task before is not a cause: that task has ended anyway.
            makers = [k for k in _made_by(record, after.task.number) if k != before.task.number]
            ready = max((times[k].end for k in makers), default=0.0)
            if ready <= before.start and not any(
                # A copy that ran while the task before ended is what the task waited for.
                times[k].start < before.end < times[k].end
                for k in record.graph.dependencies[after.task.number]
            ):
                yield True, after.start - before.end
            elif ready > before.end:
                yield False, after.start - ready


def _made_by(record: StepRecord, task: int) -> Iterator[int]:
    """The compute tasks that ``task`` waits for, directly or through copies."""
    for dependency in record.graph.dependencies[task]:
        if record.graph.tasks[dependency].kind is TaskKind.COPY:
            yield from record.graph.read_by(dependency)
        else:
            yield dependency


def _transfers(steps: Iterable[MeasuredStep], messages: Mapping[tuple[int, int], int]) -> tuple[float, float]:
    """The mean seconds of a copy between layers, and the bytes per second."""
    seconds: list[float] = []
    moved = 0
    for step in steps:
        for time in report(step.record).tasks:
            source, stage = time.task.source, time.task.stage
            if source is not None and time.task.microbatch != WHOLE_STEP:
                seconds.append(time.seconds)
                moved += messages.get((min(source, stage), max(source, stage)), 0)
    if not seconds or not sum(seconds) or not moved:
        return 0.0, inf
    return fmean(seconds), moved / sum(seconds)


def _speed(kind: TaskKind, steps: Sequence[MeasuredStep], size: int) -> float:
    """The bytes per second that tasks of ``kind`` handle, ``size`` in each of ``steps``."""
    seconds = sum(time.seconds for step in steps for time in report(step.record).tasks if time.task.kind is kind)
    return size * len(steps) / seconds if seconds else inf
