"""Everything that is compared, behind one interface: how each takes a case, runs a step, and gives its gradients.

``plain``, ``bare`` and ``bare-processes`` use no library (``cases.py``, ``bare.py``); ``step`` and ``processes`` are
asyncpipe; ``distributed`` is torch's own pipelining (``two_processes.py``). Those that train two replicas, which are
``replicas-…`` and two processes with the whole model each (``data_parallel.py``), update them in each step, and so
does DeepSpeed, with stages and with replicas (``with_deepspeed.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from asyncpipe.bench.cases import RATE, Case, loss_fn, plain_step
from asyncpipe.bench.harness import seconds_of
from asyncpipe.bench.peers.bare import bare_rank, bare_threads, links
from asyncpipe.bench.peers.data_parallel import all_reduce_rank, ddp_rank
from asyncpipe.bench.peers.two_processes import Prepare, torch_rank, two_processes
from asyncpipe.bench.peers.with_deepspeed import deepspeed_rank
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
    clear: Callable[[], object]
    """Drops the gradients."""
    results: Sequence[StepResult] = ()
    """Of each step, where it has a report; nobody asks for that while a step is timed."""


def _of(model: nn.Module, work: Callable[[], object], results: Sequence[StepResult] = ()) -> Contestant:
    """A contestant that trains ``model``, which is in this process, by ``work``."""

    def gradients() -> list[Tensor]:
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    return Contestant(partial(seconds_of, work), gradients, model.zero_grad, results)


@contextmanager
def _plain(case: Case) -> Iterator[Contestant]:
    model = case.model()
    yield _of(model, partial(plain_step, list(model), *case.batch(), case.microbatches))


@contextmanager
def _bare(case: Case) -> Iterator[Contestant]:
    model = case.model()
    with bare_threads(list(model), case.microbatches) as step:
        yield _of(model, partial(step, *case.batch()))


def _pipe(model: nn.Sequential, case: Case, stages: int, replicas: int = 1, **options: Any) -> SyncPipeline:
    names, balance = [f"cpu:{index}" for index in range(replicas * stages)], [case.stages // stages] * stages
    options |= {"microbatches": case.microbatches // replicas, "replicas": replicas, "balance": balance}
    return Pipeline(model, names, schedule="1f1b", checkpoint="never", loss_fn=loss_fn, **options).sync()


@contextmanager
def _step(case: Case) -> Iterator[Contestant]:
    model, batch, results = case.model(), case.batch(), list[StepResult]()
    with _pipe(model, case, case.stages) as pipe:
        yield _of(model, lambda: results.append(pipe.step(*batch, return_outputs=False).wait()), results)


@contextmanager
def _processes(case: Case) -> Iterator[Contestant]:
    batch, model, results = case.batch(), case.model(), list[StepResult]()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with _pipe(model, case, 2, optimizer=partial(torch.optim.SGD, lr=RATE), workers="processes") as pipe:
        # As for the others, nothing is updated. Gradients stay in the workers, where each step adds its own.

        def step() -> None:
            results.append(pipe.step(*batch, return_outputs=False, update=False).wait())

        def gradients() -> list[Tensor]:
            pipe.step(*batch)
            after, steps = pipe.state_dict(), len(results) + 1
            pipe.load_state_dict(before)
            return [(value - after[name]) / (RATE * steps) for name, value in before.items()]

        yield Contestant(partial(seconds_of, step), gradients, lambda: None, results)


@contextmanager
def _replicas(stages: int, options: Mapping[str, Any], case: Case) -> Iterator[Contestant]:
    batch, model, results = case.batch(), case.model(), list[StepResult]()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with _pipe(model, case, stages, 2, optimizer=partial(torch.optim.SGD, lr=0.0), **options) as pipe:

        def step(rate: float = 0.0) -> None:
            results.append(pipe.step(*batch, return_outputs=False, learning_rate=rate).wait())

        def gradients() -> list[Tensor]:
            step(RATE)
            after = pipe.state_dict()
            found = [(value - after[name]) / RATE for name, value in before.items()]
            pipe.load_state_dict(before)
            return found

        yield Contestant(partial(seconds_of, step), gradients, lambda: None, results)


@contextmanager
def _in_two_processes(prepare: Prepare, case: Case, *, whole: bool = False) -> Iterator[Contestant]:
    with two_processes(case, prepare, whole=whole) as ask:

        def seconds() -> float:
            begun, ended = zip(*ask("step"), strict=True)
            return float(max(ended) - min(begun))

        def gradients() -> list[Tensor]:
            found = ask("gradients")[: 1 if whole else 2]
            return [torch.from_numpy(gradient) for of_rank in found for gradient in of_rank]

        yield Contestant(seconds, gradients, partial(ask, "clear"))


@contextmanager
def _over_gloo(rank: Callable[..., Callable[[], object]], case: Case, *, whole: bool = False) -> Iterator[Contestant]:
    with (
        TemporaryDirectory(prefix="asyncpipe-peers-") as folder,
        _in_two_processes(partial(rank, Path(folder) / "store"), case, whole=whole) as contestant,
    ):
        yield contestant


CONTESTANTS: dict[str, tuple[str, Callable[[Case], AbstractContextManager[Contestant]]]] = {
    "plain": ("plain loop, 1 thread", _plain),
    "bare": ("bare threads", _bare),
    "step": ("asyncpipe: pipe.step(x, target)", _step),
    "distributed": ("torch.distributed.pipelining, 1F1B, two processes, gloo", partial(_over_gloo, torch_rank)),
    "bare-processes": (
        "two bare processes, shared memory",
        lambda case: _in_two_processes(partial(bare_rank, links(case)), case),
    ),
    "processes": ("asyncpipe: pipe.step(x, target) in two worker processes", _processes),
    "ddp": ("DistributedDataParallel, two processes, gloo", partial(_over_gloo, ddp_rank, whole=True)),
    "all-reduce": ("two bare processes, all_reduce over gloo", partial(_over_gloo, all_reduce_rank, whole=True)),
    "deepspeed-1x2": (
        "DeepSpeed's PipelineModule, two stages in two processes, gloo",
        partial(_over_gloo, partial(deepspeed_rank, 2, 0)),
    ),
    "deepspeed-2x1": (
        "DeepSpeed's PipelineModule, two replicas in two processes, gloo",
        partial(_over_gloo, partial(deepspeed_rank, 1, 0), whole=True),
    ),
    "deepspeed-2x1-zero1": (
        "DeepSpeed's PipelineModule, two replicas in two processes, gloo, ZeRO-1",
        partial(_over_gloo, partial(deepspeed_rank, 1, 1), whole=True),
    ),
}
"""By name: what it is, and the context in which it is ready to run a case. That raises what keeps it from running."""
for _stages in (1, 2):
    for _workers in ("threads", "processes"):
        for _ending, _shards in (("", False), ("-sharded", True)):
            CONTESTANTS[f"replicas-2x{_stages}-{_workers}{_ending}"] = (
                f"asyncpipe: 2 replicas of {_stages} stages, {_workers}" + ", optimizer in shards" * _shards,
                partial(_replicas, _stages, {"workers": _workers, "shard_optimizer": _shards}),
            )
