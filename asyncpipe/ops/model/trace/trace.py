"""Cuts any module into stages by tracing it; the code of the model does not change.

``torch.export`` runs the model once on fake tensors and records every operation (``export.py``). The list is cut
(``cut.py``), unless that would miss a change in place (``overwrites.py``). Each part is written as a graph of its own
(``graph_writer.py``), and becomes a stage that runs the same operations on the same parameters (``traced_stage.py``).
Later arguments must fit those of the example (``inputs.py``)::

    model, example ──export──▶ graph of `train` ──cut──▶ part 0  │ part 1  │ part 2
                   └─export──▶ graph of `eval`  ──cut──▶ part 0  │ part 1  │ part 2
                                                         stage 0   stage 1   stage 2

Each stage has its part of both graphs, since a trace records dropout and batch normalisation as they are in one mode,
and runs the one that its ``training`` flag selects. Values go directly from the stage that makes them to each stage
that uses them. Sizes of the inputs go as numbers from the caller to each stage.

``torch.distributed.pipelining.pipeline`` traces in the same way, and its split points are accepted here. It is not
used, because it exports one mode only, with the sizes of the example as constants, and for one process a stage: every
value is passed from neighbour to neighbour, also through stages that do not use it.

Limits of a trace: Python code of the forward runs only while tracing. Branches on sizes are checked at every call
(``BatchError``); branches on values cannot be traced. Types that the forward reads (``mask.to(x.dtype)``) are those of
the example, also under autocast. Python numbers that a module counts do not change any more. A tensor that the forward
creates on the model's device is created on the stage's. An autocast around the call is not part of the trace: it
applies to a stage that runs under it, as it does to the model. An autocast inside the forward is traced. Hooks of
modules and ``torch.utils.checkpoint`` are refused (``dropped.py``); hooks that are registered later are not called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from asyncpipe.errors import BalanceError, TraceError
from asyncpipe.ops.model.batchnorm import deferred_layers
from asyncpipe.ops.model.microbatch import Arguments
from asyncpipe.ops.model.stage import StagedModel
from asyncpipe.ops.model.trace.cut import SplitName, TracedGraph, cut_at_names, cut_evenly
from asyncpipe.ops.model.trace.dropped import refuse_hooks
from asyncpipe.ops.model.trace.export import TraceState, export_mode
from asyncpipe.ops.model.trace.inputs import TraceInputs
from asyncpipe.ops.model.trace.traced_stage import CallerValue, ModelSlots, build_stages

if TYPE_CHECKING:
    from torch.distributed.pipelining import SplitPoint

__all__ = ["trace"]


def trace(model: nn.Module, arguments: Arguments, split: int | Sequence[str] | Mapping[str, SplitPoint]) -> StagedModel:
    """``model`` as stages, traced with an example of its arguments: ``trace(model, Arguments.of(ids, mask=mask), 4)``.

    ``split`` is a number of stages, over which the parameters are spread as evenly as possible; or the names of the
    submodules that begin a new stage; or a mapping from names to torch's ``SplitPoint``, ``BEGINNING`` or ``END``. For
    a submodule that is called several times the first call counts.

    The example must have the types and the structure of later arguments, and should have at least two samples. Sizes
    may differ, unless the model's code depends on them. Tracing computes nothing, draws no random numbers and does not
    change the model; it takes some seconds. The stages' parameters and buffers are the model's own.

    To a pipeline these stages are what layers are in a sequence: with a ``balance``, also one that it chooses, each of
    its own stages is made of as many of them. So give more than devices to leave it a choice.

    Raises ``TraceError`` if the model cannot be traced, or not be cut like that. ``takes`` of the result raises
    ``BatchError`` for arguments that do not fit the trace.
    """
    if not isinstance(model, nn.Module):
        raise TraceError(f"the model must be a torch.nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TraceError(
                f"{f'submodule {name!r}' if name else 'the model'} is TorchScript, which cannot be traced; trace the "
                "module that it was made from"
            )
    if deferred_layers(model):
        raise TraceError("a trace does not see what deferred batch norms gather; trace the model with bare ones")
    refuse_hooks(model)
    points = _split_points(split)
    inputs = TraceInputs(model, arguments)
    state = TraceState(model)
    example = inputs.example(arguments)
    train, evaluate = (export_mode(model, inputs, example, state, training) for training in (True, False))
    if isinstance(points, int):
        cuts = cut_evenly(train, evaluate, points, state.tensors)
    else:
        there, here = (cut_at_names(model, traced, points) for traced in (train, evaluate))
        if [cut.label for cut in there] != [cut.label for cut in here]:
            raise TraceError("the submodules to split at are called in another order in eval mode than in train mode")
        cuts = [cut.position for cut in there], [cut.position for cut in here]
    return _staged(_Trace(model, inputs, state, (train, evaluate)), cuts)


class _Trace(NamedTuple):
    """All that stages are built from."""

    model: nn.Module
    inputs: TraceInputs
    state: TraceState
    modes: tuple[TracedGraph, TracedGraph]


def _staged(whole: _Trace, cuts: tuple[list[int], list[int]]) -> StagedModel:
    """The stages between ``cuts``, the positions in the traces of both modes."""
    model, inputs, state, modes = whole
    stages, links, takes = build_stages(modes, cuts, state, ModelSlots(model.modules(), state.names))

    def join(module: nn.Module, balance: Sequence[int]) -> StagedModel:
        if module is not model:
            raise BalanceError("a copy of a traced model cannot be cut in another way; cut the trace, and then copy it")
        # Stages that were moved may have replaced the model's buffers.
        state.refresh()
        last_pieces = list(accumulate(balance))[:-1]
        return _staged(whole, ([cuts[0][end - 1] for end in last_pieces], [cuts[1][end - 1] for end in last_pieces]))

    _follow(stages, model.training)
    return StagedModel(model, stages, links, _Takes(model, stages, inputs, takes), join)


@dataclass(frozen=True, slots=True, eq=False)
class _Takes:
    """What each stage takes of a call's arguments. The stages of a copy follow the mode of its own model."""

    model: nn.Module
    stages: Sequence[nn.Module]
    inputs: TraceInputs
    wanted: Mapping[int, Sequence[CallerValue]]

    def __call__(self, arguments: Arguments) -> dict[int, Any]:
        training = self.model.training
        _follow(self.stages, training)
        tensors = self.inputs.tensors(arguments, training)
        return {
            stage: tuple(tensors[i] if dim is None else tensors[i].size(dim) for i, dim in wanted)
            for stage, wanted in self.wanted.items()
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> _Takes:
        return replace(self, model=deepcopy(self.model, memo), stages=deepcopy(self.stages, memo))


def _follow(stages: Iterable[nn.Module], training: bool) -> None:
    """Set the mode of the stages to that of the model, since stages share its tensors but not its submodules."""
    for stage in stages:
        if stage.training != training:
            stage.train(training)


def _split_points(split: Any) -> int | list[SplitName]:
    if isinstance(split, int) and not isinstance(split, bool):
        if split < 1:
            raise TraceError(f"split must be at least 1 stage, got {split}")
        return split
    if isinstance(split, Mapping):
        borders = {name: getattr(point, "name", None) for name, point in split.items()}
        if all(isinstance(name, str) and border in ("BEGINNING", "END") for name, border in borders.items()):
            return [SplitName(name, border == "END") for name, border in borders.items()]
    elif isinstance(split, Sequence) and not isinstance(split, str) and all(isinstance(name, str) for name in split):
        return [SplitName(name, False) for name in split]
    raise TraceError(
        "split must be a number of stages, a list of submodules' names, or a mapping from names to "
        f"SplitPoint.BEGINNING or SplitPoint.END, got {split!r}"
    )
