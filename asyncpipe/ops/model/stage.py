"""What every kind of model is cut into: stages that send each other values.

A stage is a function of what it receives. Values come from earlier stages or the caller, and go to later stages or back
to the caller. A pair of source and user is a *link*::

    caller ──▶ stage 0 ──▶ stage 1 ──▶ stage 2 ──▶ caller
                  └───── a skip ─────────▲

``ops/model/sequential.py`` makes stages from a sequence of layers, ``ops/model/trace/trace.py`` from any module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import nn

from asyncpipe.core.predict.balance import check_balance, even_balance
from asyncpipe.errors import BalanceError
from asyncpipe.ops.device.devices import Device
from asyncpipe.ops.model.buffers import StageBuffers
from asyncpipe.ops.model.cuda_graphs import StageCapturer
from asyncpipe.ops.model.input_copies import InputCopies
from asyncpipe.ops.model.microbatch import Arguments
from asyncpipe.ops.model.output_watch import OutputWatch
from asyncpipe.ops.model.own_generators import OwnGenerators
from asyncpipe.ops.model.parameter_watch import ParameterWatch
from asyncpipe.ops.model.stage_compiler import Layered, StageCompiler, StageFunction
from asyncpipe.ops.torch_internals import has_own_call, hooks_of, hooks_of_all_modules

__all__ = ["CALLER", "LOSS", "OwnLoss", "Stage", "StageModule", "StagedModel", "has_hooks"]

CALLER = -1
"""The index that stands for the caller, as the source or the user of a link."""
LOSS = -2
"""The source in what a stage with ``splits_head`` receives if a loss follows for which nobody keeps its output."""


class StageModule(nn.Module):
    """One stage's part of a model. Its parameters and buffers are the same objects as those of the unsplit model."""

    overwrites_input = False
    """Whether it may overwrite in place what it receives. It then gets a copy, since others still read the original."""
    splits_head = False
    """Whether it leaves the model's head to the model's own loss. Steps that train then have no outputs."""

    def forward(self, received: Mapping[int, Any]) -> dict[int, Any]:
        """The values that the stage sends, by user, from those that it receives, by source.

        Values are nested (torch's pytree), and their tensors may require gradients. Called on the stage's thread; and
        called again with the same input by a recomputation.
        """
        raise NotImplementedError

    def function(self) -> StageFunction:
        """What computes as a call of the module does, as it is now: the shortest way, to be used for one step."""
        return self if has_hooks(self) else self.forward

    def layered(self) -> Layered | None:
        """For compiling: ``None`` if the stage does more than to call its layers one after the other."""
        return None


def has_hooks(module: nn.Module) -> bool:
    """Whether calling ``module`` does more than its ``forward``."""
    return has_own_call(module) or hooks_of_all_modules() or bool(hooks_of(module))


class OwnLoss(Protocol):
    """The loss that a model brings with it, for labels inside its batches. Goes to workers, so it can be pickled."""

    def __call__(self, output: Any, target: Any) -> Any:
        """The loss of a micro-batch, as a pipeline's ``loss_fn`` returns it."""

    def target(self, arguments: Arguments) -> Any:
        """The labels in a mini-batch; ``None`` if it has none."""

    def with_loss(self, output: Any, target: Any) -> Any:
        """``output`` of a whole mini-batch, with its loss."""


@dataclass(frozen=True, slots=True, eq=False)
class StagedModel:
    """A model cut into stages, which are not placed on devices yet."""

    module: nn.Module
    """The unsplit model. It owns the parameters and buffers, and the state dict has its names."""
    stages: Sequence[StageModule]
    links: tuple[tuple[int, int], ...]
    """(source, user) for each pair of stages between which values travel, with source < user."""
    caller_values: Callable[[Arguments], dict[int, Any]]
    """What each stage receives from the caller, given a micro-batch's arguments; called on the caller's thread.

    Stages that take nothing are left out. Tensors are passed on as the same objects.
    """
    join: Callable[[nn.Module, Sequence[int]], StagedModel] | None = None
    """What ``joined`` returns for fewer stages of a model with this module; ``None`` if its stages cannot be joined."""
    own_loss: OwnLoss | None = None
    """The loss of a pipeline without a ``loss_fn``, and the target of a batch that is given without one."""
    recomputes: str = ""
    """What in the model asks for ``torch.utils.checkpoint``, which its stages do not do, in words: the pipeline must
    recompute in its place."""
    rows: int = 1
    """How many replicas its stages are those of (``replicas.py``)."""
    is_fine: bool = False
    """Whether it is cut finely, to choose among: a pipeline without a balance joins the stages to as many as its
    schedule has on the devices, of about as many parameters each."""

    def evenly(self, stages: int) -> list[int]:
        """The balance that spreads the parameters over so many stages; a tied one counts wherever it is used."""
        return even_balance([1 + sum(p.numel() for p in stage.parameters()) for stage in self.stages], stages)

    def joined(self, balance: Sequence[int]) -> StagedModel:
        """The same model with fewer stages: each made of as many consecutive ones as ``balance`` says.

        Raises ``BalanceError``, also for a copy of a traced model.
        """
        sizes = check_balance(balance, len(self.stages))
        if len(sizes) == len(self.stages):
            return replace(self, is_fine=False)
        if self.join is None:
            raise BalanceError(f"these {len(self.stages)} stages cannot be joined; leave the balance out")
        return replace(self.join(self.module, sizes), is_fine=False)


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """A stage on its logical device."""

    index: int
    position: int
    """Its index in its row: that of the stage of row 0 with the same layers."""
    module: StageModule
    device: Device
    inputs: InputCopies
    buffers: StageBuffers
    parameters: ParameterWatch
    generators: OwnGenerators
    outputs: OutputWatch
    compiler: StageCompiler | StageCapturer | None = None
    """What calls the module, if it is compiled."""
    recomputed: tuple[nn.Module, ...] = ()
    """Layers that are recomputed in the backward by themselves."""
