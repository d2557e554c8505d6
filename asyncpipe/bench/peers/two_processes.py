"""torch.distributed.pipelining in two processes, each with half of the stages as its one stage, on a CPU with gloo.

::

    this process ── "step" ──▶ rank 0 ┐
         │                            ├ activations and gradients over gloo
         └───────── "step" ──▶ rank 1 ┘
                                      a step lasts from the first rank's begin to the last rank's end

The ranks end when their connection to this process does, whatever has ended it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, distributed, nn

from asyncpipe.bench.peers.cases import Case, loss_fn

__all__ = ["TwoProcesses"]

RANKS = 2
PATIENCE = timedelta(seconds=60)
"""How long a rank waits for the other one."""


class TwoProcesses:
    """Both ranks, as a context: they are gone behind it."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._connections: list[Connection[Any, Any]] = []
        self._processes: list[Any] = []

    def __enter__(self) -> TwoProcesses:
        self._folder = TemporaryDirectory(prefix="asyncpipe-peers-")
        context = get_context("spawn")
        try:
            for rank in range(RANKS):
                ours, theirs = context.Pipe()
                self._connections.append(ours)
                arguments = rank, Path(self._folder.name) / "store", self._case, theirs
                process = context.Process(target=_serve, args=arguments, daemon=True)
                with _interrupts_blocked():
                    process.start()
                self._processes.append(process)
                theirs.close()
            self._answers()  # Both have met.
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()  # It holds nothing, and takes a while to end by itself.
            process.join()
        for connection in self._connections:
            connection.close()
        self._folder.cleanup()

    def step(self) -> float:
        """Run a step; returns its seconds, by the clock that the processes of a machine share."""
        begun, ended = zip(*self._ask("step"), strict=True)
        return float(max(ended) - min(begun))

    def gradients(self) -> list[Tensor]:
        """The gradients of all parameters, in the model's order."""
        return [torch.from_numpy(gradient) for half in self._ask("gradients") for gradient in half]

    def clear(self) -> None:
        """Drop the gradients."""
        self._ask("clear")

    def _ask(self, question: str) -> list[Any]:
        for connection in self._connections:
            connection.send(question)
        return self._answers()

    def _answers(self) -> list[Any]:
        answers = [connection.recv() for connection in self._connections]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Processes that start in the block never see Ctrl-C, which goes to all of a terminal; this one sees it behind."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(rank: int, store: Path, case: Case, connection: Connection[Any, Any]) -> None:
    """What a rank does: answer questions until there are no more."""
    torch.set_num_threads(1)
    try:
        distributed.init_process_group(
            "gloo", init_method=store.as_uri(), rank=rank, world_size=RANKS, timeout=PATIENCE
        )
        half = case.stages // RANKS
        module = case.model()[rank * half : (rank + 1) * half]
        answers: dict[str, Callable[[], object]] = {
            "step": _timed(_schedule_step(module, rank, case)),
            "gradients": lambda: [
                grad.numpy() for parameter in module.parameters() if (grad := parameter.grad) is not None
            ],
            "clear": module.zero_grad,
        }
        connection.send("ready")
        with suppress(EOFError):
            while True:
                connection.send(answers[connection.recv()]())
    except Exception as error:  # noqa: BLE001 - the other process says it
        with suppress(OSError):
            connection.send(RuntimeError(f"rank {rank}: {type(error).__name__}: {error}"))


def _schedule_step(module: nn.Module, rank: int, case: Case) -> Callable[[], object]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    stage = PipelineStage(module, rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, case.microbatches, loss_fn=loss_fn)
    x, target = case.batch()
    if rank == 0:
        return lambda: schedule.step(x)
    losses: list[Tensor] = []

    def step() -> None:
        losses.clear()
        schedule.step(target=target, losses=losses, return_outputs=False)

    return step


def _timed(work: Callable[[], object]) -> Callable[[], Sequence[float]]:
    def timed() -> tuple[float, float]:
        begun = perf_counter()
        work()
        return begun, perf_counter()

    return timed
