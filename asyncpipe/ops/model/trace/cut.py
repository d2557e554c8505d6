"""A traced graph, and the positions where it is cut into stages.

A trace is a list of nodes in the order in which they ran, each with the submodules that it ran in. A cut is a position
in that list. So the position of a node determines its stage, and values only go to later stages::

    nodes   embedding  add │ linear  relu  linear │ linear  log_softmax
    called  tok            │ blocks.0 ──────────▶ │ head
    stage   0              │ 1                    │ 2

Two kinds of nodes have no position. An item of a tuple belongs to the stage of the tuple. A number that is computed
from the sizes of the inputs only is computed by every stage that needs it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property, partial
from itertools import accumulate, pairwise, repeat
from operator import attrgetter, getitem, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from asyncpipe.core.predict.balance import even_balance
from asyncpipe.errors import TraceError
from asyncpipe.ops.model.nested import flatten, rebuild

__all__ = [
    "ROOT",
    "SubmoduleCall",
    "CutPosition",
    "OutputShape",
    "SplitName",
    "TracedGraph",
    "cut_at_names",
    "cut_evenly",
    "cut_finely",
    "inner_graphs",
]

ROOT = "model"
"""The attribute of the traced wrapper that is the model, and so the first word of all names in a trace."""

_ENOUGH_PIECES = 16
"""Of so many pieces even stages can be made."""
_MOST_PIECES = 64
"""More pieces take longer to measure than they gain."""
_ENOUGH_NAMES = 4
"""Where a message names good places, it names those of smaller submodules if the outer ones are fewer."""
_SHOWN = 8


class SubmoduleCall(NamedTuple):
    """One call of a submodule: nodes ``first`` to ``last`` ran in it. ``depth`` counts the calls that contain it."""

    key: str
    """Unique in a trace: the second call of ``lin`` is ``lin@1``."""
    name: str
    depth: int
    first: int
    last: int


class SplitName(NamedTuple):
    """The beginning or the end of a submodule's first call."""

    name: str
    at_end: bool


class OutputShape:
    """The nested value that the model returns, with holes where the outputs of the graph go."""

    def __init__(self, value: Any, is_hole: Callable[[Any], bool]) -> None:
        leaves, self._structure = flatten(value, wraps=(torch.SymInt, torch.SymFloat, torch.SymBool), error=TraceError)
        self._leaves = [OutputShape if is_hole(leaf) else leaf for leaf in leaves]

    def around(self, outputs: Iterable[Any]) -> Any:
        """The nested value with ``outputs`` in its holes."""
        remaining = iter(outputs)
        leaves = (next(remaining) if leaf is OutputShape else leaf for leaf in self._leaves)
        return rebuild(self._structure, leaves)

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled and copied as a nested value, since torch has deprecated other ways to construct a TreeSpec.
        return OutputShape, (self.around(repeat(OutputShape)), partial(is_, OutputShape))


@dataclass(frozen=True, eq=False)
class TracedGraph:
    """The whole model as one graph, in one mode."""

    mode: str
    """``train`` or ``eval``, for messages."""
    root: nn.Module
    """Has the graphs of regions with a grad mode or autocast of their own as submodules."""
    inputs: dict[fx.Node, int]
    """For each placeholder, the index of the caller's tensor that it is."""
    state: dict[fx.Node, str]
    """For each node that reads a parameter, a buffer or a constant, its name."""
    nodes: list[fx.Node]
    """All operations, in the order in which they ran."""
    outputs: list[Any]
    """What the graph returns: nodes, and constant numbers."""
    shape: OutputShape
    """What the caller gets, built from the outputs."""
    device: torch.device
    """The device of the model when it was traced."""
    checkpoints: str = ""
    """What calls ``torch.utils.checkpoint``, in words; empty if nothing does."""

    @cached_property
    def sizes(self) -> set[fx.Node]:
        """The nodes that are numbers computed from the sizes of the inputs only."""
        found: set[fx.Node] = set()
        for node in self.nodes:
            made_of = node.all_input_nodes
            if node.target is torch.ops.aten.sym_size.int:
                if made_of[0] in self.inputs:
                    found.add(node)
            elif made_of and found.issuperset(made_of) and isinstance(node.meta.get("val"), _NUMBERS):
                found.add(node)
        return found

    @cached_property
    def placed(self) -> list[fx.Node]:
        """The nodes that have a position, in order."""
        return [node for node in self.nodes if node not in self.sizes and not _is_item(node)]

    @cached_property
    def calls(self) -> dict[str, SubmoduleCall]:
        """By key: the calls of submodules that computed anything, in the order in which they began."""
        calls: dict[str, SubmoduleCall] = {}
        for position, node in enumerate(self.placed):
            for depth, key, name in _called(node, self.root):
                call = calls.get(key, SubmoduleCall(key, name, depth, position, position))
                calls[key] = call._replace(last=position)
        return calls

    def stages(self, cuts: Sequence[int]) -> dict[fx.Node, int]:
        """The stage of every node, except ``sizes``."""
        stages = {node: bisect_right(cuts, position) for position, node in enumerate(self.placed)}
        for node in self.nodes:
            if _is_item(node) and node not in self.sizes:
                stages[node] = stages[node.all_input_nodes[0]]
        return stages

    def readers(self, node: fx.Node, stages: Mapping[fx.Node, int], last: int) -> set[int]:
        """The stages that use the value of a node. The last stage uses the outputs."""
        return {stages[user] for user in node.users if user in stages} | ({last} if node in self.returned else set())

    @cached_property
    def returned(self) -> set[fx.Node]:
        return {leaf for leaf in self.outputs if isinstance(leaf, fx.Node)}


_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


def _is_item(node: fx.Node) -> bool:
    return node.target is getitem and bool(node.all_input_nodes)


def _called(node: fx.Node, root: nn.Module) -> Iterator[tuple[int, str, str]]:
    """(depth, key, name) of the submodule calls that a node, or a node of its region, ran in."""
    depth = 0
    for key, (name, _) in node.meta.get("nn_module_stack", {}).items():
        if name.startswith(f"{ROOT}."):
            depth += 1
            yield depth, key, name.removeprefix(f"{ROOT}.")
    for region in inner_graphs(node, root):
        for inner in region.graph.nodes:
            if inner.op == "call_function" and not _is_item(inner):
                yield from _called(inner, region)


def inner_graphs(node: fx.Node, root: nn.Module) -> list[fx.GraphModule]:
    """The graphs that a node takes as arguments and runs: regions with a mode of their own, and branches."""
    modules = [attrgetter(str(read.target))(root) for read in node.all_input_nodes if read.op == "get_attr"]
    return [module for module in modules if isinstance(module, fx.GraphModule)]


# Cuts


class CutPosition(NamedTuple):
    """A position at which a new stage begins, and its name in messages."""

    position: int
    label: str


def cut_at_names(model: nn.Module, traced: TracedGraph, points: Iterable[SplitName]) -> list[CutPosition]:
    """The cuts at the beginning or end of submodules, in the order of the trace.

    Raises ``TraceError`` for a name that the model does not have, for a submodule that computes nothing, and for a cut
    that would make an empty stage.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    cuts = []
    for name, at_end in points:
        if not name or name not in modules:
            near = ", ".join(get_close_matches(name, [key for key in modules if key], n=3, cutoff=0.5))
            raise TraceError(
                f"the model has no submodule {name!r} to split at; "
                f"{f'near it are {near}; ' if near else ''}{good_splits(traced)}"
            )
        call = _first_call(traced, name, modules)
        label = f"the {'end' if at_end else 'beginning'} of {name!r}"
        cuts.append(CutPosition(call.last + 1, label) if at_end else CutPosition(call.first, label))
    cuts.sort(key=lambda cut: cut.position)
    bounds = [CutPosition(0, "the model's beginning"), *cuts, CutPosition(len(traced.placed), "the model's end")]
    for before, after in pairwise(bounds):
        if before.position == after.position and cuts:
            raise TraceError(
                f"nothing is computed between {before.label} and {after.label} in {traced.mode} mode, so a split "
                "there would make an empty stage; leave it out"
            )
    return cuts


def good_splits(traced: TracedGraph) -> str:
    """Says at which submodules the model is best split: the outermost ones, if these are enough."""
    best: list[str] = []
    for depth in range(1, 1 + max((call.depth for call in traced.calls.values()), default=0)):
        best = list(dict.fromkeys(call.name for call in _places(traced, traced, depth)))
        if len(best) >= _ENOUGH_NAMES:
            break
    if not best:
        return "it has no submodule where it can be split"
    told = ", ".join(best[:_SHOWN]) + (f" and {len(best) - _SHOWN} more" if len(best) > _SHOWN else "")
    return f"good ones to split at are {told}"


def _first_call(traced: TracedGraph, name: str, modules: Mapping[str, nn.Module]) -> SubmoduleCall:
    """The first call of a submodule: under this name if there is one, else under another name of it."""
    same = {other for other, module in modules.items() if module is modules[name]}
    calls = [call for call in traced.calls.values() if call.name in same]
    if not calls:
        raise TraceError(
            f"submodule {name!r} computes nothing in {traced.mode} mode, so the model cannot be split there; "
            f"{good_splits(traced)}"
        )
    return min(calls, key=lambda call: (call.name != name, call.first))


def cut_evenly(
    traced: TracedGraph, other: TracedGraph, stages: int, tensors: Mapping[str, Tensor]
) -> tuple[list[int], list[int]]:
    """Positions, in both traces, that spread the parameters over ``stages`` stages as evenly as ``cut_finely`` allows.

    The cost of a parameter is its number of elements, and counts where it is used first. Raises ``TraceError`` if there
    are too few calls.
    """
    here, there = cut_finely(traced, other, stages)
    if len(here) + 1 < stages:
        raise TraceError(
            f"{stages} stages need {stages - 1} cuts, but the model's submodules begin at only {len(here)} places "
            f"where it can be cut; give fewer stages ({good_splits(traced)})"
        )
    costs = _costs(traced, tensors)
    pieces = [sum(costs[begin:end]) for begin, end in pairwise([0, *here, len(costs)])]
    last_pieces = list(accumulate(even_balance(pieces, stages)))[:-1]
    return [here[end - 1] for end in last_pieces], [there[end - 1] for end in last_pieces]


def cut_finely(traced: TracedGraph, other: TracedGraph, stages: int = 1) -> tuple[list[int], list[int]]:
    """Positions, in both traces, where calls of submodules begin: enough to choose the borders of ``stages`` among.

    The outermost submodules are taken, and smaller ones while there are few. None is inside a submodule that calls no
    other.
    """
    places: list[SubmoduleCall] = []
    for depth in range(1, 1 + max((call.depth for call in traced.calls.values()), default=0)):
        if len(places) + 1 >= max(_ENOUGH_PIECES, stages):
            break
        deeper = _places(traced, other, depth)
        if len(places) + 1 >= max(2, stages) and len(deeper) + 1 > _MOST_PIECES:
            break
        places = deeper
    return [call.first for call in places], [other.calls[call.key].first for call in places]


def _costs(traced: TracedGraph, tensors: Mapping[str, Tensor]) -> list[float]:
    """The cost of each position: 1, and the elements of the parameters that are used there first."""
    seen: set[str] = set()
    costs = []
    for node in traced.placed:
        names = {traced.state[read] for read in node.all_input_nodes if read in traced.state} - seen
        seen |= names
        costs.append(1.0 + sum(tensors[name].numel() for name in names if isinstance(tensors[name], nn.Parameter)))
    return costs


def _places(traced: TracedGraph, other: TracedGraph, depth: int) -> list[SubmoduleCall]:
    """The calls, at most ``depth`` deep, before which both traces can be cut; in the order of both."""
    chosen: list[SubmoduleCall] = []
    last, last_other = 0, 0
    for call in sorted(traced.calls.values(), key=lambda call: (call.first, call.depth)):
        there = other.calls.get(call.key)
        if call.depth <= depth and call.first > last and there is not None and there.first > last_other:
            chosen.append(call)
            last, last_other = call.first, there.first
    return chosen
