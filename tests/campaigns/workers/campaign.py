"""Runs the campaign: processes that judge some cases each, with a limit of time, and the report."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial

from tests.campaigns.harness import OPTIONS, Campaign, Run, Verdict
from tests.campaigns.workers.cases import draw
from tests.campaigns.workers.judge import Judge, judging

__all__ = ["CAMPAIGN"]

START_SECONDS = 60.0
"""For a process and its workers to come up."""
TOGETHER = 25
"""Cases of one process, which share its workers."""


def _judged(seeds: Sequence[int], transport: str, deadline: float) -> Iterator[Verdict]:
    """The verdicts, each as soon as it is known. The workers write their stacks when the time is over."""
    verdicts: queue.SimpleQueue[Verdict] = queue.SimpleQueue()

    async def judge_all() -> None:
        async with judging(transport=transport) as judge:
            timer = threading.Timer(deadline, _show_stacks, (judge,))
            timer.daemon = True
            timer.start()
            for seed in seeds:
                verdicts.put(await judge.judge(draw(seed)))

    judging_thread = threading.Thread(target=asyncio.run, args=(judge_all(),), daemon=True)
    judging_thread.start()
    for _ in seeds:
        while True:
            try:
                yield verdicts.get(timeout=1.0)
                break
            except queue.Empty:
                if not judging_thread.is_alive() and verdicts.empty():
                    raise RuntimeError("the judge has ended with an error") from None


def _show_stacks(judge: Judge) -> None:
    for pid in judge.pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)


def _work(run: Run) -> None:
    deadline = run.options.deadline
    work = partial(_judged, transport=run.options.transport, deadline=deadline)
    run.judge(run.chunks(TOGETHER), work, START_SECONDS + deadline)


CAMPAIGN = Campaign(
    "workers",
    _work,
    {
        **{name: OPTIONS[name] for name in ("cases", "processes", "case", "times", "here")},
        "deadline": (120.0, "seconds for 25 cases"),
        "transport": ("shared_memory", "of edges, or connection"),
    },
    draw,
    lambda case: f"--case {case} --times 100",
)
