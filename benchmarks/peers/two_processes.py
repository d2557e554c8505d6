"""Two processes or more, each with a part of the stages or all, that run a step together when they are told to.

::

    this process ── "step" ──▶ rank 0 ┐
         │                            ├ activations and gradients, in whatever way they are given
         └───────── "step" ──▶ rank 1 ┘
                                      a step lasts from the first rank's begin to the last rank's end
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import distributed, nn

from asyncpipe.bench.cases import Case, loss_fn
from benchmarks.turns import interrupts_blocked

__all__ = ["Ask", "Prepare", "meet", "torch_rank", "two_processes"]

PATIENCE = timedelta(seconds=60)
"""How long a rank waits for the other one."""
Prepare = Callable[[int, nn.Sequential, Case], Callable[[], object]]
"""Makes what runs a rank's part of a step, from the rank and its stages. Called in the rank's process."""
Ask = Callable[[str], list[Any]]
"""Both ranks' answers to ``step`` (begin and end, by a clock that they share), ``gradients`` or ``clear``."""

_answers: dict[str, Callable[[], Any]] = {}
"""Of a rank, in its process."""


@contextmanager
def two_processes(case: Case, prepare: Prepare, *, whole: bool = False) -> Iterator[Ask]:
    """Start both ranks, with half of the stages each or the ``whole`` model; they are gone behind the block."""
    context, pids = get_context("spawn"), list[int]()
    pools = [ProcessPoolExecutor(1, context, _become, (rank, case, prepare, whole)) for rank in range(2)]

    def ask(question: str) -> list[Any]:
        asked: list[Future[Any]] = [pool.submit(_answer, question) for pool in pools]
        return [each.result() for each in asked]

    try:
        with interrupts_blocked():
            started = [pool.submit(os.getpid) for pool in pools]
        pids += [each.result() for each in started]
        ask("prepare")
        yield ask
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # The process holds nothing, and takes a while to end by itself.
        for pool in pools:
            pool.shutdown()


def _become(rank: int, case: Case, prepare: Prepare, whole: bool) -> None:
    torch.set_num_threads(1)
    half = case.stages // 2
    module = nn.Sequential(*list(case.model())[slice(None) if whole else slice(rank * half, (rank + 1) * half)])

    def make_ready() -> None:
        work = prepare(rank, module, case)
        _answers["step"] = lambda: (perf_counter(), work(), perf_counter())[::2]

    _answers["prepare"] = make_ready
    _answers["gradients"] = lambda: [
        grad.numpy() for parameter in module.parameters() if (grad := parameter.grad) is not None
    ]
    _answers["clear"] = module.zero_grad


def _answer(question: str) -> Any:
    return _answers[question]()


def meet(store: Path, rank: int) -> None:
    """Have both ranks in a group over gloo, which they find by the file ``store``."""
    distributed.init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=2, timeout=PATIENCE)


def torch_rank(store: Path, rank: int, half: nn.Sequential, case: Case) -> Callable[[], object]:
    """What a rank of torch.distributed.pipelining does in a step. The ranks meet over gloo, in the file ``store``."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    meet(store, rank)
    schedule = Schedule1F1B(PipelineStage(half, rank, 2, torch.device("cpu")), case.microbatches, loss_fn=loss_fn)
    x, target = case.batch()
    if rank:
        return lambda: schedule.step(target=target, losses=[], return_outputs=False)
    return lambda: schedule.step(x)
