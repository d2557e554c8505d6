"""Two processes, each with half of the stages, that run a step together when they are told to.

::

    this process ── "step" ──▶ rank 0 ┐
         │                            ├ activations and gradients, in whatever way they are given
         └───────── "step" ──▶ rank 1 ┘
                                      a step lasts from the first rank's begin to the last rank's end

``ranks_of_torch`` has torch.distributed.pipelining, on a CPU with gloo; ``bare_processes.py`` has the floor.

The ranks end when their connection to this process does, whatever has ended it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, distributed, nn

from asyncpipe.bench.harness import interrupts_blocked
from asyncpipe.bench.peers.cases import Case, loss_fn

__all__ = ["RANKS", "TwoProcesses", "ranks_of_torch"]

RANKS = 2
PATIENCE = timedelta(seconds=60)
"""How long a rank waits for the other one."""


Prepare = Callable[[int, nn.Sequential, Case], Callable[[], object]]
"""Makes what runs a rank's part of a step, from the rank and its half of the stages. Called in the rank's process."""


class TwoProcesses:
    """Both ranks, as a context: they are gone behind it."""

    def __init__(self, case: Case, prepare: Prepare) -> None:
        self._case = case
        self._prepare = prepare
        self._connections: list[Connection[Any, Any]] = []
        self._processes: list[Any] = []

    def __enter__(self) -> TwoProcesses:
        context = get_context("spawn")
        try:
            for rank in range(RANKS):
                ours, theirs = context.Pipe()
                self._connections.append(ours)
                arguments = rank, self._case, self._prepare, theirs
                process = context.Process(target=_serve, args=arguments, daemon=True)
                with interrupts_blocked():
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


def _serve(rank: int, case: Case, prepare: Prepare, connection: Connection[Any, Any]) -> None:
    """What a rank does: answer questions until there are no more."""
    torch.set_num_threads(1)
    try:
        half = case.stages // RANKS
        module = nn.Sequential(*list(case.model())[rank * half : (rank + 1) * half])
        answers: dict[str, Callable[[], object]] = {
            "step": _timed(prepare(rank, module, case)),
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


def _timed(work: Callable[[], object]) -> Callable[[], Sequence[float]]:
    def timed() -> tuple[float, float]:
        begun = perf_counter()
        work()
        return begun, perf_counter()

    return timed


@contextmanager
def ranks_of_torch() -> Iterator[Prepare]:
    """What the ranks of torch.distributed.pipelining do. They meet over gloo."""
    with TemporaryDirectory(prefix="asyncpipe-peers-") as folder:
        yield partial(_rank_of_torch, Path(folder) / "store")


def _rank_of_torch(store: Path, rank: int, half: nn.Sequential, case: Case) -> Callable[[], object]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    distributed.init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=RANKS, timeout=PATIENCE)
    stage = PipelineStage(half, rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, case.microbatches, loss_fn=loss_fn)
    x, target = case.batch()
    if rank == 0:
        return lambda: schedule.step(x)
    losses: list[Tensor] = []

    def step() -> None:
        losses.clear()
        schedule.step(target=target, losses=losses, return_outputs=False)

    return step
