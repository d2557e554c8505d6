"""Which stage sends which skip to which: every stash of a model matched with its pop, before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from asyncpipe.errors import ArgumentTypeError, SkipLayoutError
from asyncpipe.ops.model.skips import SkipKey, Skippable, describe_skip

__all__ = ["skip_layout", "verify_skippables"]


@dataclass(frozen=True, slots=True)
class _SkippableModule:
    """A module with skips."""

    stage: int
    label: str
    """What error messages call it."""
    stashes: tuple[SkipKey, ...]
    pops: tuple[SkipKey, ...]


def verify_skippables(model: Iterable[nn.Module]) -> None:
    """Raise ``SkipLayoutError`` unless every stash in ``model`` has exactly one pop, in a later module.

    ``model`` is an ``nn.Sequential``, or modules in the order in which they are called. Modules inside a layer count as
    called in the order of ``layer.modules()``. The message has one line for each mismatch, with the layer's name, or
    its position where it has none.
    """
    _matched(_skippable_modules([model]))


def skip_layout(stages: Sequence[Iterable[nn.Module]]) -> dict[SkipKey, tuple[int, int]]:
    """For each skip, in the order of the stashes: the stage that stashes it, and the stage that pops it.

    ``stages`` are the layers of each stage in call order. For a skip inside one stage both are that stage. Raises
    ``SkipLayoutError`` as ``verify_skippables`` does for all layers together, with positions counted over all stages.
    """
    return {key: (source.stage, target.stage) for key, (source, target) in _matched(_skippable_modules(stages)).items()}


def _skippable_modules(stages: Sequence[Iterable[nn.Module]]) -> list[_SkippableModule]:
    """The modules with skips, in call order."""
    modules: list[_SkippableModule] = []
    position = 0
    for stage, layers in enumerate(stages):
        for name, layer in _named(layers, position):
            position += 1
            if not isinstance(layer, nn.Module):
                raise ArgumentTypeError(f"layer {name} must be an nn.Module, got a {type(layer).__name__}")
            for path, module in layer.named_modules(prefix=name):
                if isinstance(module, Skippable):
                    label = f"layer {path} ({type(module).__name__})"
                    stashes = tuple(map(module.skip_key, module.skip_stashes))
                    pops = tuple(map(module.skip_key, module.skip_pops))
                    modules.append(_SkippableModule(stage, label, stashes, pops))
    return modules


def _named(layers: Iterable[nn.Module], first: int) -> Iterable[tuple[str, nn.Module]]:
    if isinstance(layers, nn.Sequential | nn.ModuleList):
        # Not named_children(), which omits the second occurrence of a layer.
        return zip(layers._modules, layers, strict=True)
    return ((str(position), layer) for position, layer in enumerate(layers, first))


def _matched(modules: Sequence[_SkippableModule]) -> dict[SkipKey, tuple[_SkippableModule, _SkippableModule]]:
    """For each skip the module that stashes it and the module that pops it; raises ``SkipLayoutError``.

    The first stash of a skip and the first pop after it are a pair, so that one mistake is reported only once.
    """
    sources: dict[SkipKey, _SkippableModule] = {}
    targets: dict[SkipKey, _SkippableModule] = {}
    mistakes: list[tuple[_SkippableModule, str]] = []

    def mistake(module: _SkippableModule, verb: str, key: SkipKey, why: str = "") -> None:
        mistakes.append((module, f"{module.label} {verb} {describe_skip(key)}{why}"))

    for module in modules:
        for key in module.pops:
            if key in module.stashes:
                mistake(module, "both stashes and pops", key)
            elif key not in sources:
                mistake(module, "pops", key, ", which no layer before it stashes")
            elif targets.setdefault(key, module) is not module:
                mistake(module, "pops", key, f", as {targets[key].label} does")
        for key in module.stashes:
            if key not in module.pops and sources.setdefault(key, module) is not module:
                mistake(module, "stashes", key, f", as {sources[key].label} does")
    for key, module in sources.items():
        if key not in targets:
            mistake(module, "stashes", key, ", which no layer after it pops")
    if mistakes:
        lines = "".join(f"\n  {line}" for _, line in sorted(mistakes, key=lambda entry: modules.index(entry[0])))
        raise SkipLayoutError(
            f"stashes and pops do not match:{lines}\nEvery skip needs one stash and one pop in a later layer; where a "
            f"name is used by several pairs, give each pair its own with isolate(Namespace())."
        )
    return {key: (source, targets[key]) for key, source in sources.items()}
