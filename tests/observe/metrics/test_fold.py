"""The fold of steps into metrics, compared with a slow reference in plain Python."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from asyncpipe.core.engine.events import (
    Abort,
    Dispatch,
    GateOpened,
    Outcome,
    StepCompleted,
    TaskCompleted,
    TaskDropped,
    TaskFailed,
    TaskIssued,
)
from asyncpipe.core.engine.lane_use import Taken
from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task import Queue
from asyncpipe.core.graph.task_graph import Phase, TaskGraph, Wiring
from asyncpipe.core.predict.idle_reasons import stage_idle
from asyncpipe.core.predict.report import Report, TaskTime, report
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.records.step_notes import DeviceMemory, StepNotes
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.observe.metrics.fold import add_notes, fold
from asyncpipe.observe.metrics.graph_arrays import GraphArrays
from asyncpipe.observe.metrics.metric_table import HISTOGRAMS
from asyncpipe.observe.metrics.step_arrays import StepArrays
from asyncpipe.observe.metrics.totals import Totals

# The reference


@dataclass
class Reference:
    """Counters, values of histograms, and gauges, by name and label values."""

    counters: dict[str, Counter[tuple[str, ...]]] = field(default_factory=lambda: defaultdict(Counter))
    values: dict[tuple[str, tuple[str, ...]], list[float]] = field(default_factory=lambda: defaultdict(list))
    gauges: dict[str, dict[tuple[str, ...], float]] = field(default_factory=dict)

    def add(self, name: str, *labels: str, value: float = 1.0) -> None:
        self.counters[name][labels] += value  # type: ignore[assignment]


def reference(records: Iterable[StepRecord]) -> Reference:
    """The metrics of ``records``, which are in the order in which they ended."""
    found = Reference()
    for number, record in enumerate(records):
        graph, result = record.graph, report(record)
        for outcome in Outcome:
            found.add("steps", outcome.value, value=record.outcome is outcome)
        found.gauges["last_step_timestamp_seconds"] = {(): float(number)}
        count_tasks(found, record)
        busy_and_idle(found, record, result)
        waited = queue_times(found, graph, result)
        executors_and_copies(found, record, result)
        notes(found, record.notes)
        if record.outcome is not Outcome.OK:
            continue
        found.values["step_duration_seconds", ()].append(result.seconds)
        found.gauges["ready_tasks"] = {
            (device,): waited[device] / result.seconds if result.seconds else 0.0 for device in graph.devices
        }
    return found


def count_tasks(found: Reference, record: StepRecord) -> None:
    tasks = record.graph.tasks
    for kind in {task.kind.value for task in tasks}:
        for outcome in ("completed", "failed", "dropped"):
            found.add("tasks", kind, outcome, value=0)
    for _, event in record.journal:
        if isinstance(event, TaskCompleted):
            task = tasks[event.task]
            found.add("tasks", task.kind.value, "completed")
        elif isinstance(event, TaskFailed | TaskDropped):
            found.add("tasks", tasks[event.task].kind.value, "failed" if isinstance(event, TaskFailed) else "dropped")
    for time in report(record).tasks:
        found.values["task_duration_seconds", (str(time.task.stage), time.task.kind.value)].append(time.seconds)


def queue_times(found: Reference, graph: TaskGraph, result: Report) -> dict[str, float]:
    waited: dict[str, float] = defaultdict(float)
    ended = {time.task.number: time.end for time in result.tasks}
    for time in result.tasks:
        number = time.task.number
        arrived = max(0.0, result.gates_opened.get(number, 0.0), result.arrived.get(number, 0.0))
        arrived = max([arrived, *(ended[read] for read in graph.read_by(number) if read in ended)])
        seconds = max(time.start - arrived, 0.0)
        found.values["task_queue_seconds", (time.task.lane.device,)].append(seconds)
        waited[time.task.lane.device] += seconds
    return waited


def busy_and_idle(found: Reference, record: StepRecord, result: Report) -> None:
    graph, cursor = record.graph, dict.fromkeys(record.graph.devices, 0.0)
    for stage, idle in enumerate(stage_idle(record, result)):
        device = graph.devices[graph.placement[stage]]
        found.add("stage_busy_seconds", str(stage), device, value=0)
        for reason, seconds in idle.items():
            found.add("stage_idle_seconds", str(stage), device, reason.value, value=seconds)
    for time in result.tasks:
        device = time.task.lane.device
        if time.task.lane.queue is Queue.COMPUTE:
            start, end = max(time.start, cursor[device]), max(time.end, cursor[device])
            found.add("stage_busy_seconds", str(time.task.stage), device, value=end - start)
            cursor[device] = end


def executors_and_copies(found: Reference, record: StepRecord, result: Report) -> None:
    graph = record.graph
    issued = {event.task: event.seconds for _, event in record.journal if isinstance(event, TaskIssued)}
    ran: dict[int, TaskTime] = {time.task.number: time for time in result.tasks}
    for task in graph.tasks:
        taken = ran[task.number].seconds if task.number in ran else 0.0
        found.add("executor_busy_seconds", task.lane.device, value=issued.get(task.number, taken))
        if task.source is not None:
            route = graph.devices[graph.placement[task.source]], task.lane.device
            found.add("copy_seconds", *route, value=taken)
            found.add("copy_bytes", *route, value=record.notes.copied.get(task.number, 0))


def notes(found: Reference, noted: StepNotes) -> None:
    for late, took in noted.wakeups:
        found.values["scheduler_loop_lag_seconds", ()].append(late)
        found.values["scheduler_dispatch_seconds", ()].append(took)
    for name in DeviceMemory._fields if noted.memory else ():
        found.gauges[f"memory_{name}_bytes"] = {(d,): getattr(memory, name) for d, memory in noted.memory.items()}
    if noted.streams:
        found.gauges["streams"] = {(device,): count for device, count in noted.streams.items()}


def assert_same(totals: Totals, wanted: Reference) -> None:
    for name, counter in wanted.counters.items():
        assert totals.counters[name] == pytest.approx(dict(counter)), name
    assert totals.counters.keys() - wanted.counters.keys() <= {"copy_seconds", "copy_bytes"}
    assert {(name, labels) for name, series in totals.histograms.items() for labels in series} == wanted.values.keys()
    for (name, labels), values in wanted.values.items():
        histogram = totals.histograms[name][labels]
        bounds = [*(2.0**exponent for exponent in HISTOGRAMS[name][2]), inf]
        cumulative = [sum(value <= bound for value in values) for bound in bounds]
        assert histogram.counts.cumsum().tolist() == cumulative, (name, labels)
        assert histogram.total == pytest.approx(sum(values))
    assert totals.gauges == {name: pytest.approx(values, abs=1e-9) for name, values in wanted.gauges.items()}


# Random steps


NAMES = ("gpipe", "1f1b", "zb-h1", "backward-first", "hint", "interleaved", "zbv", "hanayo")


def graph_of(draw: st.DataObject) -> TaskGraph:
    name = draw.draw(st.sampled_from(NAMES))
    devices, microbatches = draw.draw(st.integers(1, 3)), draw.draw(st.integers(1, 5))
    stages = devices * (2 if name in ("interleaved", "zbv", "hanayo") else 1)
    schedule = find_schedule("gpipe", order="hint") if name == "hint" else find_schedule(name)
    shape = Shape(stages, microbatches, devices)
    phase = draw.draw(st.sampled_from([Phase.STEP, Phase.STEP, Phase.FORWARD, Phase.BACKWARD]))
    mode = draw.draw(st.sampled_from(CheckpointMode))
    graph = lower(schedule, shape, checkpoint=mode, phase=phase)
    if phase is not Phase.STEP or draw.draw(st.booleans()):
        return graph
    ties = ((0, stages - 1),) if graph.placement[0] != graph.placement[-1] else ()
    links = {(j, j + 1) for j in range(stages - 1)} | ({(0, stages - 1)} if stages > 1 else set())
    wiring = Wiring(tuple(sorted(links)), ties, tuple(j for j in range(stages) if draw.draw(st.booleans())))
    return lower(schedule, shape, checkpoint=mode, wiring=wiring)


def record_of(graph: TaskGraph, draw: st.DataObject, step: int) -> StepRecord:
    """One step of ``graph`` at random costs, with clocks that are a little off, and perhaps cut short."""
    seed = draw.draw(st.integers(0, 2**32))
    random = np.random.default_rng(seed)
    costs = random.choice([0.0, 0.25, 1.0, 3.0], len(graph.tasks)) * random.random()
    origin = float(random.choice([0.0, 1234.5]))
    off = float(random.choice([0.0, 0.1]))
    asynchronous = bool(random.random() < 0.3)
    journal: list[tuple[float, object]] = []
    for at, event in simulate(graph, lambda task: float(costs[task.number])).journal:
        if isinstance(event, TaskCompleted):
            late = off * random.random()
            moved = event._replace(started=event.started + origin + late, ended=event.ended + origin + late)
            if asynchronous and random.random() < 0.8:
                journal.append((at + origin, TaskIssued(0, event.task, float(random.random()))))
            journal.append((at + origin, moved))
        elif isinstance(event, GateOpened):
            journal.append((origin + float(random.random()), event))
        else:
            journal.append((at + origin, event))
    noted = notes_of(graph, random)
    if random.random() < 0.5:  # Some tasks wait for other workers.
        tasks = [task.number for task in graph.tasks if random.random() < 0.4]
        noted.arrived = {task: origin + float(random.random()) * journal[-1][0] for task in tasks}
    if random.random() < 0.5:  # Other jobs use some of the lanes.
        length = journal[-1][0] - origin
        for lane in graph.lanes:
            if random.random() < 0.7:
                noted.taken[lane] = account_of(np.sort(random.uniform(-0.2, 1.2, 6)) * length + origin)
    record = StepRecord(step, graph, journal, Outcome.OK, noted)  # type: ignore[arg-type]
    outcome = draw.draw(st.sampled_from([Outcome.OK, Outcome.OK, Outcome.FAILED, Outcome.CANCELLED]))
    return record if outcome is Outcome.OK else cut_short(record, int(random.integers(1, len(journal))), outcome)


def notes_of(graph: TaskGraph, random: np.random.Generator) -> StepNotes:
    copies = [task.number for task in graph.tasks if task.source is not None and random.random() < 0.9]
    memory = DeviceMemory(*map(int, random.integers(1, 1000, 3)))
    return StepNotes(
        copied={number: int(random.integers(0, 1 << 40)) for number in copies},
        memory={"cpu": memory} if random.random() < 0.7 else {},
        streams={"cuda:0": int(random.integers(1, 99))} if random.random() < 0.5 else {},
        wakeups=[(float(late), float(took)) for late, took in random.exponential(1e-4, (int(random.integers(4)), 2))],
    )


def account_of(times: NDArray[np.float64]) -> Taken:
    """Another job has the lane from the second time to the third, and so on."""
    account, total = [], 0.0
    for number, at in enumerate(times.tolist()):
        if number and number % 2 == 0:
            total += at - account[-1][0]
        account.append((at, total))
    return tuple(account)


def cut_short(record: StepRecord, kept: int, outcome: Outcome) -> StepRecord:
    """The record, ended after ``kept`` entries of its journal; running tasks fail or are dropped."""
    journal = list(record.journal[:kept])
    held = [event.task for _, event in journal if isinstance(event, Dispatch)]
    ended = {event.task for _, event in journal if isinstance(event, TaskCompleted)}
    at, error = journal[-1][0], ValueError("no")
    for task in (task for task in held if task not in ended):
        if outcome is Outcome.FAILED and not any(isinstance(event, TaskFailed) for _, event in journal):
            journal.append((at, TaskFailed(record.step, task, error)))
        else:
            journal.append((at, TaskDropped(record.step, task)))
    journal += [(at, Abort(record.step)), (at, StepCompleted(record.step, outcome))]
    return replace(record, journal=journal, outcome=outcome)


def folded(steps: Sequence[StepArrays], totals: Totals | None = None) -> Totals:
    totals = totals or Totals()
    fold(totals, steps, GraphArrays(steps[0].graph))
    for step in steps:
        add_notes(totals, step)
    return totals


@given(st.data())
def test_the_fold_is_the_reference(draw: st.DataObject) -> None:
    graph = graph_of(draw)
    records = [record_of(graph, draw, step) for step in range(draw.draw(st.integers(1, 3)))]
    totals = folded([StepArrays(record, float(at)) for at, record in enumerate(records)])
    wanted = reference(records)
    assert_same(totals, wanted)
    busy_and_idle_seconds = sum(
        value for name in ("stage_busy_seconds", "stage_idle_seconds") for value in totals.counters[name].values()
    )
    step_seconds = sum(report(record).seconds for record in records)
    assert busy_and_idle_seconds == pytest.approx(step_seconds * len(graph.devices))
