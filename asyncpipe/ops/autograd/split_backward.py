"""A backward in two halves: input gradients now (I), weight gradients later (W), on one ordinary autograd graph.

Earlier stages wait for the input gradients only, so weight gradients can fill bubbles (zero bubble pipeline
parallelism, arXiv 2401.10241). A node of the backward graph is *inside* if the stage's inputs can be reached from it,
and *outside* if only parameters can. A *border* is an inside node with an edge that leads outside::

    outputs ──▶ Gelu ──▶ Addmm ──▶ Add ──▶ LayerNorm ──▶ Addmm ──▶ inputs     inside: run by I
                           │                   │           │
                           ▼                   ▼           ▼                  edges that W follows
                         T, bias             weight     T, bias               outside: run by W

I is ``autograd.grad`` with respect to the inputs. The engine then runs inside nodes only, and these compute gradients
for their inside edges only. Hooks record the gradients that arrive at borders. W runs the borders again with the
recorded gradients, now for the outside edges only, and runs ordinary backwards from there. So neither half does work
of the other, tensor hooks fire once, and each parameter gets one whole gradient, however often the stage uses it.

How W makes a border compute only the gradients of its outside edges: a node asks the engine which of its edges the
running backward needs. ``_while_needing`` starts a backward that needs the ends of the outside edges, and calls the
borders from within it. Each border could also be the root of a backward of its own, but that takes time quadratic
in the length of the graph, fires tensor hooks twice, and adds the gradient of a parameter twice that inside nodes
further on use too.

Limits: a custom ``autograd.Function`` computes all its gradients at once. At a border it runs in I only, and its
gradients for parameters are kept for W. A graph that TorchScript differentiates computes all of them in both halves.
``torch.utils.checkpoint(use_reentrant=True)`` adds to ``grad`` of parameters itself and does not support
``autograd.grad``: with one inside, I is the whole backward and W does nothing. With ``use_reentrant=False`` it
recomputes in I and again in W. Hooks of nodes (not of tensors) at borders see only the gradients that I computes.
torch's group norm on the CPU writes the gradient of a channels-last input even where none is wanted, to no memory: it
always computes that gradient too (``_writes_input_gradient``). What ``torch.compile`` has made computes all gradients
at once, and overwrites what it has saved: with one inside, I is the whole backward as well. A log says so.

Between I and W no hook is registered and nothing else refers to this object, so dropping it frees the graph.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from asyncpipe.ops.autograd.fork_join import phony
from asyncpipe.ops.torch_internals import input_metadata, plain_functions, storage_id

__all__ = ["SplitBackward"]

_logger = logging.getLogger(__name__)

Gradients = tuple[Tensor | None, ...]
Start = tuple[GradientEdge, Tensor]


class _Border(NamedTuple):
    """An inside node with edges that lead outside."""

    node: Node
    positions: tuple[int, ...]
    """The positions of those edges among its edges."""
    ends: tuple[GradientEdge, ...]
    """The ends of those edges."""

    @property
    def runs_once(self) -> bool:
        """Whether I computes all its gradients, as for a custom function."""
        return isinstance(self.node, BackwardCFunction)


@dataclass(slots=True, eq=False)
class _OutsideGroup:
    """A connected part of the outside, which W runs as one ordinary backward."""

    borders: deque[tuple[_Border, Gradients]] = field(default_factory=deque)
    """Borders to run again, with the gradients that arrived there."""
    starts: list[Start] = field(default_factory=list)


class SplitBackward:
    """The backward of one local graph in two halves, each called once, on the thread and stream of the stage.

    ``gradients`` are those of the outputs. Outputs that require no gradient or have none are ignored, and leaves that
    require none get none. The graph is used up. On an accelerator W reads what I recorded on the same compute stream
    that made it, so no event has to order the two.
    """

    def __init__(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> None:
        # Edges, not tensors: the backward does not need the values of the outputs, so they are not kept.
        self._starts = [
            (get_gradient_edge(tensor), gradient)
            for tensor, gradient in zip(outputs, gradients, strict=True)
            if tensor.requires_grad and gradient is not None
        ]
        self._leaves = list(leaves)
        self._groups: deque[_OutsideGroup] = deque()

    def input_gradients(self) -> list[Tensor | None]:
        """The gradient of each leaf, ``None`` where no output depends on it. Parameters get no gradient yet.

        Keeps what ``weight_gradients`` needs. If no leaf requires a gradient, this does nothing, and W is the whole
        backward.
        """
        leaves, self._leaves = self._leaves, []
        found = iter(self._split([leaf for leaf in leaves if leaf.requires_grad]))
        return [next(found) if leaf.requires_grad else None for leaf in leaves]

    def _split(self, leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
        starts, self._starts = self._starts, []
        graph = _BackwardGraph((edge.node for edge, _ in starts), leaves)
        if not graph.inside:
            self._groups.append(_OutsideGroup(starts=starts))
            return [None] * len(leaves)
        if (node := graph.indivisible() or graph.compiled()) is not None:
            _tell_once(node.name())
            return _whole_backward(starts, leaves)
        borders = graph.borders()
        # W needs the buffers of the borders that it runs again.
        retain = not all(border.runs_once for border in borders)
        edges, gradients = _unzipped(start for start in starts if start[0].node in graph.inside)
        with _noting(borders) as noted:
            found = torch.autograd.grad(edges, leaves, gradients, retain_graph=retain, allow_unused=True)
        outer = [start for start in starts if start[0].node not in graph.inside]
        self._groups = _grouped(graph.groups(), borders, noted, outer)
        return _apart(found, noted.values())

    def weight_gradients(self) -> None:
        """Add the parameters' gradients to their ``grad``, as ``autograd.backward`` does, and drop the graph."""
        try:
            # Kept alive until the end: the engine knows the nodes that are needed by their addresses.
            needed = [end for group in self._groups for border, _ in group.borders for end in border.ends]
            if needed:
                _while_needing(needed, self._run_groups)
            else:
                self._run_groups()
        finally:
            # After an error the traceback refers to this object, which must not keep the graph alive.
            self._groups.clear()

    def _run_groups(self) -> None:
        # Drop each node and gradient as soon as it is used, so that W frees memory while it runs.
        while self._groups:
            group = self._groups.popleft()
            while group.borders:
                group.starts += _run_again(*group.borders.popleft())
            starts, group.starts = group.starts, []
            if starts:
                torch.autograd.backward(*_unzipped(starts))


class _BackwardGraph:
    """The nodes that ``roots`` lead to, and which of them lead to ``leaves``. Not recursive, since graphs are deep."""

    def __init__(self, roots: Iterable[Node], leaves: Sequence[Tensor]) -> None:
        self._edges: dict[Node, tuple[tuple[Node | None, int], ...]] = {}
        self._users: dict[Node, list[Node]] = {}
        self.inside: set[Node] = set()
        if leaves:
            self._walk(roots)
            self._go_back(map(_accumulator, leaves))

    def _walk(self, roots: Iterable[Node]) -> None:
        waiting = list(roots)
        self._users = {root: [] for root in waiting}
        while waiting:
            node = waiting.pop()
            if node in self._edges:
                continue
            # Read only once: every access builds a new tuple and new Python objects for its nodes.
            self._edges[node] = node.next_functions
            for child in self._children(node):
                self._users.setdefault(child, []).append(node)
                waiting.append(child)

    def _go_back(self, ends: Iterable[Node]) -> None:
        waiting = [end for end in ends if end in self._users]
        self.inside.update(waiting)
        while waiting:
            for user in self._users[waiting.pop()]:
                if user not in self.inside:
                    self.inside.add(user)
                    waiting.append(user)

    def _children(self, node: Node) -> Iterator[Node]:
        return (child for child, _ in self._edges[node] if child is not None)

    def indivisible(self) -> Node | None:
        """A node that cannot be part of a split, if there is one.

        A reentrant checkpoint computes all its gradients, and only in a backward without chosen inputs. Other nodes
        cannot compute the gradients of their inside edges alone.
        """
        for node in self._edges:
            if "CheckpointFunction" in node.name():
                return node
            if node in self.inside and _writes_input_gradient(node) and self._edges[node][0][0] not in self.inside:
                return node
        return None

    def compiled(self) -> Node | None:
        """An inside node that ``torch.compile`` has made: it computes all gradients at once."""
        return next((node for node in self.inside if "CompiledFunction" in node.name()), None)

    def borders(self) -> list[_Border]:
        """The inside nodes from which edges lead outside."""
        found = []
        for node, edges in self._edges.items():
            if node in self.inside:
                outer = {k: (c, nr) for k, (c, nr) in enumerate(edges) if c is not None and c not in self.inside}
                if outer:
                    found.append(_Border(node, tuple(outer), tuple(GradientEdge(*edge) for edge in outer.values())))
        return found

    def groups(self) -> dict[Node, int]:
        """The group number of each outside node. Nodes connected by edges, or by a common border, share a group."""
        groups: dict[Node, int] = {}
        for first in self._edges:
            if first not in self.inside and first not in groups:
                self._flood(first, len(groups), groups)
        return groups

    def _flood(self, first: Node, number: int, groups: dict[Node, int]) -> None:
        """Give ``number`` to the outside nodes connected to ``first``, directly or through borders."""
        groups[first] = number
        waiting = [first]
        passed: set[Node] = set()
        while waiting:
            node = waiting.pop()
            border = node in self.inside
            for near in (*self._children(node), *(() if border else self._users[node])):
                if near not in self.inside and near not in groups:
                    groups[near] = number
                    waiting.append(near)
                elif near in self.inside and not border and near not in passed:
                    passed.add(near)
                    waiting.append(near)


def _accumulator(leaf: Tensor) -> Node:
    """The node of a leaf's gradient. Functions of a subclass of ``Tensor`` would add nodes of their own before it."""
    with plain_functions():
        return get_gradient_edge(leaf).node


def _writes_input_gradient(node: Node) -> bool:
    """Whether ``node`` crashes if the gradient of its first input is not wanted, and another is.

    That depends on the memory format of the input, which is not looked at: a checkpoint would recompute it.
    """
    return node.name() == "NativeGroupNormBackward0" and input_metadata(node, 0).device.type == "cpu"


# I


@contextmanager
def _noting(borders: Sequence[_Border]) -> Iterator[dict[int, Gradients]]:
    """The gradients that W starts from, by the number of each border that the backward inside passes, in order.

    They are the gradients that arrived at the border or, if it runs once, those it computed for its outside edges.
    Hooks refer to borders by number: a reference to the node would be a cycle that the garbage collector cannot see.
    """
    noted: dict[int, Gradients] = {}
    handles = []
    try:
        for number, border in enumerate(borders):
            if border.runs_once:
                handles.append(border.node.register_hook(partial(_note_made, noted, number, border.positions)))
            else:
                handles.append(border.node.register_prehook(partial(noted.__setitem__, number)))
        yield noted
    finally:
        for handle in handles:
            handle.remove()


def _note_made(
    noted: dict[int, Gradients], number: int, positions: Sequence[int], made: Gradients, _gradients: Gradients
) -> None:
    noted[number] = tuple(made[position] for position in positions)


@cache
def _tell_once(name: str) -> None:
    _logger.warning(
        "%s cannot compute a part of its gradients; I runs the whole backward of such stages, W nothing", name
    )


def _whole_backward(starts: Sequence[Start], leaves: Sequence[Tensor]) -> list[Tensor | None]:
    torch.autograd.backward(*_unzipped(starts))
    gradients = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return gradients


def _apart(gradients: Gradients, kept: Iterable[Gradients]) -> list[Tensor | None]:
    """``gradients``, copied where one shares memory with another or with what is kept for W.

    The engine may use a gradient that it gets as a parameter's ``grad`` (or a view of it). The stage whose backward
    starts from that gradient would then add to it, while W of this stage still has to read it.
    """
    seen = {_memory(gradient) for some in kept for gradient in some if gradient is not None}
    apart: list[Tensor | None] = []
    for gradient in gradients:
        if gradient is not None and (memory := _memory(gradient)) is not None:
            if memory in seen:
                gradient = gradient.clone()
            seen.add(memory)
        apart.append(gradient)
    return apart


def _memory(tensor: Tensor) -> int | None:
    """The identity of a tensor's storage; ``None`` for a layout with more than one storage."""
    return storage_id(tensor) if tensor.layout is torch.strided else None


# Between I and W


def _grouped(
    number_of: dict[Node, int], borders: Sequence[_Border], noted: dict[int, Gradients], outer: Iterable[Start]
) -> deque[_OutsideGroup]:
    """The work of W, in the order of I. All contributions to a parameter's gradient are in one group."""
    groups: dict[int, _OutsideGroup] = {}

    def group_of(end: GradientEdge) -> _OutsideGroup:
        return groups.setdefault(number_of[end.node], _OutsideGroup())

    for start in outer:
        group_of(start[0]).starts.append(start)
    for number, gradients in noted.items():
        border = borders[number]
        if border.runs_once:
            for start in _starts(border.ends, gradients):
                group_of(start[0]).starts.append(start)
        else:
            group_of(border.ends[0]).borders.append((border, gradients))
    return deque(groups.values())


# W


def _while_needing(ends: Sequence[GradientEdge], run: Callable[[], None]) -> None:
    """Call ``run`` from within a backward that needs the gradients of ``ends``, and that runs no other node.

    No path leads from its root to ``ends``, so the engine runs ``_Within`` only.
    """
    with torch.enable_grad():
        # A phony on the CPU: the engine runs the node on this thread, whose current stream is the stage's.
        start = phony(torch.device("cpu"), requires_grad=True)
        result: Tensor = _Within.apply(start, run)  # type: ignore[no-untyped-call]
    needed: Any = [start, *ends]
    torch.autograd.grad(result, needed, phony(start.device, requires_grad=False), allow_unused=True)


class _Within(torch.autograd.Function):
    """Calls a function in its backward."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, run: Callable[[], None]) -> Tensor:
        ctx.run = run
        return start.detach()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, None]:
        ctx.run()
        return None, None


def _run_again(border: _Border, gradients: Gradients) -> list[Start]:
    """The gradients for the outside edges of ``border``, from those that arrived there."""
    node: Any = border.node
    if _writes_input_gradient(node):
        results: list[Any] = []
        ends = [GradientEdge(*edge) for edge in node.next_functions if edge[0] is not None]
        _while_needing(ends, lambda: results.append(node(*gradients)))
        (made,) = results
    else:
        made = node(*gradients)
    made = made if isinstance(made, tuple) else (made,)
    return [
        (edge, _fitted(gradient, edge))
        for edge, gradient in _starts(border.ends, [made[position] for position in border.positions])
    ]


def _fitted(gradient: Tensor, edge: GradientEdge) -> Tensor:
    """``gradient`` in the shape and type that ``edge`` takes, as the engine converts it between two nodes."""
    wanted = input_metadata(edge.node, edge.output_nr)
    if gradient.is_nested or wanted.is_nested_tensor:
        return gradient
    if gradient.shape != (shape := torch.Size(wanted.shape)):
        gradient = gradient.sum_to_size(shape)
    if gradient.is_complex() and not wanted.dtype.is_complex:
        gradient = gradient.real
    return gradient.to(wanted.dtype)


def _starts(ends: Iterable[GradientEdge], gradients: Iterable[Tensor | None]) -> list[Start]:
    return [(end, gradient) for end, gradient in zip(ends, gradients, strict=True) if gradient is not None]


def _unzipped(starts: Iterable[Start]) -> tuple[tuple[GradientEdge, ...], tuple[Tensor, ...]]:
    edges, gradients = zip(*starts, strict=True)
    return edges, gradients
