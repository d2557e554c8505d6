"""Cuts a model of transformers into stages: units, which are its layers and what is around them, joined by a balance.

The units of a model with n layers are n + 2: what comes before the layers (embeddings), each layer, and what comes
behind (norm, heads). A decoder behind an encoder has its embeddings with its first layer. An encoder's hidden states go
from its end to every stage of the decoder::

    encoder  embeddings  0  1  2 ──────────────┐
    decoder                      0  1  2  heads
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from asyncpipe.errors import BalanceError
from asyncpipe.ops.model.evaluation import evaluating
from asyncpipe.ops.model.microbatch import Arguments
from asyncpipe.ops.model.stage import CALLER, StagedModel
from asyncpipe.ops.model.transformers.batch_inputs import stage_inputs
from asyncpipe.ops.model.transformers.counted_loss import CountedLoss
from asyncpipe.ops.model.transformers.families import Trunk, find_trunks, guess_trunks, has_router_loss
from asyncpipe.ops.model.transformers.image import Image
from asyncpipe.ops.model.transformers.layer_run import LayerRange, LayerRun
from asyncpipe.ops.model.transformers.layer_stage import LayerStage, StageLinks
from asyncpipe.ops.model.transformers.refusals import refuse_hooked_images, refuse_reentrant

__all__ = ["cut_at_layers", "unit_balance"]

_logger = logging.getLogger(__name__)


class _Known(NamedTuple):
    """A model whose family is known."""

    module: nn.Module
    """What owns the parameters: the model, or what wraps it (peft)."""
    model: nn.Module
    trunks: tuple[Trunk, ...]
    loss: CountedLoss | None


def cut_at_layers(module: nn.Module, model: nn.Module, batch: Any, loss: CountedLoss | None) -> StagedModel | None:
    """``model`` with each unit as a stage; ``None`` if its family is not known. ``module`` is it, or what wraps it.

    A trunk that is only guessed is taken if ``batch`` shows that it is one: each unit as a stage makes the same bits.
    """
    trunks = find_trunks(model) or guess_trunks(model)
    if not trunks:
        return None
    refuse_reentrant(model)
    staged = _staged(_Known(module, model, trunks, loss), [1] * _unit_count(trunks))
    return staged if find_trunks(model) or _is_alike(staged, module, batch) else None


def _is_alike(staged: StagedModel, module: nn.Module, batch: Any) -> bool:
    """Whether ``staged`` and ``module`` return the same for ``batch``: a forward of each, in evaluation mode."""
    if not isinstance(batch, Mapping) or any(parameter.is_meta for parameter in module.parameters()):
        return False
    try:
        with evaluating(module), torch.no_grad(), torch.random.fork_rng():
            received: dict[int, dict[int, Any]] = defaultdict(dict)
            for stage, value in staged.caller_values(Arguments((), dict(batch))).items():
                received[stage][CALLER] = value
            for number, stage_module in enumerate(staged.stages):
                for user, value in stage_module.function()(received[number]).items():
                    received[user][number] = value
            ours, theirs = received[CALLER][len(staged.stages) - 1], module(**batch)
            return all(torch.equal(value, theirs[name]) for name, value in ours.items())
    except Exception as error:  # noqa: BLE001 - another kind of model, which is traced
        _logger.info("%s is not cut by structure: %s", type(module).__name__, error)
        return False


def unit_balance(staged: StagedModel, layers: Sequence[int]) -> list[int]:
    """``layers`` per stage as units per stage: embeddings are with the first layers, heads with the last.

    Raises ``BalanceError`` unless they are all of the model's layers, or of its units.
    """
    units = len(staged.stages)
    if isinstance(staged.join, _JoinUnits) and sum(layers) not in (units - 2, units):
        raise BalanceError(
            f"balance {list(layers)} sums up to {sum(layers)}, but the model has {units - 2} layers; it must sum up to "
            f"{units - 2}, or to {units} where the embeddings and the head count as one each"
        )
    if len(layers) > 1 and sum(layers) == len(staged.stages) - 2:
        return [layers[0] + 1, *layers[1:-1], layers[-1] + 1]
    return [len(staged.stages)] if list(layers) == [len(staged.stages) - 2] else list(layers)


def _unit_count(trunks: Sequence[Trunk]) -> int:
    return 2 + sum(len(trunk.layers) for trunk in trunks)


def _staged(known: _Known, balance: Sequence[int]) -> StagedModel:
    edges = [0, *accumulate(balance)]
    stages = [_ranges(known.trunks, first, end) for first, end in pairwise(edges)]
    last = len(stages) - 1
    encoder_end = next((j for j, each in enumerate(stages) if each[0].trunk == 0 and each[0].has_last), last)
    pair = len(known.trunks) > 1
    splits_head = known.loss is not None and known.loss.chunk > 0
    routed = has_router_loss(known.model)
    gate = splits_head or routed
    modules = []
    links: set[tuple[int, int]] = set()
    for number, ranges in enumerate(stages):
        sources = {number - 1} if number else set()
        if pair and number > encoder_end:
            sources.add(encoder_end)
        links |= {(source, number) for source in sources}
        encoded = tuple(range(number + 1, last + 1)) if pair and number == encoder_end else ()
        ends = StageLinks(tuple(sorted(sources)), number + 1 if number < last else CALLER, encoded)
        images: list[Image] = []
        runs = [LayerRun(known.model, known.trunks, each, images, has_gate=gate) for each in ranges]
        refuse_hooked_images(images, known.model)
        splits_here = splits_head and number == last
        options = {"splits_head": splits_here, "has_pair": pair, "has_routers": routed}
        modules.append(LayerStage(runs, images, ends, **options))

    caller_values = stage_inputs(known.model, stages, len(known.trunks), has_loss=known.loss is not None)
    join = _JoinUnits(known, tuple(balance))
    return StagedModel(known.module, modules, tuple(sorted(links)), caller_values, join, known.loss, is_fine=True)


@dataclass(frozen=True, slots=True, eq=False)
class _JoinUnits:
    """Makes fewer stages of these; a copy does so with the copied model."""

    known: _Known
    balance: tuple[int, ...]
    """Units of each stage."""

    def __call__(self, module: nn.Module, sizes: Sequence[int]) -> StagedModel:
        if module is not self.known.module:
            raise BalanceError("this is another model than the stages are of")
        edges = [0, *accumulate(sizes)]
        return _staged(self.known, [sum(self.balance[begin:end]) for begin, end in pairwise(edges)])


def _ranges(trunks: Sequence[Trunk], first: int, end: int) -> list[LayerRange]:
    """The layers of the units from ``first`` to ``end``, by trunk."""
    found: list[LayerRange] = []
    before = 1
    """The first unit of a trunk's layers."""
    for number, trunk in enumerate(trunks):
        behind = before + len(trunk.layers)
        is_last = number == len(trunks) - 1
        begin, stop = max(first, before) - before, min(end, behind) - before
        has_first = first == 0 if number == 0 else begin == 0 and stop > 0
        has_last = end > behind if is_last else 0 < stop == len(trunk.layers) and begin < stop
        if has_first or has_last or begin < stop:
            found.append(LayerRange(number, has_first, min(begin, stop) if begin > stop else begin, stop, has_last))
        before = behind
    return found
