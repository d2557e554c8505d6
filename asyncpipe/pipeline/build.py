"""From the options of a pipeline to the machinery of its steps; everything that can be wrong is found here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from asyncpipe.core.checks import check_choice, check_positive
from asyncpipe.core.graph.lower import CheckpointMode
from asyncpipe.core.graph.task_graph import Phase, Wiring
from asyncpipe.core.schedules.protocol import Schedule, Shape
from asyncpipe.errors import BalanceError, OptionError
from asyncpipe.ops.device.copies import make_copiers
from asyncpipe.ops.device.devices import Device
from asyncpipe.ops.device.streams import make_streams
from asyncpipe.ops.execute.binder import Equipment
from asyncpipe.ops.execute.gradient_guard import GradientGuard
from asyncpipe.ops.execute.instruments import Instruments
from asyncpipe.ops.model.batchnorm import convert_deferred_batch_norm, deferred_layers
from asyncpipe.ops.model.microbatch import check_microbatches
from asyncpipe.ops.model.sequential import as_sequential, stage_sequence
from asyncpipe.ops.model.stage import Stage, StagedModel
from asyncpipe.ops.model.ties import Ties, place
from asyncpipe.pipeline.graph_cache import Graphs
from asyncpipe.pipeline.step import Machinery

__all__ = ["BuildOptions", "MakeOptimizer", "build"]

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes the optimizer of one stage from its parameters."""


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What steps depend on; see ``Pipeline`` for what each means."""

    microbatches: int
    balance: str | Sequence[int]
    stages: int | None
    schedule: Schedule
    checkpoint: str
    loss_fn: Callable[..., Any] | None
    loss_reduction: str
    batch_dim: int
    optimizer: MakeOptimizer | None
    deferred_batch_norm: bool
    instruments: Instruments = field(default_factory=Instruments)
    generator: torch.Generator | None = None


def build(model: object, devices: Sequence[Device], options: BuildOptions) -> Machinery:
    """The machinery for ``model``, whose stages are moved to their devices; raises before anything moves."""
    check_choice("loss_reduction", options.loss_reduction, ("mean", "sum"))
    check_microbatches(options.microbatches)
    if isinstance(options.batch_dim, bool) or not isinstance(options.batch_dim, int) or options.batch_dim < 0:
        raise OptionError(f"batch_dim must be an integer from 0, got {options.batch_dim!r}")
    schedule = options.schedule
    checkpoint = CheckpointMode.parse(options.checkpoint)
    staged = _staged(model, schedule, len(devices), options)
    names = [device.name for device in devices]
    graphs = Graphs(schedule, names, Wiring(staged.links), len(staged.stages))
    placement = graphs(options.microbatches, Phase.STEP, checkpoint, True).placement
    stages, ties = place(staged, placement, devices)
    optimizers = {} if options.optimizer is None else _optimizers(stages, ties, options.optimizer)
    graphs.rewire(Wiring(staged.links, ties.links, tuple(optimizers)))
    streams = make_streams(devices)
    return Machinery(
        module=staged.module,
        equipment=Equipment(
            stages, ties, streams, make_copiers(streams), GradientGuard(), optimizers, options.instruments
        ),
        takes=staged.takes,
        microbatches=options.microbatches,
        batch_dim=options.batch_dim,
        checkpoint=checkpoint,
        loss_fn=options.loss_fn,
        mean=options.loss_reduction == "mean",
        graphs=graphs,
        deferred=deferred_layers(staged.module),
        generator=options.generator,
    )


def _staged(model: object, schedule: Schedule, devices: int, options: BuildOptions) -> StagedModel:
    """``model`` in stages, not placed yet."""
    if isinstance(model, StagedModel):
        if options.balance != "auto" or options.stages not in (None, len(model.stages)):
            raise BalanceError(
                f"a traced model has the {len(model.stages)} stages that it was cut into; leave balance and stages "
                "out, or trace it with another split"
            )
        if options.deferred_batch_norm:
            raise OptionError("a trace does not see what deferred batch norms gather; give a list of stages instead")
        return model
    sequence = as_sequential(model)  # type: ignore[arg-type]
    if options.deferred_batch_norm:
        convert_deferred_batch_norm(sequence)
    balance = options.balance
    if not isinstance(balance, Sequence):
        raise BalanceError(f"balance must be 'auto' or a list of integers, got {balance!r}")
    if options.stages is not None:
        count = check_positive("stages", options.stages)
    else:
        count = devices * schedule.virtual if isinstance(balance, str) else len(balance)
    schedule.check(Shape(count, options.microbatches, devices))
    return stage_sequence(sequence, balance, count)


def _optimizers(stages: Sequence[Stage], ties: Ties, make: MakeOptimizer) -> dict[int, torch.optim.Optimizer]:
    """One for each stage with parameters to train; a shared parameter belongs to the first stage that has it."""
    taken = {id(replica.tensor) for replica in ties.all()}
    optimizers: dict[int, torch.optim.Optimizer] = {}
    for stage in stages:
        mine = [p for p in stage.module.parameters() if p.requires_grad and id(p) not in taken]
        taken.update(map(id, mine))
        if mine:
            optimizer = make(mine)
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise OptionError(
                    f"optimizer must be a function from a stage's parameters to a torch optimizer, and returned "
                    f"{type(optimizer).__name__}; give, for instance, lambda parameters: torch.optim.AdamW(parameters)"
                )
            optimizers[stage.index] = optimizer
    return optimizers
