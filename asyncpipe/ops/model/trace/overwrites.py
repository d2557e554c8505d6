"""Which values of a traced model are overwritten in place, and whether its stages still compute the right result.

A stage receives a copy of what another stage sends. It may overwrite the copy, since later stages get the result from
it. But a view of the original, which another stage made or received, does not see that change::

    stage 0              stage 1               stage 2
    h ─────────────────▶ h.mul_(2) ──────────▶ reads the product: right
    view = h[0] ───────────────────────────▶  reads the old value: refused
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, fx, nn

from asyncpipe.errors import TraceError
from asyncpipe.ops.model.stage import CALLER
from asyncpipe.ops.model.trace.cut import TracedGraph, inner_graphs
from asyncpipe.ops.torch_internals import operator_schema, storage_id, tree_leaves

__all__ = ["Overwrites", "overwrites", "written_storages"]


@dataclass(frozen=True, slots=True, eq=False)
class Overwrites:
    """What stages change in place, in one mode."""

    received: set[int] = field(default_factory=set)
    """Stages that overwrite what they receive."""
    state: dict[str, set[int]] = field(default_factory=dict)
    """By name of a buffer, constant or parameter: the stages that overwrite it."""


def overwrites(traced: TracedGraph, stages: Mapping[fx.Node, int], last: int) -> Overwrites:
    """What stages change in place. Raises ``TraceError`` where a stage would miss a change made by another one."""
    found = Overwrites()
    order = {node: position for position, node in enumerate([*traced.inputs, *traced.state, *traced.nodes])}
    same = _same_storages(traced.nodes)
    aliases: dict[int, list[fx.Node]] = {}
    for node in order:
        for storage in {same.get(storage, storage) for storage in _storages(node)}:
            aliases.setdefault(storage, []).append(node)
    for node in traced.nodes:
        for storage in {same.get(storage, storage) for storage in written_storages(node, traced.root)}:
            before = [alias for alias in aliases.get(storage, ()) if order[alias] < order[node]]
            for alias in before:
                if alias in traced.state:
                    found.state.setdefault(traced.state[alias], set()).add(stages[node])
            values = [alias for alias in before if alias not in traced.state]
            _check_stale(traced, stages, order, node, values, last, found)
    return found


def _same_storages(nodes: Iterable[fx.Node]) -> dict[int, int]:
    """By storage: the earlier one that it may be. A dropout that drops nothing returns its input; a trace shows two."""
    same: dict[int, int] = {}
    for node in nodes:
        if "dropout" in str(node.target) and isinstance(node.args[0], fx.Node):
            for output, given in zip(_storages(node), _storages(node.args[0]), strict=False):
                if output != given:
                    same[output] = same.get(given, given)
    return same


def _check_stale(
    traced: TracedGraph,
    stages: Mapping[fx.Node, int],
    order: Mapping[fx.Node, int],
    writer: fx.Node,
    values: Sequence[fx.Node],
    last: int,
    found: Overwrites,
) -> None:
    """Note that ``writer`` overwrites ``values``, which share its memory; raise if a later reader would miss that."""
    here = stages[writer]
    received = [
        value for value in values if stages.get(value, CALLER) != here and here in traced.readers(value, stages, last)
    ]
    if received:
        found.received.add(here)
    for value in values:
        later = {stages[user] for user in value.users if user in stages and order[user] > order[writer]}
        if value in traced.returned:
            later.add(last)
        own = stages.get(value, CALLER) == here
        if later and (len(received) > 1 or not (own or later == {here})):
            raise TraceError(
                f"stage {here} overwrites in place ({writer.target}) a value that it received from before the split, "
                f"and stage {max(later)} reads another view of it afterwards, which would miss the change; "
                "overwrite a copy (drop inplace=True, or clone first), or split elsewhere"
            )


def written_storages(node: fx.Node, root: nn.Module) -> set[int]:
    """The storages that a node changes in place, by their ids in the trace."""
    found: set[int] = set()
    for region in inner_graphs(node, root):
        found = found.union(*(written_storages(inner, region) for inner in region.graph.nodes))
    schema = operator_schema(node.target)
    if schema is None:
        return found
    values = {argument.name: value for argument, value in zip(schema.arguments, node.args, strict=False)}
    values.update(node.kwargs)
    # The schemas of batch_norm and instance_norm do not declare that they update the running statistics.
    updates = bool(values.get("training") or values.get("use_input_stats"))
    for argument in schema.arguments:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if writes or (updates and argument.name in ("running_mean", "running_var")):
            leaves = tree_leaves(values.get(argument.name))
            found = found.union(*(_storages(leaf) for leaf in leaves if isinstance(leaf, fx.Node)))
    return found


def _storages(node: fx.Node) -> set[int]:
    return {storage_id(leaf) for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)}
