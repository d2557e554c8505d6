"""One training step by asyncpipe and by others: a plain loop, bare threads or processes, torch's pipelining.

All of them run the same stages, micro-batches and loss, without optimizer and recomputation, with one intra-op thread
for each of their threads. Their gradients are compared with the plain loop's first; then they take turns, in one run::

    contestants.py     what is compared
    bare.py            the floor: threads and queues alone, processes and shared memory alone
    two_processes.py   two processes, and torch.distributed.pipelining in them
    data_parallel.py   two processes with the whole model each, by DistributedDataParallel or bare
    with_deepspeed.py  two processes, and DeepSpeed in them

asyncpipe and the bare threads have a thread for each stage. Where there are two processes, each has half of the stages
as one: torch's pipelining, the bare processes, and asyncpipe with worker processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.cases import Case
from asyncpipe.bench.contestants import Contestant
from asyncpipe.bench.harness import markdown, one_intra_op_thread, rounds
from asyncpipe.core.checks import check_choice
from benchmarks.cases import CASES
from benchmarks.peers.contestants import CONTESTANTS
from benchmarks.turns import alternating

__all__ = ["run", "show"]

WARM_UP = 3
REPEATS = 15
TOLERANCE = 1e-3
"""The largest difference of a gradient that summing in another order may make, in parts of its largest number."""
FLOORS = {
    "bare": "times_bare_threads",
    "bare-processes": "times_bare_processes",
    "ddp": "times_ddp",
    "all-reduce": "times_all_reduce",
}


def run(
    progress: Progress,
    *,
    cases: str | None = None,
    contestants: str | None = None,
    repeats: int = REPEATS,
    chosen: Mapping[str, Case] = CASES,
) -> Figures:
    """A row for each contestant in each case (default: all of both): seconds of a step, median and quartiles.

    A contestant that cannot run, or whose gradients are others, is not timed; its row says why. Raises ``OptionError``
    for an unknown case or contestant.
    """
    case_names, names = _names("case", cases, chosen), _names("contestant", contestants, CONTESTANTS)
    with one_intra_op_thread():
        found = [row for name in case_names for row in _case(progress, name, chosen[name], names, repeats)]
    return {
        "repeats": repeats,
        "rows": found,
        "contestants": [{"contestant": name, "is": CONTESTANTS[name][0]} for name in names],
        "cases": [{"case": name, "is": chosen[name].about} for name in case_names],
    }


show = markdown(
    rows="A training step, medians and quartiles of {repeats} turns. Inside: the time inside tasks, over that of the "
    "plain loop; outside: the step without the busiest device's time inside tasks, by the number of tasks:",
    contestants="Contestants:",
    cases="Cases:",
)


def _names(what: str, text: str | None, known: Mapping[str, Any]) -> list[str]:
    """The names in ``text``, in the order in which they are known."""
    asked = list(known) if text is None else [name.strip() for name in text.split(",")]
    for name in asked:
        check_choice(what, name, tuple(known))
    return [name for name in known if name in asked]


def _case(progress: Progress, name: str, case: Case, names: Sequence[str], repeats: int) -> list[Figures]:
    rows: dict[str, Figures] = {contestant: {"case": name, "contestant": contestant} for contestant in names}
    ready: dict[str, Contestant] = {}
    seconds: dict[str, list[float]] = {}
    with ExitStack() as stack:
        for contestant in names:
            progress(f"{name}: preparing {contestant}")
            found = _prepared(contestant, case, stack)
            if isinstance(found, Contestant):
                ready[contestant], seconds[contestant] = found, []
            else:
                rows[contestant]["not_timed"] = found
        for number in rounds(WARM_UP + repeats, progress, f"{name}: round"):
            for contestant in alternating(list(ready), number):
                taken = ready[contestant].seconds()
                ready[contestant].clear()
                if number >= WARM_UP:
                    seconds[contestant].append(taken)
    middle = {contestant: median(measured) for contestant, measured in seconds.items()}
    for contestant, measured in seconds.items():
        low, _, high = quantiles(measured, n=4, method="inclusive") if repeats > 1 else measured * 3
        rows[contestant] |= {"step_seconds": middle[contestant], "from_seconds": low, "to_seconds": high}
        floors = {key: middle[contestant] / middle[floor] for floor, key in FLOORS.items() if floor in middle}
        rows[contestant] |= floors
    if "step" in ready:
        rows["step"] |= _inside(ready["step"], seconds["step"], middle.get("plain"))
    return list(rows.values())


def _prepared(name: str, case: Case, stack: ExitStack) -> Contestant | str:
    """The contestant, whose gradients are those of the plain loop; or what keeps it from being timed.

    What it holds lives as long as ``stack`` only if it is timed.
    """
    with ExitStack() as own:
        try:
            contestant = own.enter_context(CONTESTANTS[name][1](case))
            contestant.seconds()
            _check_gradients(contestant.gradients(), case)
            contestant.clear()
        except Exception as error:  # noqa: BLE001 - whatever a peer raises must not end the others' turns
            return f"{type(error).__name__}: {error}".partition("\n")[0]
        stack.push(own.pop_all())
        return contestant


def _check_gradients(found: Sequence[Tensor], case: Case) -> None:
    """Raise ``AssertionError`` unless gradients are as the plain loop's, but for the order of sums."""
    with CONTESTANTS["plain"][1](case) as plain:
        plain.seconds()
        for number, wanted in enumerate(plain.gradients()):
            most = TOLERANCE * float(wanted.abs().max())
            told = f"gradient {number} is not that of the plain loop"
            torch.testing.assert_close(found[number], wanted, rtol=0.0, atol=most, msg=told)


def _inside(contestant: Contestant, seconds: Sequence[float], plain: float | None) -> Figures:
    """What a step spends inside tasks, over what the plain loop takes for them; and what it spends outside, per task.

    Times inside are those of the wall: a task that waits for the interpreter's lock is inside, too.
    """
    reports = [result.report for result in contestant.results[-len(seconds) :]]
    tasks = len(reports[-1].tasks)
    inside = median(sum(report.device_busy.values()) for report in reports)
    outside = (taken - max(report.device_busy.values()) for taken, report in zip(seconds, reports, strict=True))
    over_plain = None if plain is None else inside / plain
    return {"tasks": tasks, "inside": over_plain, "us_outside_a_task": median(outside) / tasks * 1e6}
