"""Two processes that train by DeepSpeed's ``PipelineModule`` over gloo: two stages, or two replicas of one.

DeepSpeed gives no gradients: they are read from an update, which the next step takes back.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asyncpipe.bench.cases import Case, loss_fn
from benchmarks.cases import RATE
from benchmarks.peers.two_processes import meet

__all__ = ["deepspeed_rank"]


class _ThereAndBack(torch.optim.Optimizer):
    """SGD that has a rate in its first step, takes that back in its second one, and has a rate of 0 in all others."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self._rates, self._before = [0.0, RATE], list[Tensor]()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        parameters = [each for group in self.param_groups for each in group["params"]]
        if self._before:
            torch._foreach_copy_(parameters, self._before)
        rate = self._rates.pop() if self._rates else 0.0
        self._before = [each.clone() for each in parameters] if rate else []
        torch._foreach_add_(parameters, [each.grad for each in parameters], alpha=-rate)


def deepspeed_rank(
    stages: int, zero: int, store: Path, rank: int, model: nn.Sequential, case: Case
) -> Callable[[], object]:
    """What a rank of two does in a step; it has one of two ``stages``, or the whole model.

    With ``zero=1`` the optimizer is in shards. The parameters of ``model``, which is not trained, get the gradients of
    a step before the first one.
    """
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank)}
    import deepspeed
    from deepspeed.pipe import PipelineModule

    meet(store, rank)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    replicas, pieces = 2 // stages, case.microbatches * stages // 2
    options = {
        "train_micro_batch_size_per_gpu": case.shape[0],
        "gradient_accumulation_steps": pieces,
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
    }
    piped = PipelineModule(list(case.model()), num_stages=stages, loss_fn=loss_fn, partition_method="uniform")
    mine = list(piped.parameters())
    engine, *_ = deepspeed.initialize(model=piped, config=options, optimizer=_ThereAndBack(mine))
    own = (whole.chunk(replicas)[rank % replicas].chunk(pieces) for whole in case.batch())
    batches = cycle(zip(*own, strict=True))

    def step() -> object:
        return engine.train_batch(data_iter=batches)

    before = [each.detach().clone() for each in mine]
    step()
    for parameter, old, new in zip(model.parameters(), before, mine, strict=True):
        parameter.grad = (old - new.detach()) / RATE
    step()
    return step
