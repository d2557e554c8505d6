"""A sequence of layers as stages: the output of each stage is the input of the next.

A link also carries the skips that its source stashes and its user pops (``ops/model/skips.py``), directly from one
stage to the other::

    stage 0 ──output, skips──▶ stage 1 ──output, skips──▶ stage 2
       └──────────────────── skips ────────────────────────▲
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asyncpipe.core.predict.balance import check_balance, even_balance
from asyncpipe.errors import BalanceError, BatchError, OptionError
from asyncpipe.ops.model.microbatch import Arguments
from asyncpipe.ops.model.skip_layout import skip_layout
from asyncpipe.ops.model.skips import SkipKey, Skippable, SkipStore, use_skips
from asyncpipe.ops.model.stage import CALLER, StagedModel, StageModule, has_hooks
from asyncpipe.ops.model.stage_compiler import Layered, StageFunction
from asyncpipe.ops.torch_internals import hooks_of

__all__ = [
    "PipeSequential",
    "SequentialStage",
    "as_sequential",
    "check_plain",
    "split",
    "stage_parts",
    "all_to_first",
]


class PipeSequential(nn.Sequential):
    """A sequence that passes a tuple on as several arguments, as torch's former ``Pipe`` did."""

    def forward(self, *args: Any) -> Any:
        """Call the layers in order. If one returns a tuple, its items are the arguments of the next."""
        for layer in self:
            output = layer(*args)
            args = output if isinstance(output, tuple) else (output,)
        return output


class _LinkValue(NamedTuple):
    """What one stage sends to another."""

    output: Any
    """The input of the next stage; ``None`` on a link to any later stage."""
    skips: list[Tensor | None]


class SequentialStage(StageModule):
    """Consecutive layers. Stage 0 takes the caller's arguments, every other stage the output of the one before."""

    def __init__(
        self, layers: nn.Sequential, index: int, stages: int, skips: Mapping[SkipKey, tuple[int, int]]
    ) -> None:
        super().__init__()
        self.layers = layers
        # What TorchScript does is not looked at, so it may be anything.
        self.overwrites_input = any(
            getattr(module, "inplace", False) or isinstance(module, torch.jit.ScriptModule)
            for module in layers.modules()
        )
        self._index = index
        self._next = index + 1 if index + 1 < stages else CALLER
        self._unpacks = isinstance(layers, PipeSequential)
        self._has_skips = any(isinstance(module, Skippable) for module in layers.modules())
        self._comes_alone = (index - 1, index) not in skips.values()
        """Whether the stage before sends its output and no skips."""
        self._popped: dict[int, list[SkipKey]] = {}
        self._stashed: dict[int, list[SkipKey]] = {}
        for key, (source, user) in skips.items():
            if source != user and user == index:
                self._popped.setdefault(source, []).append(key)
            if source != user and source == index:
                self._stashed.setdefault(user, []).append(key)

    def forward(self, received: Mapping[int, Any]) -> dict[int, Any]:
        """Call the layers in order."""
        if not self._has_skips and not self._stashed:
            return {self._next: self._call(received)}
        incoming: dict[SkipKey, Tensor | None] = {}
        for source, keys in self._popped.items():
            incoming.update(zip(keys, received[source].skips, strict=True))
        with use_skips(SkipStore(incoming)) as store:
            output = self._call(received)
        if self._next == CALLER:
            return {CALLER: output}
        sent: dict[int, Any] = {user: _LinkValue(None, []) for user in self._stashed}
        sent[self._next] = _LinkValue(output, []) if self._next in self._stashed else output
        for user, keys in self._stashed.items():
            sent[user].skips.extend(store.outgoing[key] for key in keys)
        return sent

    def function(self) -> StageFunction:
        """As ``StageModule.function``: where each layer gets what the one before returns, these calls alone."""
        found = self.layered()
        return super().function() if found is None else found[1](found[0])

    def layered(self) -> Layered | None:
        """As ``StageModule.layered``."""
        layers = self.layers
        if self._has_skips or self._stashed or self._unpacks or (self._index and not self._comes_alone):
            return None
        if has_hooks(self) or has_hooks(layers) or type(layers).forward is not nn.Sequential.forward or not layers:
            return None
        if not self._index:
            return tuple(layers), partial(partial, _first_chain, self._next)
        return tuple(layers), partial(partial, _chain, self._index - 1, self._next)

    def _call(self, received: Mapping[int, Any]) -> Any:
        layers, unpacks = self.layers, self._unpacks
        if self._index:
            output = received[self._index - 1]
            output = output if self._comes_alone else output.output
            return layers(*output) if unpacks and isinstance(output, tuple) else layers(output)
        args, kwargs = Arguments.wrap(received[CALLER])
        if (len(args) == 1 or unpacks) and not kwargs:
            return layers(*args)
        return _call_layers(layers, *args, **kwargs)


def _chain(source: int, user: int, layers: Sequence[Callable[..., Any]], received: Mapping[int, Any]) -> dict[int, Any]:
    value = received[source]
    for layer in layers:
        value = layer(value)
    return {user: value}


def _first_chain(user: int, layers: Sequence[Callable[..., Any]], received: Mapping[int, Any]) -> dict[int, Any]:
    args, kwargs = Arguments.wrap(received[CALLER])
    return {user: _call_layers(layers, *args, **kwargs)}


def _call_layers(layers: Iterable[Callable[..., Any]], *args: Any, **kwargs: Any) -> Any:
    # nn.Sequential takes one argument, but its first layer may take several.
    first, *others = layers
    value = first(*args, **kwargs)
    for layer in others:
        value = layer(value)
    return value


def stage_parts(module: nn.Module, parts: Sequence[nn.Sequential]) -> StagedModel:
    """``parts`` as the stages of ``module``, which owns their parameters. The parts are called with their hooks.

    Raises ``SkipLayoutError``, which lists every stash without a pop and every pop without a stash.
    """
    skips = skip_layout(parts)
    links = {(j, j + 1) for j in range(len(parts) - 1)} | {ends for ends in skips.values() if ends[0] != ends[1]}
    return StagedModel(
        module=module,
        stages=[SequentialStage(part, index, len(parts), skips) for index, part in enumerate(parts)],
        links=tuple(sorted(links)),
        caller_values=all_to_first,
    )


def all_to_first(arguments: Arguments) -> dict[int, Any]:
    """What each stage takes of the caller's arguments: stage 0 takes all of them; a lone tensor by itself."""
    args, kwargs = arguments
    if not args and not kwargs:
        raise BatchError("the model was called without arguments; give its first layer at least one")
    return {0: args[0] if len(args) == 1 and not kwargs and isinstance(args[0], Tensor) else arguments}


def as_sequential(model: nn.Module | Sequence[nn.Module]) -> nn.Sequential:
    """The model as a sequence of layers: an ``nn.Sequential`` itself, a list of modules in a new one."""
    if isinstance(model, nn.Sequential):
        sequence = model
    elif isinstance(model, Sequence) and all(isinstance(layer, nn.Module) for layer in model):
        sequence = nn.Sequential(*model)
    elif isinstance(model, torch.jit.ScriptModule):
        raise OptionError(
            f"the model is one piece of TorchScript ({model.original_name}), which cannot be cut into stages; give its "
            "layers as a list, if it calls them one after the other, or an nn.Sequential of TorchScript modules"
        )
    else:
        # By name: importing transformers takes long.
        if {"PreTrainedModel", "PeftModel"} & {kind.__name__ for kind in type(model).__mro__}:
            advice = "asyncpipe.from_transformers(model, batch, …) makes a pipeline of a model of transformers"
        else:
            advice = "asyncpipe.trace(model, example, split=[…]) cuts any module into stages"
        raise OptionError(
            f"model must be an nn.Sequential, a list of modules or a traced model, got {type(model).__name__}; {advice}"
        )
    if not len(sequence):
        raise OptionError("model has no layers; give at least one a stage")
    check_plain(sequence, "the model")
    return sequence


def check_plain(sequence: nn.Sequential, what: str) -> None:
    """Raise ``OptionError`` if ``sequence``, whose layers stages call, does more than to call them."""
    if type(sequence).forward not in (nn.Sequential.forward, PipeSequential.forward):
        raise OptionError(
            f"{what} is a {type(sequence).__name__}, an nn.Sequential with a forward of its own, which no stage would "
            "call; make it a layer of an nn.Sequential, or cut it with asyncpipe.trace"
        )
    if hooks_of(sequence):
        raise OptionError(
            f"{what} is an nn.Sequential with hooks of its own, which no stage would call, since stages call its "
            "layers; register them on its layers"
        )


def split(model: nn.Sequential, balance: str | Sequence[int], stages: int) -> list[nn.Sequential]:
    """``stages`` consecutive parts of ``model``, whose layers keep their names.

    ``balance`` is the number of layers of each part, or ``"auto"``, which spreads the parameters as evenly as possible.
    Raises ``BalanceError``.
    """
    layers = list(model._modules.items())  # named_children() omits the second occurrence of a layer.
    if isinstance(balance, str):
        if balance != "auto":
            raise BalanceError(f"balance must be 'auto' or a list of integers, got {balance!r}")
        sizes = even_balance([1 + sum(p.numel() for p in layer.parameters()) for layer in model], stages)
    else:
        sizes = check_balance(balance, len(layers))
        if len(sizes) != stages:
            raise BalanceError(f"balance {sizes} has {len(sizes)} entries for {stages} stages; give one a stage")
    ends = list(accumulate(sizes))
    kind = PipeSequential if isinstance(model, PipeSequential) else nn.Sequential
    return [kind(OrderedDict(layers[end - size : end])) for size, end in zip(sizes, ends, strict=True)]
