"""GPT-2 with torch.distributed.pipelining: what each of two processes runs. ``compare.py`` starts them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# begin
import torch
from torch import Tensor, distributed
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline
from torch.nn.functional import cross_entropy

from benchmarks.gpt2_peers.gpt2 import MICROBATCHES, Case, Found


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over the labels of a micro-batch; the schedule takes the mean of these means."""
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def schedule(model: Any, batch: Mapping[str, Tensor], rank: int) -> tuple[Any, Any]:
    """The stage of this process, and the schedule; the shapes of a micro-batch are fixed."""
    size = len(batch["input_ids"]) // MICROBATCHES
    example = {name: value[:size] for name, value in batch.items() if name != "labels"}
    middle = f"transformer.h.{model.config.n_layer // 2}"
    pipe = pipeline(model, mb_args=(), mb_kwargs=example, split_spec={middle: SplitPoint.BEGINNING})
    stage = pipe.build_stage(rank, torch.device("cpu"))
    return stage, Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_fn)


def train(steps: Any, batch: Mapping[str, Tensor], rank: int) -> Tensor | None:
    """The loss of a step, in the last process."""
    if rank == 0:
        steps.step(**{name: value for name, value in batch.items() if name != "labels"})
        return None
    losses: list[Tensor] = []
    steps.step(target=batch["labels"], losses=losses, return_outputs=False)
    return torch.stack(losses).mean()


def meet(address: str, rank: int) -> None:
    """Join the other process."""
    distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)


# end


def check(case: Case, rank: int) -> Found:
    """What the stage of this process makes of a case."""
    stage, steps = schedule(case.model(), case.batch(), rank)
    loss = train(steps, case.batch(), rank)
    gradients = {name: p.grad for name, p in stage.submod.named_parameters() if p.grad is not None}
    calls = [int(value) for name, value in stage.submod.named_buffers() if name.endswith("calls")]
    return Found(0.0 if loss is None else loss.item(), gradients, calls[0] if calls else 0)
