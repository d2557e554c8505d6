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
the example, also under autocast. Python numbers that a module counts do not change any more; a forward that draws from
Python's or numpy's generators is refused (``python_draws.py``). A tensor that the forward creates on the model's device
is created on the stage's. An autocast around the call is not part of the trace: it applies to a stage that runs under
it, as it does to the model. An autocast inside the forward is traced. Hooks of modules are refused, also those that are
registered later; ``torch.utils.checkpoint`` is traced as a call, and only a pipeline that recomputes takes the stages
(``dropped.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import accumulate
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn

from asyncpipe.core.checks import check_choice
from asyncpipe.errors import BalanceError, TraceError
from asyncpipe.ops.model.batchnorm import deferred_layers
from asyncpipe.ops.model.microbatch import Arguments, keywords
from asyncpipe.ops.model.stage import StagedModel
from asyncpipe.ops.model.trace.cut import SplitName, TracedGraph, cut_at_names, cut_evenly, cut_finely
from asyncpipe.ops.model.trace.dropped import HookWatch, refuse_hooks
from asyncpipe.ops.model.trace.export import TraceState, TraceTask, export_mode
from asyncpipe.ops.model.trace.inputs import DYNAMIC, TraceInputs
from asyncpipe.ops.model.trace.traced_stage import CallerValue, ModelSlots, build_stages

if TYPE_CHECKING:
    from torch.distributed.pipelining import SplitPoint

__all__ = ["trace"]

_logger = logging.getLogger(__name__)

FINEST: Literal["finest"] = "finest"


def trace(
    model: nn.Module,
    arguments: Any,
    split: int | str | Sequence[str] | Mapping[str, SplitPoint],
    *,
    dynamic: Literal["auto", "batch", "all"] = "auto",
    batch_dim: int = 0,
) -> StagedModel:
    """``model`` as stages, traced with an example of its arguments: ``trace(model, Arguments.of(ids, mask=mask), 4)``.

    ``split`` is a number of stages, over which the parameters are spread as evenly as possible; or the names of the
    submodules that begin a new stage; or a mapping from names to torch's ``SplitPoint``, ``BEGINNING`` or ``END``. For
    a submodule that is called several times the first call counts. With ``"finest"`` it is cut at so many places that a
    pipeline has a choice: without a balance it spreads the parameters over its stages, and ``"auto"`` with a ``sample``
    and ``asyncpipe plan`` measure all pieces.

    ``arguments`` are ``Arguments``, a tokenizer's batch, or the only argument. They must have the types and the
    structure of later ones, and should have at least two samples. ``dynamic`` says which sizes of later arguments may
    differ, unless the model's code depends on them: with ``"batch"`` the number of samples, which is dimension
    ``batch_dim`` of all tensors; with ``"all"`` every size; with ``"auto"`` every size of tensors that have at most
    three dimensions (tokens, masks, embeddings, audio) and the number of samples of images and videos. Where windows
    are cut out of images of any size, a trace takes a minute in place of seconds.

    Tracing computes nothing, draws no random numbers and does not change the model; it takes some seconds, which the
    log tells. The stages' parameters and buffers are the model's own.

    To a pipeline these stages are what layers are in a sequence: with a ``balance``, also one that it chooses, each of
    its own stages is made of as many of them.

    Raises ``TraceError`` if the model cannot be traced, or not be cut like that. ``caller_values`` of the result raises
    ``BatchError`` for arguments that do not fit the trace.
    """
    check_choice("dynamic", dynamic, DYNAMIC)
    _check_model(model)
    points = _split_points(split)
    arguments = Arguments.wrap(keywords(arguments))
    inputs = TraceInputs(model, arguments)
    state = TraceState(model)
    began = monotonic()
    task = TraceTask(model, inputs, inputs.example(arguments), state, (dynamic, batch_dim))
    train, evaluate = (export_mode(task, training) for training in (True, False))
    if points == FINEST:
        cuts = cut_finely(train, evaluate)
    elif isinstance(points, int):
        cuts = cut_evenly(train, evaluate, points, state.tensors)
    else:
        there, here = (cut_at_names(model, traced, points) for traced in (train, evaluate))
        if [cut.label for cut in there] != [cut.label for cut in here]:
            raise TraceError("the submodules to split at are called in another order in eval mode than in train mode")
        cuts = [cut.position for cut in there], [cut.position for cut in here]
    staged = _staged(_Trace(model, inputs, state, (train, evaluate), HookWatch(model)), cuts)
    _logger.info("traced %s in %.1f s", type(model).__name__, monotonic() - began)
    return replace(staged, is_fine=points == FINEST)


def _check_model(model: Any) -> None:
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


class _Trace(NamedTuple):
    """All that stages are built from."""

    model: nn.Module
    inputs: TraceInputs
    state: TraceState
    modes: tuple[TracedGraph, TracedGraph]
    hooks: HookWatch


def _staged(whole: _Trace, cuts: tuple[list[int], list[int]]) -> StagedModel:
    """The stages between ``cuts``, the positions in the traces of both modes."""
    model, inputs, state, modes, hooks = whole
    stages, links, caller_values = build_stages(modes, cuts, state, ModelSlots(model.modules(), state.names))

    def join(module: nn.Module, balance: Sequence[int]) -> StagedModel:
        if module is not model:
            raise BalanceError("a copy of a traced model cannot be cut in another way; cut the trace, and then copy it")
        # Stages that were moved may have replaced the model's buffers.
        state.refresh()
        last_pieces = list(accumulate(balance))[:-1]
        return _staged(whole, ([cuts[0][end - 1] for end in last_pieces], [cuts[1][end - 1] for end in last_pieces]))

    _follow(stages, model.training)
    values = _CallerValues(model, stages, inputs, caller_values, hooks)
    return StagedModel(model, stages, links, values, join, recomputes=modes[0].checkpoints)


@dataclass(frozen=True, slots=True, eq=False)
class _CallerValues:
    """What each stage takes of a call's arguments. The stages of a copy follow the mode of its own model."""

    model: nn.Module
    stages: Sequence[nn.Module]
    inputs: TraceInputs
    wanted: Mapping[int, Sequence[CallerValue]]
    hooks: HookWatch

    def __call__(self, arguments: Arguments) -> dict[int, Any]:
        self.hooks.check()
        training = self.model.training
        _follow(self.stages, training)
        tensors = self.inputs.tensors(arguments, training)
        return {
            stage: tuple(tensors[i] if dim is None else tensors[i].size(dim) for i, dim in wanted)
            for stage, wanted in self.wanted.items()
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> _CallerValues:
        model = deepcopy(self.model, memo)
        return replace(self, model=model, stages=deepcopy(self.stages, memo), hooks=HookWatch(model))


def _follow(stages: Iterable[nn.Module], training: bool) -> None:
    """Set the mode of the stages to that of the model, since stages share its tensors but not its submodules."""
    for stage in stages:
        if stage.training != training:
            stage.train(training)


def _split_points(split: Any) -> int | Literal["finest"] | list[SplitName]:
    if split == FINEST:
        return FINEST
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
        "split must be a number of stages, a list of submodules' names, 'finest', or a mapping from names to "
        f"SplitPoint.BEGINNING or SplitPoint.END, got {split!r}"
    )
