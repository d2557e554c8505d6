"""The stages of a traced model: each runs its part of the traced graphs on the model's own parameters.

A stage's graph has no state. Parameters, buffers and the device are its arguments, so a stage can be moved, copied and
recomputed like any other module::

    received ──values──▶ graph(device, parameters, values) ──▶ what each later stage gets
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, fx, nn

from asyncpipe.errors import TraceError
from asyncpipe.ops.autograd.checkpoint import is_recomputing
from asyncpipe.ops.model.stage import CALLER, StageModule
from asyncpipe.ops.model.trace.cut import OutputShape, TracedGraph
from asyncpipe.ops.model.trace.export import TraceState
from asyncpipe.ops.model.trace.graph_writer import GraphWriter
from asyncpipe.ops.model.trace.overwrites import overwrites
from asyncpipe.ops.torch_internals import tree_leaves

__all__ = ["ModelSlots", "TracedStage", "CallerValue", "build_stages"]

CallerValue = tuple[int, int | None]
"""What a stage takes from the caller: (index, None) for a tensor, (index, dimension) for a size of it."""


class StageGraph(NamedTuple):
    """What a stage runs in one mode."""

    graph: fx.GraphModule
    """(device, *state, *values) -> one tuple for each target."""
    state: tuple[str, ...]
    changed: frozenset[str]
    """The names in ``state`` that it overwrites."""
    targets: tuple[int, ...]
    shape: OutputShape
    """The shape of what the caller gets from the last stage."""


class TracedStage(StageModule):
    """One stage of a traced model. Its ``training`` flag selects the graph that it runs."""

    def __init__(
        self,
        graphs: Mapping[bool, StageGraph],
        sources: tuple[int, ...],
        state: TraceState,
        slots: ModelSlots,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.graphs = dict(graphs)
        """By mode (whether training): what the stage runs."""
        self._sources = sources
        self._model_slots = slots
        self._traced_device = device
        # Every tensor is registered under the name that it has in the model.
        for name in dict.fromkeys(name for part in graphs.values() for name in part.state):
            *path, last = name.split(".")
            owner: nn.Module = self
            for word in path:
                if word not in owner._modules:
                    owner.add_module(word, nn.Module())
                owner = owner.get_submodule(word)
            tensor = state.tensors[name]
            if isinstance(tensor, nn.Parameter):
                owner.register_parameter(last, tensor)
            else:
                owner.register_buffer(last, tensor, name in state.persistent)

    def forward(self, received: Mapping[int, Any]) -> dict[int, Any]:
        """Run the graph of the current mode. A link that this mode does not use gets an empty tuple."""
        part = self.graphs[self.training]
        # Looked up every time, since the image of a module (ops/model/module_image.py) has other tensors.
        state = [attrgetter(name)(self) for name in part.state]
        if part.changed and is_recomputing():
            # The first run has changed it already, so the recomputation changes copies. (Buffers are copies anyway.)
            state = [
                x.clone() if name in part.changed and isinstance(x, nn.Parameter) else x
                for name, x in zip(part.state, state, strict=True)
            ]
        values = [value for source in self._sources for value in received[source]]
        tensors = (value for value in state or tree_leaves(values) if isinstance(value, Tensor))
        device = next((tensor.device for tensor in tensors), self._traced_device)
        # Not a call of the graph module, which prints to stderr if an operation fails.
        results = part.graph.forward(device, *state, *values)
        sent = dict(zip(part.targets, results, strict=True))
        if CALLER in sent:
            sent[CALLER] = part.shape.around(sent[CALLER])
        return sent

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            self._model_slots.put(name, tensor)
        return self


class ModelSlots:
    """The places of the model's parameters and buffers, so that moving a stage also moves them in the model.

    A copy of a stage does not belong to the model, and has an empty ``ModelSlots``.
    """

    def __init__(self, modules: Iterable[nn.Module] = (), names: Mapping[int, str] = MappingProxyType({})) -> None:
        """``names`` has the names of the tensors of ``modules``, by id."""
        self._slots: dict[str, list[tuple[dict[str, Tensor | None], str]]] = {}
        for module in modules:
            parameters: dict[str, Tensor | None] = module._parameters  # type: ignore[assignment]
            for table in (parameters, module._buffers):
                for key, tensor in table.items():
                    if id(tensor) in names:
                        self._slots.setdefault(names[id(tensor)], []).append((table, key))

    def put(self, name: str, tensor: Tensor) -> None:
        """Make ``tensor`` the model's tensor of this name."""
        for table, key in self._slots.get(name, ()):
            table[key] = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelSlots, ()


def build_stages(
    modes: tuple[TracedGraph, TracedGraph], cuts: tuple[list[int], list[int]], state: TraceState, slots: ModelSlots
) -> tuple[list[TracedStage], tuple[tuple[int, int], ...], dict[int, list[CallerValue]]]:
    """The stages from the traces of train and eval mode, the links that either needs, and what stages take of a call.

    Raises ``TraceError`` where a stage overwrites what another stage uses.
    """
    plans = [_CutGraph(traced, cut) for traced, cut in zip(modes, cuts, strict=True)]
    last = len(cuts[0])
    _check_state(plans)
    links = tuple(sorted(set().union(*(plan.sent for plan in plans))))
    # Sorted only so that every run writes the same graphs.
    caller_values = {s: sorted(set().union(*(plan.wanted(s) for plan in plans)), key=str) for s in range(last + 1)}
    caller_values = {s: wanted for s, wanted in caller_values.items() if wanted}
    stages = []
    for s in range(last + 1):
        sources = tuple([CALLER] * (s in caller_values) + [source for source, user in links if user == s])
        targets = (*(user for source, user in links if source == s), *([CALLER] if s == last else []))
        train, evaluate = (_write(plan, s, caller_values.get(s, []), sources, targets) for plan in plans)
        stage = TracedStage({True: train, False: evaluate}, sources, state, slots, modes[0].device)
        stage.overwrites_input = any(s in plan.overwrites.received for plan in plans)
        stages.append(stage)
    return stages, links, caller_values


class _CutGraph:
    """A traced graph with its cuts: the stage of each node, and the values that stages send each other."""

    def __init__(self, traced: TracedGraph, cuts: Sequence[int]) -> None:
        self.traced = traced
        self.last = len(cuts)
        self.stages = traced.stages(cuts)
        self.overwrites = overwrites(traced, self.stages, self.last)
        self.sent: dict[tuple[int, int], list[fx.Node]] = {}
        """By (source, user): the values that the one stage sends to the other, in the order in which they are made."""
        for node in traced.nodes:
            if node not in traced.sizes:
                stage = self.stages[node]
                for user in traced.readers(node, self.stages, self.last) - {stage}:
                    self.sent.setdefault((stage, user), []).append(node)

    def nodes(self, stage: int) -> list[fx.Node]:
        """The nodes that a stage computes, in order, with the sizes that it needs."""
        own = {node for node, s in self.stages.items() if s == stage}
        sizes = self.traced.sizes
        open_ends = [made_of for node in own for made_of in node.all_input_nodes if made_of in sizes]
        if stage == self.last:
            open_ends += [leaf for leaf in self.traced.outputs if isinstance(leaf, fx.Node) and leaf in sizes]
        needed: set[fx.Node] = set()
        while open_ends:
            node = open_ends.pop()
            if node not in needed:
                needed.add(node)
                open_ends += [made_of for made_of in node.all_input_nodes if made_of in sizes]
        return [node for node in self.traced.nodes if node in own or node in needed]

    def wanted(self, stage: int) -> set[CallerValue]:
        """What a stage takes from the caller."""
        inputs = self.traced.inputs
        whole = {(i, None) for node, i in inputs.items() if stage in self.traced.readers(node, self.stages, self.last)}
        sizes = {self.size(node) for node in self.nodes(stage)}
        return whole | {size for size in sizes if size is not None}

    def size(self, node: fx.Node) -> CallerValue | None:
        """(index, dimension) if a node is a size of one of the caller's tensors, else ``None``."""
        if node in self.traced.sizes and node.target is torch.ops.aten.sym_size.int:
            tensor, dimension = node.args
            assert isinstance(tensor, fx.Node)
            assert isinstance(dimension, int)
            return self.traced.inputs[tensor], dimension
        return None

    def state(self, stage: int) -> dict[str, list[fx.Node]]:
        """By name of each parameter, buffer or constant that a stage uses: the nodes that read it."""
        found: dict[str, list[fx.Node]] = {}
        for node, name in self.traced.state.items():
            if stage in self.traced.readers(node, self.stages, self.last):
                found.setdefault(name, []).append(node)
        return found


def _check_state(plans: Sequence[_CutGraph]) -> None:
    """Raise where a stage overwrites a buffer that another stage uses, since each would have a copy of it."""
    users: dict[str, set[int]] = {}
    for plan in plans:
        for node, name in plan.traced.state.items():
            users.setdefault(name, set()).update(plan.traced.readers(node, plan.stages, plan.last))
    for plan in plans:
        for name, writers in plan.overwrites.state.items():
            stages = sorted(writers | users[name])
            if len(stages) > 1:
                raise TraceError(
                    f"{name!r} is overwritten by stage {min(writers)} and used by stages "
                    f"{', '.join(map(str, stages))}; a stage cannot see what another one does to it, so split where "
                    "all that use it are in one stage"
                )


def _write(
    plan: _CutGraph, stage: int, caller_values: Sequence[CallerValue], sources: Iterable[int], targets: tuple[int, ...]
) -> StageGraph:
    """The graph that a stage runs in the mode of ``plan``."""
    writer = GraphWriter(plan.traced.device)
    state = plan.state(stage)
    for reads in state.values():
        argument = writer.graph.placeholder(reads[0].name)
        writer.known.update(dict.fromkeys(reads, argument))
    given = {wanted: writer.graph.placeholder(f"caller_{k}") for k, wanted in enumerate(caller_values)}
    for node, i in plan.traced.inputs.items():
        if (i, None) in given:
            writer.known[node] = given[i, None]
    for source in sources:
        for value in plan.sent.get((source, stage), ()):
            writer.known[value] = writer.graph.placeholder(value.name)
    for node in plan.nodes(stage):
        size = plan.size(node)
        if size is None:
            writer.copy(node, plan.traced.root)
        else:
            writer.known[node] = given[size]
    sent = [plan.traced.outputs if target == CALLER else plan.sent.get((stage, target), ()) for target in targets]
    graph = writer.finish(tuple(tuple(map(writer.stand_in, values)) for values in sent), f"Stage{stage}")
    changed = frozenset(name for name in state if name in plan.overwrites.state)
    return StageGraph(graph, tuple(state), changed, targets, plan.traced.shape)
