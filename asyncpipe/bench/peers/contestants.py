"""Everything that is compared, behind one interface: how each takes a case, runs a step, and gives its gradients.

``plain`` and ``bare`` use no library (``cases.py``, ``bare_threads.py``); ``step`` and ``dropin`` are asyncpipe;
``torchgpipe`` and ``fairscale`` are packages of the extra ``peers``; ``distributed`` is torch's own pipelining
(``two_processes.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from asyncpipe.bench.harness import seconds_of
from asyncpipe.bench.peers.bare_threads import BareThreads
from asyncpipe.bench.peers.cases import Case, loss_fn, plain_step
from asyncpipe.bench.peers.two_processes import TwoProcesses
from asyncpipe.core.predict.report import Report
from asyncpipe.errors import OptionError, missing_package
from asyncpipe.pipeline.pipeline import Pipeline
from asyncpipe.pipeline.sync import SyncPipeline

__all__ = ["CONTESTANTS", "Contestant"]


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to run a case's step."""

    seconds: Callable[[], float]
    """Runs a step, whose gradients are added to those that are there, and returns its seconds."""
    gradients: Callable[[], Sequence[Tensor]]
    """Of all parameters, in the model's order."""
    clear: Callable[[], None]
    """Drops the gradients."""
    reports: list[Report] = field(default_factory=list)
    """How each step used its time, where that is known."""


def _of(model: nn.Module, work: Callable[[], object]) -> Contestant:
    """A contestant that trains ``model``, which is in this process, by ``work``."""

    def gradients() -> list[Tensor]:
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    return Contestant(partial(seconds_of, work), gradients, model.zero_grad)


@contextmanager
def _plain(case: Case) -> Iterator[Contestant]:
    model = case.model()
    yield _of(model, partial(plain_step, list(model), *case.batch(), case.microbatches))


@contextmanager
def _bare(case: Case) -> Iterator[Contestant]:
    model = case.model()
    threads = BareThreads(list(model), case.microbatches)
    try:
        yield _of(model, partial(threads.step, *case.batch()))
    finally:
        threads.close()


def _pipe(model: nn.Sequential, case: Case) -> SyncPipeline:
    return Pipeline(
        model,
        [f"cpu:{index}" for index in range(case.stages)],
        microbatches=case.microbatches,
        balance=[1] * case.stages,
        schedule="1f1b",
        checkpoint="never",
        loss_fn=loss_fn,
    ).sync()


@contextmanager
def _step(case: Case) -> Iterator[Contestant]:
    model, batch = case.model(), case.batch()
    with _pipe(model, case) as pipe:
        results = []
        found = _of(model, lambda: results.append(pipe.step(*batch, return_outputs=False)))

        def seconds() -> float:
            taken = found.seconds()
            found.reports.append(results.pop().report)
            return taken

        yield Contestant(seconds, found.gradients, found.clear, found.reports)


@contextmanager
def _dropin(case: Case) -> Iterator[Contestant]:
    model = case.model()
    with _pipe(model, case) as pipe:
        yield _of(model, partial(_call_and_backward, pipe, *case.batch()))


def _call_and_backward(pipe: Callable[[Tensor], Tensor], x: Tensor, target: Tensor) -> None:
    torch.autograd.backward(loss_fn(pipe(x), target))


@contextmanager
def _ancestor(module: str, name: str, case: Case) -> Iterator[Contestant]:
    """torchgpipe, or fairscale's fork of it: their class ``name`` of ``module``."""
    try:
        wrapper = getattr(import_module(module), name)
    except ImportError as error:
        raise missing_package(f"this contestant needs {module.partition('.')[0]}", "peers") from error
    model, batch = case.model(), case.batch()
    pipes: list[Any] = [
        wrapper(model, [1] * case.stages, devices=["cpu"] * case.stages, chunks=case.microbatches, checkpoint="never")
    ]
    try:
        yield _of(model, lambda: _call_and_backward(pipes[0], *batch))
    finally:
        # fairscale ends its threads when the pipe is dropped. One that lives until the interpreter's end would wait
        # there for threads that are gone.
        pipes.clear()


@contextmanager
def _distributed(case: Case) -> Iterator[Contestant]:
    if not torch.distributed.is_available():
        raise OptionError("this contestant needs a torch that was built with torch.distributed")
    with TwoProcesses(case) as processes:
        yield Contestant(processes.step, processes.gradients, processes.clear)


CONTESTANTS: dict[str, tuple[str, Callable[[Case], AbstractContextManager[Contestant]]]] = {
    "plain": ("plain loop, 1 thread", _plain),
    "bare": ("bare threads", _bare),
    "step": ("asyncpipe: pipe.step(x, target)", _step),
    "dropin": ("asyncpipe: loss(pipe(x)).backward()", _dropin),
    "torchgpipe": ("torchgpipe", partial(_ancestor, "torchgpipe", "GPipe")),
    "fairscale": ("fairscale.nn.Pipe", partial(_ancestor, "fairscale.nn", "Pipe")),
    "distributed": ("torch.distributed.pipelining, 1F1B, two processes, gloo", _distributed),
}
"""By name: what it is, and the context in which it is ready to run a case. That raises what keeps it from running."""
