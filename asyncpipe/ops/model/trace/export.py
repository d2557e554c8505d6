"""One mode of a model as a graph: ``torch.export``, without the parts of its result that stages cannot use."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from asyncpipe.errors import TraceError
from asyncpipe.ops.model.nested import leaves_of
from asyncpipe.ops.model.trace.cut import ROOT, OutputShape, TracedGraph
from asyncpipe.ops.model.trace.dropped import WatchForward, reentrant_as_calls
from asyncpipe.ops.model.trace.inputs import TraceInputs, dynamic_sizes
from asyncpipe.ops.model.trace.overwrites import written_storages
from asyncpipe.ops.model.trace.python_draws import PythonDraws
from asyncpipe.ops.torch_internals import is_metadata_check, is_of_transform, tree_leaves

__all__ = ["TraceState", "TraceTask", "export_mode"]


class TraceState:
    """The parameters, buffers and constants of the model by the names of ``named_parameters`` and ``named_buffers``."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        named = {**dict(model.named_buffers()), **dict(model.named_parameters())}
        self.names = {id(tensor): name for name, tensor in named.items()}
        self.tensors: dict[str, Tensor] = {}
        """By name: the tensors that the traces use."""
        self.persistent = set(model.state_dict(keep_vars=True))

    def refresh(self) -> None:
        """Take the tensors that the model has now."""
        now = {**dict(self._model.named_buffers()), **dict(self._model.named_parameters())}
        self.tensors.update((name, now[name]) for name in self.tensors if name in now)

    def name(self, path: str, traced: Tensor, mode: str) -> str:
        """The name of the tensor that a trace reads at ``path``: one of the model's, or a constant of the trace."""
        tensor: Any = self._model
        for word in path.split(".")[1:]:
            tensor = getattr(tensor, word, None)
        if isinstance(tensor, Tensor):
            name = self.names.setdefault(id(tensor), path.removeprefix(f"{ROOT}."))
        else:
            tensor, name = traced, f"traced_{mode}_{path.replace('.', '_')}"
        self.tensors[name] = tensor
        return name


class _TraceRecord:
    """What the wrapper notes during an export. Not a dataclass or list: the export would undo changes of those."""

    shape: OutputShape
    replaced: tuple[str, ...] = ()
    """The names of buffers that the forward replaced by other tensors."""
    drawn: str = ""
    """What of Python's draws random numbers, in words."""
    checkpoints: str = ""
    """What calls ``torch.utils.checkpoint``, in words."""


class TraceTask(NamedTuple):
    """What is traced, and how."""

    model: nn.Module
    inputs: TraceInputs
    example: Sequence[Tensor]
    state: TraceState
    dynamic: tuple[str, int]
    """Which sizes may differ, and the batch dimension."""


class _Wrapper(nn.Module):
    """The model as a function from tensors to a flat list of tensors and sizes, which is what an export supports."""

    def __init__(self, task: TraceTask) -> None:
        super().__init__()
        self.model = task.model
        self.seen = _TraceRecord()
        self._call = task.inputs.call

    def forward(self, leaves: Sequence[Tensor]) -> list[Any]:
        before = dict(self.model.named_buffers())
        draws = PythonDraws(self.model)
        with reentrant_as_calls(), WatchForward(self.model) as watch:
            output = self._call(self.model, leaves)
        self.seen.drawn = draws.drawn()
        self.seen.checkpoints = watch.checkpoints
        after = dict(self.model.named_buffers())
        self.seen.replaced = tuple(name for name, buffer in before.items() if after.get(name) is not buffer)
        self.seen.shape = OutputShape(output, _is_traced)
        return [leaf for leaf in leaves_of(output, wraps=_NUMBERS) if _is_traced(leaf)]


_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _is_traced(leaf: Any) -> bool:
    return isinstance(leaf, (Tensor, *_NUMBERS))


def export_mode(task: TraceTask, training: bool) -> TracedGraph:
    """The graph of one mode. Raises ``TraceError``."""
    model, inputs, example, state, _ = task
    mode = "train" if training else "eval"
    device = next(tensor.device for tensor in (*model.parameters(), *model.buffers(), *example))
    wrapper = _Wrapper(task)
    with _unchanged(model):
        if not (training and model.training):
            model.train(training)
        root = _export(wrapper, task, mode, device)
        if wrapper.seen.drawn:
            # Once more, since another thread may have drawn.
            root = _export(wrapper, task, mode, device)
    inputs.guards[training] = _simplify(root)
    placeholders = root.graph.find_nodes(op="placeholder")
    reads = {node: _read(root, node) for node in root.graph.find_nodes(op="get_attr")}
    if wrapper.seen.drawn:
        raise TraceError(
            f"the forward draws random numbers from {wrapper.seen.drawn} in {mode} mode, which would be constants of "
            "the trace; draw them by torch (torch.rand), switch the sampling off, or give them as an argument"
        )
    if wrapper.seen.replaced:
        raise TraceError(
            f"the forward replaces the buffer {wrapper.seen.replaced[0]!r} by another tensor, which a trace does not "
            "keep; change it in place: self.buffer.copy_(...)"
        )
    if any(map(is_of_transform, root.graph.nodes)):
        raise TraceError(
            "the forward uses a transform of torch.func (vmap, grad, jvp, …), which a trace cannot cut; write it out, "
            "or cut the model by hand into a list of stages"
        )
    return TracedGraph(
        mode=mode,
        root=root,
        inputs={node: i for i, node in enumerate(placeholders)},
        state={node: state.name(node.target, tensor, mode) for node, tensor in reads.items() if tensor is not None},
        nodes=[node for node in root.graph.nodes if node.op == "call_function"],
        outputs=tree_leaves(root.graph.output_node().args),
        shape=wrapper.seen.shape,
        device=device,
        checkpoints=wrapper.seen.checkpoints,
    )


def _export(wrapper: _Wrapper, task: TraceTask, mode: str, device: torch.device) -> fx.GraphModule:
    sizes = dynamic_sizes(task.example, *task.dynamic)
    try:
        with warnings.catch_warnings(), torch.enable_grad(), torch.autocast(device.type, enabled=False):
            # Recurrent layers also have their weights in a list, which the export restores.
            warnings.filterwarnings("ignore", message=r"The tensor attributes? .*_flat_weights\[")
            program = torch.export.export(wrapper, (tuple(task.example),), dynamic_shapes=(sizes,), strict=False)
            return program.module()
    except TraceError:
        raise
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "").rstrip(".")
        raise TraceError(
            f"{type(wrapper.model).__name__} cannot be traced in {mode} mode: {type(error).__name__}: {first}. Keep "
            "Python branches on tensors' values out of the forward (torch.where, torch.cond), check that the example "
            "runs, or cut the model by hand into a list of stages"
        ) from error


def _simplify(root: fx.GraphModule) -> Callable[..., Any]:
    """Remove checks and unused operations from the graph; returns the check of the inputs' sizes.

    The removed checks of types and devices would refuse autocast and other devices.
    """
    guards: Callable[..., Any] = _no_guards
    for node in reversed(list(root.graph.nodes)):
        if node.op == "call_module":
            guards = root.get_submodule(node.target).forward
        elif not is_metadata_check(node):
            continue
        root.graph.erase_node(node)
    root.graph.eliminate_dead_code(lambda node: node.is_impure() or bool(written_storages(node, root)))
    return guards


def _no_guards(*tensors: Tensor) -> None:
    """For versions of torch that export no check."""


def _read(root: fx.GraphModule, node: fx.Node) -> Tensor | None:
    value = attrgetter(str(node.target))(root)
    if isinstance(value, Tensor | nn.Module):
        return value if isinstance(value, Tensor) else None
    raise TraceError(f"the forward uses {node.target}, a {type(value).__name__}, which a stage cannot hold")


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Afterwards restore the modules' modes and tensors, and delete new attributes. The export restores the rest."""
    before = {module: (module.training, dict(vars(module))) for module in model.modules()}
    try:
        yield
    finally:
        for module, (training, attributes) in before.items():
            module.training = training
            for name in set(vars(module)) - set(attributes):
                del vars(module)[name]
            # Up to torch 2.9, the export leaves its fake ones.
            vars(module).update((name, kept) for name, kept in attributes.items() if isinstance(kept, Tensor))
