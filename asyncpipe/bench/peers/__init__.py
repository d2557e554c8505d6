"""One training step by asyncpipe and by others: a plain loop, bare threads, torchgpipe, fairscale, torch's pipelining.

All of them run the same stages, micro-batches and loss, without optimizer and recomputation, with one intra-op thread
for each of their threads. Their gradients are compared with the plain loop's first; then they take turns, in one run::

    cases.py           the models and batches
    contestants.py     what is compared
    bare_threads.py    the floor: threads and queues alone
    bare_processes.py  the floor of processes: shared memory and semaphores alone
    two_processes.py   two processes, and torch.distributed.pipelining in them

asyncpipe and the bare threads have a thread for each stage. torchgpipe and fairscale know one CPU device, so their
stages share a thread. Where there are two processes, each has half of the stages as one: torch's pipelining, the bare
processes, and asyncpipe with worker processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.harness import alternating, rounds, table
from asyncpipe.bench.peers.cases import CASES, Case
from asyncpipe.bench.peers.contestants import CONTESTANTS, Contestant
from asyncpipe.core.checks import check_choice
from asyncpipe.core.predict.report import Report
from asyncpipe.errors import OptionError

__all__ = ["run", "show"]

WARM_UP = 3
REPEATS = 15
TOLERANCE = 1e-3
"""The largest difference of a gradient that summing in another order may make, in parts of its largest number."""


def run(
    progress: Progress,
    *,
    cases: str | None = None,
    contestants: str | None = None,
    repeats: int = REPEATS,
    chosen: Mapping[str, Case] = CASES,
) -> Figures:
    """Seconds of a step of each contestant in each case (default: all of both), medians and quartiles of ``repeats``.

    A contestant that cannot run, or whose gradients are others, is not timed; its column says why. Raises
    ``OptionError`` for an unknown case or contestant.
    """
    case_names, names = _names("case", cases, chosen), _names("contestant", contestants, CONTESTANTS)
    with _one_intra_op_thread():
        return {
            "repeats": repeats,
            "contestants": {name: CONTESTANTS[name][0] for name in names},
            "cases": {name: _case(progress, name, chosen[name], names, repeats) for name in case_names},
        }


def show(figures: Figures) -> str:
    """A row for each case, a column for each contestant; then ratios, and where asyncpipe's time goes."""
    names, cases = list(figures["contestants"]), figures["cases"]
    lines = [
        f"milliseconds of a training step (quartiles): medians of {figures['repeats']} turns",
        *table([["", *names], *([case, *(_cell(row["results"][n]) for n in names)] for case, row in cases.items())]),
        "",
        *(f"{name:16}{about}" for name, about in figures["contestants"].items()),
        "",
        *(f"{case:16}{row['about']}" for case, row in cases.items()),
    ]
    for floor, whose in (("bare", "threads'"), ("bare-processes", "processes'")):
        if floor in names:
            lines += ["", f"times the bare {whose} step"]
            rows = ([case, *_ratios(row["results"], names, floor)] for case, row in cases.items())
            lines += table([["", *names], *rows])
    if inside := {case: row["inside"] for case, row in cases.items() if row["inside"]}:
        head = ["pipe.step", "tasks", "inside tasks", "/ plain loop", "outside, µs a task"]
        lines += ["", *table([head, *([case, *_inside_cells(row)] for case, row in inside.items())])]
        lines += ["outside: the step without the busiest device's time inside tasks, by the number of tasks"]
    if reasons := _reasons(cases):
        lines += ["", *reasons]
    return "\n".join(lines)


def _names(what: str, text: str | None, known: Mapping[str, Any]) -> list[str]:
    """The names in ``text``, in the order in which they are known."""
    asked = list(known) if text is None else [name.strip() for name in text.split(",")]
    for name in asked:
        check_choice(what, name, tuple(known))
    return [name for name in known if name in asked]


@contextmanager
def _one_intra_op_thread() -> Iterator[None]:
    """The calling thread, and all that start later, compute without helpers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# Measuring


def _case(progress: Progress, name: str, case: Case, names: Sequence[str], repeats: int) -> Figures:
    results: dict[str, Figures] = {}
    with ExitStack() as stack:
        ready: dict[str, Contestant] = {}
        for contestant in names:
            progress(f"{name}: preparing {contestant}")
            found = _prepared(contestant, case, stack)
            if isinstance(found, Contestant):
                ready[contestant] = found
            else:
                results[contestant] = found
        seconds: dict[str, list[float]] = {contestant: [] for contestant in ready}
        for number in rounds(WARM_UP + repeats, progress, f"{name}: round"):
            for contestant in alternating(list(ready), number):
                seconds[contestant].append(ready[contestant].seconds())
                ready[contestant].clear()
    for contestant, taken in seconds.items():
        measured = taken[WARM_UP:]
        low, middle, high = quantiles(measured, n=4, method="inclusive") if repeats > 1 else measured * 3
        results[contestant] = {"seconds": middle, "low": low, "high": high, "all": measured}
    inside = None
    if "step" in ready:
        plain = results.get("plain", {}).get("seconds")
        inside = _inside(ready["step"].reports[-repeats:], seconds["step"][-repeats:], plain)
    return {
        "about": case.about,
        "microbatches": case.microbatches,
        "stages": case.stages,
        "results": {contestant: results[contestant] for contestant in names},
        "inside": inside,
    }


def _prepared(name: str, case: Case, stack: ExitStack) -> Contestant | Figures:
    """The contestant, whose gradients are those of the plain loop; or what keeps it from being timed.

    What it holds lives as long as ``stack`` only if it is timed.
    """
    with ExitStack() as own:
        try:
            contestant = own.enter_context(CONTESTANTS[name][1](case))
            contestant.seconds()
            found = [gradient.clone() for gradient in contestant.gradients()]
            contestant.clear()
        except OptionError as error:
            return {"missing": str(error)}
        except Exception as error:  # noqa: BLE001 - whatever a peer raises must not end the others' turns
            return {"failed": f"{type(error).__name__}: {error}"}
        if (difference := _difference(found, _plain_gradients(case))) > TOLERANCE:
            return {"wrong": f"its gradients are not those of the plain loop (difference {difference:.2g})"}
        stack.push(own.pop_all())
        return contestant


def _plain_gradients(case: Case) -> Sequence[Tensor]:
    with CONTESTANTS["plain"][1](case) as plain:
        plain.seconds()
        return plain.gradients()


def _difference(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest difference between gradients, in parts of the largest number of each; infinite if one is missing."""
    if [gradient.shape for gradient in found] != [gradient.shape for gradient in wanted]:
        return float("inf")
    pairs = zip(found, wanted, strict=True)
    differences = torch.stack([(one - other).abs().max() / other.abs().max().clamp_min(1e-30) for one, other in pairs])
    # NaN is larger than any number, too.
    return float(differences.nan_to_num(float("inf")).max())


def _inside(reports: Sequence[Report], seconds: Sequence[float], plain: float | None) -> Figures:
    """What a step spends inside tasks, over what the plain loop takes for them; and what it spends outside, per task.

    Times inside are those of the wall: a task that waits for the interpreter's lock is inside, too.
    """
    tasks = len(reports[-1].tasks)
    inside = median(sum(report.device_busy.values()) for report in reports)
    outside = (taken - max(report.device_busy.values()) for taken, report in zip(seconds, reports, strict=True))
    return {
        "tasks": tasks,
        "inside_seconds": inside,
        "inside_over_plain": None if plain is None else inside / plain,
        "outside_us_per_task": median(outside) / tasks * 1e6,
    }


# Showing


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


def _cell(result: Figures) -> str:
    if "seconds" not in result:
        return next(iter(result))
    middle, low, high = (_milliseconds(result[key]) for key in ("seconds", "low", "high"))
    return f"{middle} ({low}–{high})"


def _ratios(results: Mapping[str, Figures], names: Sequence[str], floor: str) -> Iterator[str]:
    bare = results[floor].get("seconds")
    for name in names:
        seconds = results[name].get("seconds")
        yield "–" if bare is None or seconds is None else f"{seconds / bare:.2f}"


def _inside_cells(row: Figures) -> list[str]:
    over = row["inside_over_plain"]
    return [
        str(row["tasks"]),
        f"{_milliseconds(row['inside_seconds'])} ms",
        "–" if over is None else f"{over:.2f}",
        f"{row['outside_us_per_task']:.1f}",
    ]


def _reasons(cases: Mapping[str, Figures]) -> list[str]:
    """A line for each contestant that was not timed, and each reason."""
    reasons: dict[str, list[str]] = {}
    for case, row in cases.items():
        for name, result in row["results"].items():
            if "seconds" not in result:
                state, why = next(iter(result.items()))
                reasons.setdefault(f"{name}: {state}: {why}", []).append(case)
    everywhere = list(cases)
    return [line if where == everywhere else f"{line} ({', '.join(where)})" for line, where in reasons.items()]
