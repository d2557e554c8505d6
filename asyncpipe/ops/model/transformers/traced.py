"""Models of families that are not known: traced, and cut where their lists of layers are."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from asyncpipe.errors import OptionError, TraceError
from asyncpipe.ops.model.microbatch import Arguments, keywords
from asyncpipe.ops.model.stage import StagedModel
from asyncpipe.ops.model.trace.trace import trace
from asyncpipe.ops.model.transformers.batch_inputs import model_inputs
from asyncpipe.ops.model.transformers.counted_loss import CountedLoss
from asyncpipe.ops.model.transformers.layer_run import without_cache

__all__ = ["trace_at_layers"]

_logger = logging.getLogger(__name__)


def trace_at_layers(module: nn.Module, model: nn.Module, batch: Any, loss: CountedLoss | None) -> StagedModel:
    """``model``, traced with ``batch``, with each of its layers as a stage, or cut finely if it has no list of layers.

    ``module`` is it, or what wraps it. Raises ``OptionError`` if it cannot be traced.
    """
    name = type(model).__name__
    caller_values = _TracedValues(model, loss is not None)
    try:
        arguments = caller_values.arguments(Arguments.wrap(keywords(batch)))
        _logger.info("tracing %s, which is of a family that is not known; this may take minutes", name)
        staged = trace(model, arguments, _layer_names(model) or "finest")
    except TraceError as error:
        raise OptionError(
            f"{name} is of a family that is not known, and cannot be traced: {error}; cut it by hand into a list of "
            "stages and give it to Pipeline"
        ) from error
    return _wrapped(staged, module, replace(caller_values, names=frozenset(arguments.kwargs)), loss)


def _layer_names(model: nn.Module) -> list[str]:
    """The names of the layers that begin a stage: all but the first, of the outermost lists of modules of one class."""
    found: list[str] = []
    for name, part in model.named_modules():
        if any(name.startswith(f"{layer}.") for layer in found) or not isinstance(part, nn.ModuleList):
            continue
        kinds = {type(layer) for layer in part}
        if len(part) > 1 and len(kinds) == 1 and all(any(True for _ in layer.parameters()) for layer in part):
            found += [f"{name}.{index}" for index in range(len(part))]
    return found[1:]


_USUAL = {"attention_mask": 1, "token_type_ids": 0}
"""By name, what a model takes an argument for that is not there: a batch may have it where the example has not."""


@dataclass(frozen=True, slots=True, eq=False)
class _TracedValues:
    """What stages take of a batch, as the arguments that a model was traced with."""

    model: Any
    has_loss: bool
    traced: Any = None
    """What they take of those arguments; ``None`` until the model is traced."""
    names: frozenset[str] = frozenset()
    """Of the example's arguments."""

    def arguments(self, given: Arguments) -> Arguments:
        inputs = model_inputs(self.model, given, has_loss=self.has_loss)
        for name, usual in _USUAL.items() if self.names and "input_ids" in inputs else ():
            if name in self.names:
                inputs.setdefault(name, torch.full_like(inputs["input_ids"], usual))
            elif name in inputs and bool((inputs[name] == usual).all()):
                del inputs[name]
        return Arguments((), inputs | without_cache(self.model))

    def __call__(self, arguments: Arguments) -> dict[int, Any]:
        taken: dict[int, Any] = self.traced(self.arguments(arguments))
        return taken


@dataclass(frozen=True, slots=True, eq=False)
class _JoinTraced:
    whole: StagedModel
    module: nn.Module
    caller_values: _TracedValues
    loss: CountedLoss | None

    def __call__(self, module: nn.Module, balance: Sequence[int]) -> StagedModel:
        # Whether it is a copy, the trace knows.
        inner = self.whole.module if module is self.module else module
        assert self.whole.join is not None
        return _wrapped(self.whole.join(inner, balance), self.module, self.caller_values, self.loss)


def _wrapped(
    staged: StagedModel, module: nn.Module, caller_values: _TracedValues, loss: CountedLoss | None
) -> StagedModel:
    caller_values, join = (
        replace(caller_values, traced=staged.caller_values),
        _JoinTraced(staged, module, caller_values, loss),
    )
    return replace(staged, module=module, caller_values=caller_values, join=join, own_loss=loss, is_fine=True)
