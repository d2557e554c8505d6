"""A model whose stages are built where they live: no process ever has to hold all of it.

::

    controller                    worker a: stages 0, 2         worker b: stages 1, 3
    0 1 2 3 on meta: shapes       0, 2 built; 1, 3 on meta      1, 3 built; 0, 2 on meta

Without workers all stages are built in this process.

A stage may be spread over a group of workers that all get its micro-batches. Each of them builds all of it, with the
same values, and then ``shard`` makes it what that worker has of it (``sharded.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from asyncpipe.core.checks import check_positive
from asyncpipe.errors import OptionError
from asyncpipe.ops.model.functions import SeededDraws, check_function, find_function, function_name
from asyncpipe.ops.model.sharded import shard_stage
from asyncpipe.ops.model.shipping import forget_values
from asyncpipe.ops.model.tensor_uses import tensor_uses

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["StageFactory", "build_stages"]

_SPREAD = 0x9E3779B97F4A7C15
"""Odd, so that neighbouring stages have seeds far from each other."""


@dataclass(frozen=True, slots=True)
class StageFactory:
    """Makes the stages of a pipeline: ``Pipeline(StageFactory("module:function", stages=4), devices)``.

    ``function(stage, **arguments)`` returns the module of a stage, from 0, and is called in the process that has the
    stage. In every other process it is called under ``torch.device("meta")``, where tensors have shapes and no memory:
    so it must not read values. State dicts have the names of an ``nn.Sequential`` of the stages: ``0.weight``.
    """

    function: str | Callable[..., nn.Module]
    """``module:function``, importable in every process, or a function."""
    stages: int
    """How many stages there are."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of every call."""
    seed: int | None = None
    """What the stages' initial values follow from, wherever they are built: each call draws from a CPU generator of its
    own. By default one number of the pipeline's generator."""
    group: int = 1
    """How many workers share each stage: of the pipeline's devices, the first so many are stage 0's place, and so on.
    They get the same micro-batches and take the same steps."""
    shard: str | Callable[[nn.Module, DeviceMesh], object] | None = None
    """``shard(module, mesh)`` spreads a stage's module over its group, in place: by DTensor's ``parallelize_module``,
    or FSDP2's ``fully_shard``. ``mesh`` is the stage's ``DeviceMesh``, of one dimension. Called in each worker of the
    group. What the module takes and returns stays plain tensors, equal in all of the group."""

    def __post_init__(self) -> None:
        check_positive("stages", self.stages)
        check_positive("group", self.group)
        check_function("factory", self.function)
        if self.shard is not None:
            check_function("factory", self.shard)
        if (self.group > 1) != (self.shard is not None):
            raise OptionError(
                f"a group of {self.group} {'needs' if self.group > 1 else 'does not need'} a function that shards a "
                "stage; give StageFactory both group and shard, or neither"
            )

    def seeded(self, draw: Callable[[], int]) -> StageFactory:
        """This factory with a seed: its own, or what ``draw`` returns."""
        return self if self.seed is not None else replace(self, seed=draw())

    def __str__(self) -> str:
        return f"StageFactory({function_name(self.function)})"


def build_stages(factory: StageFactory, here: Collection[int], mesh: DeviceMesh | None = None) -> nn.Sequential:
    """The stages of a factory with a seed: those ``here`` whole, of the others only the shapes.

    With a ``mesh``, over which each stage is spread, those here are what this process has of them. Raises
    ``OptionError`` for a function that cannot be found, returns no module, or lets two stages share a tensor,
    and for one that fails on the meta device.
    """
    assert factory.seed is not None
    function = find_function(str(factory), factory.function)
    stages = []
    for stage in range(factory.stages):
        if stage in here:
            module = _called(factory, function, stage, SeededDraws(factory.seed + stage * _SPREAD))
        else:
            try:
                module = _called(factory, function, stage, torch.device("meta"))
            except (RuntimeError, NotImplementedError) as error:
                raise OptionError(
                    f"{factory} fails for stage {stage} on torch's meta device, on which other processes learn the "
                    f"shapes of a stage ({type(error).__name__}: {error}); it must not read the values of tensors"
                ) from error
        stages.append(module)
    _refuse_ties(factory, stages)
    for stage, module in enumerate(stages):
        if stage not in here:
            forget_values(module)
        elif mesh is not None and factory.shard is not None:
            shard_stage(find_function(str(factory), factory.shard), module, mesh, stage)
    return nn.Sequential(*stages)


def _called(
    factory: StageFactory,
    function: Callable[..., nn.Module],
    stage: int,
    inside: AbstractContextManager[Any],
) -> nn.Module:
    with inside:
        module: object = function(stage, **factory.arguments)
    if not isinstance(module, nn.Module):
        raise OptionError(f"{factory} must return the module of a stage, and returned {type(module).__name__}")
    return module


def _refuse_ties(factory: StageFactory, stages: list[nn.Module]) -> None:
    for uses in tensor_uses(stages).values():
        first, last = uses[0], uses[-1]
        if first.stage != last.stage:
            raise OptionError(
                f"{factory}: {last.full_name!r} of stage {last.stage} is {first.full_name!r} of stage {first.stage}; "
                "stages that are built in several processes share no tensors: make it anew for each, or give the model "
                "itself"
            )
