"""Models of families that are not known: traced, and cut where their lists of layers are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

from torch import nn

from asyncpipe.errors import OptionError, TraceError
from asyncpipe.ops.model.microbatch import Arguments, keywords
from asyncpipe.ops.model.stage import StagedModel
from asyncpipe.ops.model.trace.trace import trace
from asyncpipe.ops.model.transformers.batch_inputs import model_inputs
from asyncpipe.ops.model.transformers.counted_loss import CountedLoss

__all__ = ["trace_at_layers"]


def trace_at_layers(module: nn.Module, model: nn.Module, batch: Any, loss: CountedLoss | None) -> StagedModel:
    """``model``, traced with ``batch``, with each of its layers as a stage. ``module`` is it, or what wraps it.

    Raises ``OptionError`` if it has no list of layers or cannot be traced.
    """
    name = type(model).__name__
    layers = _layer_names(model)
    if not layers:
        raise OptionError(
            f"{name} has no list of layers that are alike, between which it could be cut; cut it with "
            "asyncpipe.trace(model, example, split=[…]) and give the result to Pipeline"
        )
    caller_values = _TracedValues(model, loss is not None)
    try:
        staged = trace(model, caller_values.arguments(Arguments.wrap(keywords(batch))), layers)
    except TraceError as error:
        raise OptionError(
            f"{name} is of a family that is not known, and cannot be traced: {error}; cut it by hand into a list of "
            "stages and give it to Pipeline"
        ) from error
    return _wrapped(staged, module, caller_values, loss)


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


@dataclass(frozen=True, slots=True, eq=False)
class _TracedValues:
    """What stages take of a batch, as the arguments that a model was traced with."""

    model: Any
    has_loss: bool
    traced: Any = None
    """What they take of those arguments; ``None`` until the model is traced."""

    def arguments(self, given: Arguments) -> Arguments:
        inputs = model_inputs(self.model, given, has_loss=self.has_loss)
        if "use_cache" in signature(self.model.forward).parameters:
            inputs["use_cache"] = False
        return Arguments((), inputs)

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
