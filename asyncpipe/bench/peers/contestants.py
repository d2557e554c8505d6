"""Everything that is compared, behind one interface: how each takes a case, runs a step, and gives its gradients.

``plain``, ``bare`` and ``bare-processes`` use no library (``cases.py``, ``bare_threads.py``, ``bare_processes.py``);
``step``, ``dropin`` and ``processes`` are asyncpipe; ``torchgpipe`` and ``fairscale`` are packages of the extra
``peers``; ``distributed`` is torch's own pipelining (``two_processes.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from asyncpipe.bench.harness import seconds_of
from asyncpipe.bench.peers.bare_processes import bare_ranks
from asyncpipe.bench.peers.bare_threads import BareThreads
from asyncpipe.bench.peers.cases import Case, loss_fn, plain_step
from asyncpipe.bench.peers.two_processes import RANKS, TwoProcesses, ranks_of_torch
from asyncpipe.core.predict.report import Report
from asyncpipe.errors import OptionError, missing_package
from asyncpipe.pipeline.pipeline import Pipeline
from asyncpipe.pipeline.result import StepResult
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


def _pipe(model: nn.Sequential, case: Case, devices: int, **options: Any) -> SyncPipeline:
    return Pipeline(
        model,
        [f"cpu:{index}" for index in range(devices)],
        microbatches=case.microbatches,
        balance=[case.stages // devices] * devices,
        schedule="1f1b",
        checkpoint="never",
        loss_fn=loss_fn,
        **options,
    ).sync()


def _with_reports(found: Contestant, work: Callable[[], StepResult]) -> Contestant:
    """``found``, which runs a step by ``work`` and keeps its report."""

    def seconds() -> float:
        begun = perf_counter()
        result = work()
        taken = perf_counter() - begun
        found.reports.append(result.report)
        return taken

    return replace(found, seconds=seconds)


@contextmanager
def _step(case: Case) -> Iterator[Contestant]:
    model, batch = case.model(), case.batch()
    with _pipe(model, case, case.stages) as pipe:
        step = partial(pipe.step, *batch, return_outputs=False)
        yield _with_reports(_of(model, step), step)


class _GradientsInstead(torch.optim.Optimizer):
    """Puts gradients in the place of parameters, so that they can be fetched from where these are."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.copy_(parameter.grad)


@contextmanager
def _processes(case: Case) -> Iterator[Contestant]:
    batch, model = case.batch(), case.model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with _pipe(model, case, RANKS, optimizer=_GradientsInstead, workers="processes") as pipe:
        # As for the others, nothing is updated. Gradients stay in the workers, where each step adds its own.
        step = partial(pipe.step, *batch, return_outputs=False, update=False)
        steps: list[Report] = []

        def gradients() -> list[Tensor]:
            pipe.step(*batch)
            found = [value / (len(steps) + 1) for value in pipe.state_dict().values()]
            pipe.load_state_dict(before)
            return found

        found = Contestant(lambda: 0.0, gradients, lambda: None, steps)
        yield _with_reports(found, step)


@contextmanager
def _dropin(case: Case) -> Iterator[Contestant]:
    model = case.model()
    with _pipe(model, case, case.stages) as pipe:
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
    with ranks_of_torch() as ranks, TwoProcesses(case, ranks) as processes:
        yield Contestant(processes.step, processes.gradients, processes.clear)


@contextmanager
def _bare_processes(case: Case) -> Iterator[Contestant]:
    with TwoProcesses(case, bare_ranks(case)) as processes:
        yield Contestant(processes.step, processes.gradients, processes.clear)


CONTESTANTS: dict[str, tuple[str, Callable[[Case], AbstractContextManager[Contestant]]]] = {
    "plain": ("plain loop, 1 thread", _plain),
    "bare": ("bare threads", _bare),
    "step": ("asyncpipe: pipe.step(x, target)", _step),
    "dropin": ("asyncpipe: loss(pipe(x)).backward()", _dropin),
    "torchgpipe": ("torchgpipe", partial(_ancestor, "torchgpipe", "GPipe")),
    "fairscale": ("fairscale.nn.Pipe", partial(_ancestor, "fairscale.nn", "Pipe")),
    "distributed": ("torch.distributed.pipelining, 1F1B, two processes, gloo", _distributed),
    "bare-processes": ("two bare processes, shared memory", _bare_processes),
    "processes": ("asyncpipe: pipe.step(x, target) in two worker processes", _processes),
}
"""By name: what it is, and the context in which it is ready to run a case. That raises what keeps it from running."""
