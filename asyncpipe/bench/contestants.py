"""Ways to run a case's step, behind one interface: a plain loop, and asyncpipe. ``benchmarks/peers`` has more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from asyncpipe.bench.cases import Case, loss_fn, plain_step
from asyncpipe.bench.harness import seconds_of
from asyncpipe.pipeline.pipeline import Pipeline
from asyncpipe.pipeline.result import StepResult
from asyncpipe.pipeline.sync import SyncPipeline

__all__ = ["Contestant", "contestant_of", "pipe_of", "pipelined", "plain_loop"]


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to run a case's step."""

    seconds: Callable[[], float]
    """Runs a step, whose gradients are added to those that are there, and returns its seconds."""
    gradients: Callable[[], Sequence[Tensor]]
    """Of all parameters, in the model's order."""
    clear: Callable[[], object]
    """Drops the gradients."""
    results: Sequence[StepResult] = ()
    """Of each step, where it has a report; nobody asks for that while a step is timed."""


def contestant_of(model: nn.Module, work: Callable[[], object], results: Sequence[StepResult] = ()) -> Contestant:
    """A contestant that trains ``model``, which is in this process, by ``work``."""

    def gradients() -> list[Tensor]:
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    return Contestant(partial(seconds_of, work), gradients, model.zero_grad, results)


@contextmanager
def plain_loop(case: Case) -> Iterator[Contestant]:
    """The step without any library, in the calling thread."""
    model = case.model()
    yield contestant_of(model, partial(plain_step, list(model), *case.batch(), case.microbatches))


def pipe_of(model: nn.Sequential, case: Case, stages: int, replicas: int = 1, **options: Any) -> SyncPipeline:
    """An asyncpipe of the case's model: 1F1B without recomputation, on CPU devices."""
    names, balance = [f"cpu:{index}" for index in range(replicas * stages)], [case.stages // stages] * stages
    options |= {"microbatches": case.microbatches // replicas, "replicas": replicas, "balance": balance}
    return Pipeline(model, names, schedule="1f1b", checkpoint="never", loss_fn=loss_fn, **options).sync()


@contextmanager
def pipelined(case: Case) -> Iterator[Contestant]:
    """``pipe.step``, with a device for each stage."""
    model, batch, results = case.model(), case.batch(), list[StepResult]()
    with pipe_of(model, case, case.stages) as pipe:
        yield contestant_of(model, lambda: results.append(pipe.step(*batch, return_outputs=False).wait()), results)
