"""The timeline of one step, or of several, as text: a row a lane, a cell a task, dots where the lane is idle.

If all times are multiples of one quantum, as in simulations, each cell is exactly as wide as its task is long::

    dev:0  F0 F1 F2 ·········B2─── B1─── B0───
    dev:1  ···F0 F1 F2 B2─── B1─── B0─── ······

Otherwise time is divided into columns, and a column shows the task that fills most of it. In a terminal the kinds of
tasks may have colours. Where another job had the device, there are shaded cells in the place of dots.

The devices of each replica of the pipeline follow a line with its number.

Several steps share one axis. They may overlap, so each device has a border of its own where a later step begins::

    step   0                             1
    dev:0  F0 F1 I0 W0 ···I1 W1│F0 F1 I0 W0 ···I1 W1
    dev:1  ···F0 I0 F1 I1 W0 W1│F0 I0 F1 I1 W0 W1 ···
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, groupby, takewhile
from math import ceil, floor, gcd, log10

from asyncpipe.core.graph.task import Lane, Queue, Task
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.report import Report, TaskTime, reports, steady_state
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.errors import OptionError

__all__ = [
    "borders",
    "common_devices",
    "format_time",
    "kinds_of",
    "labels",
    "lane_rows",
    "replica_labels",
    "shade",
    "summary",
    "text_timeline",
    "ticks",
]

DEFAULT_WIDTH = 100
"""The columns of a timeline without a quantum if no width is given."""
SHORTEST_TASK = 10
"""The most quanta that the shortest task may have; with more, an exact timeline would be too wide."""
TAKEN = "░"
"""Stands where another job had the device."""
BAR = "│"
"""Stands in the column before the first task of a later step."""
PALEST = 0.55
"""The share of white in the colours of a device's last stage."""
SELF_EVIDENT = {TaskKind.FORWARD, TaskKind.BACKWARD}
"""The kinds whose letters need no explanation; a legend of these alone is left out."""


@dataclass(frozen=True, slots=True)
class _ColumnScale:
    """``columns`` columns of ``seconds`` each."""

    seconds: float
    columns: int


def text_timeline(
    record: StepRecord | Sequence[StepRecord],
    width: int | None = None,
    *,
    copies: bool = False,
    virtual: bool = False,
) -> str:
    """The step as text: a time axis, one row a device, a legend and a line of key figures; ends with a newline.

    Several steps, in the order of their submissions, share one axis; a bar stands where a device begins the next one.
    ``width`` is the number of columns to use; the default is what the labels of an exact timeline need, and 100 for
    others. ``copies`` adds the copy lanes. ``virtual`` times are printed as bare numbers, others with units. Cells read
    ``F0`` (kind and micro-batch), or ``F0.4`` (with the stage) if a device has several stages.
    """
    records = [record] if isinstance(record, StepRecord) else record
    devices, results = common_devices(records), reports(records)
    each = [lane_rows(result, step.graph, copies=copies) for result, step in zip(results, records, strict=True)]
    lanes = [Lane(device, queue) for device in devices for queue in Queue]
    rows = {lane: [*chain.from_iterable(step.get(lane, ()) for step in each)] for lane in lanes}
    rows = {lane: ran for lane, ran in rows.items() if any(lane in step for step in each)}
    longest = max(result.end for result in results)
    if not longest:
        return "no task took any time\n"
    names = [lane.device if lane.queue is Queue.COMPUTE else f"  {lane.queue.value}" for lane in rows]
    above = replica_labels(records[0].graph)
    margin = max(map(len, [*names, "time"])) + 2
    label = labels(records[0].graph)
    shown = list(chain.from_iterable(rows.values()))
    scale = _scale(longest, shown, label, None if width is None else max(width - margin, 10))
    starts = borders(each)
    taken: dict[Lane, list[tuple[float, float]]] = {}
    for result in results:
        for device, spans in result.taken.items():
            taken.setdefault(Lane(device, Queue.COMPUTE), []).extend(spans)
    lines = ["step".ljust(margin) + _steps(records, results, scale)] if len(records) > 1 else []
    lines.append("time".ljust(margin) + _axis(scale, longest, virtual=virtual))
    for name, (lane, times) in zip(names, rows.items(), strict=True):
        if lane.queue is Queue.COMPUTE and lane.device in above:
            lines.append(above[lane.device])
        row = _row(times, starts.get(lane, ()), taken.get(lane, ()), scale, label)
        lines.append(name.ljust(margin) + row)
    kinds = kinds_of(shown)
    if set(kinds) - SELF_EVIDENT:
        lines += ["", ", ".join(f"{kind.value} {kind.word}" for kind in kinds)]
    if taken:
        lines += ["", f"{TAKEN} another job had the device"]
    figures = summary(results, training=records[0].graph.training, virtual=virtual)
    return "\n".join(line.rstrip() for line in [*lines, "", figures]) + "\n"


def lane_rows(result: Report, graph: TaskGraph, *, copies: bool) -> dict[Lane, list[TaskTime]]:
    """The compute lane of every device, with ``copies`` each followed by those of its copy lanes that were busy.

    Each has the tasks that ran on it, in the order of their starts; those that took no time are left out.
    """
    queues = list(Queue) if copies else [Queue.COMPUTE]
    times: dict[Lane, list[TaskTime]] = {Lane(device, queue): [] for device in graph.devices for queue in queues}
    for time in result.tasks:
        if time.seconds > 0 and time.task.lane in times:
            times[time.task.lane].append(time)
    return {lane: ran for lane, ran in times.items() if ran or lane.queue is Queue.COMPUTE}


def common_devices(records: Sequence[StepRecord]) -> tuple[str, ...]:
    """The devices of steps to draw on one axis, which must be the same for all; else raises ``OptionError``."""
    found = dict.fromkeys(record.graph.devices for record in records)
    if len(found) != 1:
        raise OptionError(f"one picture shows one step or more, all on the same devices, got {list(found)}")
    return next(iter(found))


def borders(steps: Sequence[Mapping[Lane, Sequence[TaskTime]]]) -> dict[Lane, list[float]]:
    """When each lane begins every step but the first; ``steps`` are the ``lane_rows`` of each."""
    found: dict[Lane, list[float]] = {}
    for rows in steps[1:]:
        for lane, times in rows.items():
            if times:
                found.setdefault(lane, []).append(times[0].start)
    return found


def kinds_of(times: Iterable[TaskTime]) -> list[TaskKind]:
    """The kinds of tasks in ``times``, in the order of legends."""
    shown = {time.task.kind for time in times}
    return [kind for kind in TaskKind if kind in shown]


def shade(kind: TaskKind, virtual: int, stages: int) -> str:
    """The colour of ``kind`` at stage ``virtual`` (from 0) of a device that has ``stages``: later ones are paler."""
    if not virtual:
        return kind.colour
    white = PALEST * virtual / (stages - 1)
    parts = (int(kind.colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in parts)


def summary(results: Sequence[Report], *, training: bool, virtual: bool) -> str:
    """One line with makespan, bubble and, for a ``training`` step, the peak in flight per stage.

    Of several steps: how soon one ends after the other, and the bubble in that time.
    """
    longest = max(result.end for result in results)
    line = f"makespan {format_time(longest, longest, virtual=virtual)}"
    peaks = tuple(map(max, zip(*(result.peak_in_flight for result in results), strict=True)))
    if len(results) == 1:
        line += f", bubble {results[0].bubble_ratio:.1%}"
    else:
        found = steady_state(results)
        between = format_time(found.seconds, longest, virtual=virtual)
        line = f"{len(results)} steps, {line}, a step every {between}, bubble {found.bubble_ratio:.1%}"
    if not training:
        return line
    if len(set(peaks)) == 1:
        return f"{line}, peak in flight {peaks[0]}" + (" at every stage" if len(peaks) > 1 else "")
    return f"{line}, peak in flight {' '.join(map(str, peaks))} (stages 0 … {len(peaks) - 1})"


def replica_labels(graph: TaskGraph) -> dict[str, str]:
    """What stands above the first device of each replica, by that device; nothing if there is one replica."""
    rows = graph.rows
    return {graph.devices[row * rows.devices]: f"replica {row}" for row in range(len(rows))} if len(rows) > 1 else {}


def labels(graph: TaskGraph) -> Callable[[Task], str]:
    """The label of a task: kind and micro-batch (``F0``), and the stage if a device has several (``F0.4``)."""
    if max(Counter(graph.placement).values()) > 1:
        return lambda task: f"{task.label}.{task.stage}"
    return lambda task: task.label


def _quantum(times: Sequence[TaskTime]) -> float | None:
    """The largest time that divides every start and end; ``None`` if there is none or it is very short.

    It is a multiple of 0.001. Measured times are hardly ever multiples of that; costs written by hand are.
    """
    thousandths = [edge * 1000 for time in times for edge in (time.start, time.end)]
    if not thousandths or any(abs(edge - round(edge)) > 1e-6 for edge in thousandths):
        return None
    found = gcd(*map(round, thousandths)) / 1000
    shortest = min((time.seconds for time in times if time.seconds > 0), default=0.0)
    return found if 0 < shortest <= SHORTEST_TASK * found * (1 + 1e-9) else None


def ticks(longest: float, character: float, gap: int, *, virtual: bool) -> Iterator[tuple[float, str]]:
    """The ticks of an axis from 0 to ``longest``: (time, text); a character is as wide as ``character`` seconds.

    The texts are ``gap`` characters apart or more, at multiples of 1, 2 or 5 times a power of ten. Virtual times have
    whole numbers.
    """
    least = (len(format_time(longest * 0.999, longest, virtual=virtual)) + gap) * character
    least = max(least, 1.0) if virtual else least
    power = 10.0 ** floor(log10(least))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
    for at in takewhile(lambda at: at <= longest * (1 + 1e-9), (tick * step for tick in count())):
        yield at, format_time(at, longest, virtual=virtual)


def format_time(seconds: float, longest: float, *, virtual: bool) -> str:
    """``seconds`` in a unit that suits ``longest``, such as ``1.25 ms``; a bare number if ``virtual``."""
    if virtual:
        return f"{seconds:.6g}"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if longest >= size or unit == "µs":
            break
    return f"{seconds / size:.4g} {unit}"


def _scale(longest: float, times: Sequence[TaskTime], label: Callable[[Task], str], room: int | None) -> _ColumnScale:
    """An exact scale if the times have a quantum and there is room for it, else the room divided evenly."""
    unit = _quantum(times)
    if unit is not None:
        units = round(longest / unit)
        # One column more than the label, for the gap between two cells.
        wanted = max(ceil((len(label(time.task)) + 1) / round(time.seconds / unit)) for time in times)
        each = wanted if room is None else min(wanted, room // units)
        if each:
            return _ColumnScale(unit / each, units * each)
    columns = DEFAULT_WIDTH if room is None else room
    return _ColumnScale(longest / columns, columns)


def _row(
    times: Sequence[TaskTime],
    starts: Sequence[float],
    taken: Sequence[tuple[float, float]],
    scale: _ColumnScale,
    label: Callable[[Task], str],
) -> str:
    """The cells of a lane; over them, where other jobs had the device, and a bar before each later step."""
    shown = _columns(times, scale)
    cells = [(time, len(list(columns))) for time, columns in groupby(shown)]
    row = list("".join("·" * width if time is None else _cell(label(time.task), width) for time, width in cells))
    for start, end in taken:
        for column in range(round(start / scale.seconds), min(round(end / scale.seconds), scale.columns)):
            row[column] = TAKEN if shown[column] is None else row[column]
    for column in (round(start / scale.seconds) - 1 for start in starts):
        row[max(column, 0)] = BAR
    return "".join(row)


def _columns(times: Sequence[TaskTime], scale: _ColumnScale) -> list[TaskTime | None]:
    """For each column the task that fills most of it, or ``None`` if the lane is idle for more than half of it."""
    longest = [0.0] * scale.columns
    busy = [0.0] * scale.columns
    shown: list[TaskTime | None] = [None] * scale.columns
    for time in times:
        for column in range(int(time.start / scale.seconds), min(int(time.end / scale.seconds) + 1, scale.columns)):
            left = column * scale.seconds
            share = min(time.end, left + scale.seconds) - max(time.start, left)
            busy[column] += share
            if share > longest[column]:
                longest[column], shown[column] = share, time
    return [time if full >= scale.seconds / 2 else None for time, full in zip(shown, busy, strict=True)]


def _cell(label: str, width: int) -> str:
    """``label`` extended to ``width``, with a gap at its end; only its letter if it does not fit.

    A label is never cut: the first digit of a number would be read as another number.
    """
    if width < len(label):
        return label[0].ljust(width, "─")
    if width == len(label):
        return label
    return label.ljust(width - 1, "─") + " "


def _steps(records: Sequence[StepRecord], results: Sequence[Report], scale: _ColumnScale) -> str:
    """The numbers of the steps, each where its first task begins."""
    line = ""
    for record, result in zip(records, results, strict=True):
        if result.tasks:
            line = line.ljust(round(result.tasks[0].start / scale.seconds)) + f"{record.step} "
    return line


def _axis(scale: _ColumnScale, longest: float, *, virtual: bool) -> str:
    """The time axis: each number stands at the column where its time begins."""
    line = ""
    for at, text in ticks(longest, scale.seconds, 2, virtual=virtual):
        column = round(at / scale.seconds)
        if column < scale.columns:
            line = line.ljust(column) + text
    return line
