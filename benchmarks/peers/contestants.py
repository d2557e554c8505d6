"""Everything that is compared, behind one interface: how each takes a case, runs a step, and gives its gradients.

``plain``, ``bare`` and ``bare-processes`` use no library (``cases.py``, ``bare.py``); ``step`` and ``processes`` are
asyncpipe (``asyncpipe/bench/contestants.py`` has ``plain`` and ``step``); ``distributed`` is torch's own pipelining
(``two_processes.py``). Those that train two replicas, which are ``replicas-…`` and two processes with the whole model
each (``data_parallel.py``), update them in each step, and so does DeepSpeed, with stages and with replicas
(``with_deepspeed.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from asyncpipe.bench.cases import Case
from asyncpipe.bench.contestants import Contestant, contestant_of, pipe_of, pipelined, plain_loop
from asyncpipe.bench.harness import seconds_of
from asyncpipe.pipeline.result import StepResult
from benchmarks.cases import RATE
from benchmarks.peers.bare import bare_rank, bare_threads, links
from benchmarks.peers.data_parallel import all_reduce_rank, ddp_rank
from benchmarks.peers.two_processes import Prepare, torch_rank, two_processes
from benchmarks.peers.with_deepspeed import deepspeed_rank

__all__ = ["CONTESTANTS"]


@contextmanager
def _bare(case: Case) -> Iterator[Contestant]:
    model = case.model()
    with bare_threads(list(model), case.microbatches) as step:
        yield contestant_of(model, partial(step, *case.batch()))


@contextmanager
def _processes(case: Case) -> Iterator[Contestant]:
    batch, model, results = case.batch(), case.model(), list[StepResult]()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pipe_of(model, case, 2, optimizer=partial(torch.optim.SGD, lr=RATE), workers="processes") as pipe:
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
    with pipe_of(model, case, stages, 2, optimizer=partial(torch.optim.SGD, lr=0.0), **options) as pipe:

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
    "plain": ("plain loop, 1 thread", plain_loop),
    "bare": ("bare threads", _bare),
    "step": ("asyncpipe: pipe.step(x, target)", pipelined),
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
