"""Single layers that are recomputed in the backward of their stage, while all others are kept (``recompute_layers``).

While a stage runs, the ``forward`` of such a layer goes through ``torch.utils.checkpoint``, which keeps its input and
calls it again in the backward: in B, or in both halves of a split one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from asyncpipe.errors import OptionError, StageError
from asyncpipe.ops.model.stage import StagedModel
from asyncpipe.ops.torch_internals import version_of

__all__ = ["layers_of_stages", "recomputing"]


def layers_of_stages(staged: StagedModel, given: Sequence[int | str]) -> list[tuple[nn.Module, ...]]:
    """The layers that ``given`` names, by stage.

    A number counts the layers of the outermost list of layers, a name is one of ``named_modules()`` and may have ``*``.
    Raises ``OptionError`` for what is no layer of a stage.
    """
    modules = dict(staged.module.named_modules())
    wanted: dict[int, str] = {}
    for each in given:
        wanted.update((id(modules[name]), name) for name in _names(modules, each))
    row = len(staged.stages) // staged.rows
    paths = [[path for path, module in stage.named_modules() if id(module) in wanted] for stage in staged.stages[:row]]
    found = {id(stage.get_submodule(path)) for stage, mine in zip(staged.stages, paths, strict=False) for path in mine}
    for number, name in wanted.items():
        if number not in found:
            raise OptionError(
                f"recompute_layers: {name!r} is in no stage as a module: it is cut, or the model was traced; name "
                "layers inside of it, or use checkpoint="
            )
        if isinstance(modules[name], torch.jit.ScriptModule):
            raise OptionError(f"recompute_layers: {name!r} is TorchScript, whose forward cannot be replaced")
    copies = [getattr(stage, "stage", stage) if k >= row else stage for k, stage in enumerate(staged.stages)]
    return [tuple(stage.get_submodule(path) for path in paths[k % row]) for k, stage in enumerate(copies)]


def _names(modules: dict[str, nn.Module], given: int | str) -> list[str]:
    if isinstance(given, str):
        if names := [name for name in modules if name and fnmatchcase(name, given)]:
            return names
        raise OptionError(f"recompute_layers: the model has no module {given!r}; names are those of named_modules()")
    lists = [name for name, module in modules.items() if isinstance(module, nn.Sequential | nn.ModuleList)]
    depths = {name: name.count(".") + bool(name) for name in lists}
    outer = [name for name in lists if depths[name] == min(depths.values())]
    longest = max((len(list(modules[name].children())) for name in outer), default=0)
    named = [name for name in outer if len(list(modules[name].children())) == longest]
    if len(named) != 1:
        raise OptionError(
            f"recompute_layers: {given} could be a layer of each of {named}; give names, as '{named[0]}.{given}'"
            if named
            else f"recompute_layers: the model has no list of layers, of which {given} is the number; give names"
        )
    if isinstance(given, bool) or not 0 <= given < longest:
        raise OptionError(f"recompute_layers: {named[0] or 'the model'} has {longest} layers, from 0, got {given!r}")
    return [f"{named[0]}.{list(modules[named[0]]._modules)[given]}".lstrip(".")]


@contextmanager
def recomputing(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, calls of ``layers`` on this thread keep their inputs alone. No other thread may call them meanwhile."""
    before = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        vars(layer)["forward"] = partial(_forward, layer, layer.forward)
    try:
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            del vars(layer)["forward"]
            if own is not None:
                vars(layer)["forward"] = own


def _forward(layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    buffers = list(layer.named_buffers())
    versions = [version_of(buffer) for _, buffer in buffers]
    output = checkpoint(forward, *args, use_reentrant=False, **kwargs)
    for (name, buffer), version in zip(buffers, versions, strict=True):
        if version_of(buffer) != version:
            raise StageError(
                f"{type(layer).__name__} changes its buffer {name!r} in its forward, which recompute_layers would "
                "repeat; leave the layer out, or use checkpoint='always', which restores buffers"
            )
    return output
