"""CutPosition any module into stages by tracing it: the model's own code stays as it is.

``torch.export`` runs the model once on stand-ins for tensors and writes down every operation. The list is cut
(``cut.py``), each piece is written as a graph of its own (``write.py``), and becomes a stage that runs the same
operations on the same parameters (``stage.py``)::

    model, example ──export──▶ graph of `train` ──cut──▶ piece 0 │ piece 1 │ piece 2
                   └─export──▶ graph of `eval`  ──cut──▶ piece 0 │ piece 1 │ piece 2
                                                         stage 0   stage 1   stage 2

Each stage holds its piece of both graphs, since dropout and batch normalisation are written down as they were in
that mode, and runs the one that its ``training`` flag says. Values go straight from the stage that makes them to
each one that uses them, and sizes of the inputs travel as numbers from the caller.

``torch.distributed.pipelining.pipeline`` traces in the same way, and its split points are understood here. It is
not called, because it exports with the example's sizes baked in, in one mode, and what it makes is for one process
a stage: every value is handed from neighbour to neighbour, also through stages that do not use it.

What a trace is blind to: Python that ran while tracing has run for good. Branches on sizes are checked when called
(``BatchError``), branches on values cannot be traced. Types that the forward looks up (``mask.to(x.dtype)``) are
those of the example, also under autocast. Numbers that a module counts up in Python stay as they were. A tensor
made on the model's device is made on the stage's. A surrounding autocast is left out of the trace, and applies when
a stage runs under it, as it does to the model; one inside the forward is traced.
"""

from __future__ import annotations

import inspect
import re
import reprlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_unflatten

from asyncpipe.errors import BatchError, TraceError
from asyncpipe.ops.model.batchnorm import deferred_layers
from asyncpipe.ops.model.microbatch import Arguments
from asyncpipe.ops.model.stage import StagedModel
from asyncpipe.ops.model.trace.cut import ROOT, OutputShape, SplitName, TracedGraph, cut_at_names, cut_evenly
from asyncpipe.ops.model.trace.overwrites import written
from asyncpipe.ops.model.trace.traced_stage import ModelSlots, build_stages

if TYPE_CHECKING:
    from torch.distributed.pipelining import SplitPoint

__all__ = ["trace"]


def trace(model: nn.Module, arguments: Arguments, split: int | Sequence[str] | Mapping[str, SplitPoint]) -> StagedModel:
    """``model`` as stages, traced with an example of its arguments: ``trace(model, Arguments.of(ids, mask=mask), 4)``.

    ``split`` is a number of stages, over which the parameters are spread as evenly as can be; or the names of the
    submodules that begin a new stage; or names with torch's ``SplitPoint``, ``BEGINNING`` or ``END``. A submodule
    that is called several times is split at its first call.

    The example should have the types and the structure of what comes later, and at least two samples; sizes may
    differ unless the model's code depends on them. Tracing runs no computation, draws no random numbers and leaves
    the model as it was; it takes some seconds. The stages' parameters and buffers are the model's own.

    Raises ``TraceError`` if the model cannot be traced or not be cut like that. ``takes`` of the result raises
    ``BatchError`` for arguments that do not fit the trace.
    """
    if not isinstance(model, nn.Module):
        raise TraceError(f"the model must be a torch.nn.Module, got {type(model).__name__}")
    if deferred_layers(model):
        raise TraceError("a trace does not see what deferred batch norms gather; trace the model with bare ones")
    points = _split_points(split)
    inputs = _Inputs(model, arguments)
    state = _State(model)
    example = inputs.example(arguments)
    train, evaluate = (_trace_mode(model, inputs, example, state, training) for training in (True, False))
    cuts = _cuts(model, train, evaluate, points, state.tensors)
    slots = ModelSlots.of(model, state.names)
    stages, links, takes = build_stages((train, evaluate), cuts, state.tensors, state.persistent, slots)

    def takes_of(arguments: Arguments) -> dict[int, Any]:
        _follow(stages, model.training)
        tensors = inputs.tensors(arguments, model.training)
        return {
            stage: tuple(tensors[i] if dim is None else tensors[i].size(dim) for i, dim in wanted)
            for stage, wanted in takes.items()
        }

    _follow(stages, model.training)
    return StagedModel(model, stages, links, takes_of)


def _cuts(
    model: nn.Module,
    train: TracedGraph,
    evaluate: TracedGraph,
    points: int | list[SplitName],
    tensors: Mapping[str, Tensor],
) -> tuple[list[int], list[int]]:
    """The positions of the cuts in both traces."""
    if isinstance(points, int):
        return cut_evenly(train, evaluate, points, tensors)
    there, here = (cut_at_names(model, traced, points) for traced in (train, evaluate))
    if [cut.label for cut in there] != [cut.label for cut in here]:
        raise TraceError("the submodules to split at are called in another order in eval mode than in train mode")
    return [cut.position for cut in there], [cut.position for cut in here]


def _follow(stages: Iterable[nn.Module], training: bool) -> None:
    """Set the stages' mode, which is the model's: they do not share its submodules, only its tensors."""
    for stage in stages:
        if stage.training != training:
            stage.train(training)


def _split_points(split: Any) -> int | list[SplitName]:
    if isinstance(split, int) and not isinstance(split, bool):
        if split < 1:
            raise TraceError(f"split must be at least 1 stage, got {split}")
        return split
    if isinstance(split, Mapping):
        borders = {name: getattr(point, "name", None) for name, point in split.items()}
        if all(isinstance(name, str) and border in ("BEGINNING", "END") for name, border in borders.items()):
            return [SplitName(name, border == "END") for name, border in borders.items()]
    elif isinstance(split, Sequence) and not isinstance(split, str) and all(isinstance(name, str) for name in split):
        return [SplitName(name, False) for name in split]
    raise TraceError(
        "split must be a number of stages, a list of submodules' names, or a mapping from names to "
        f"SplitPoint.BEGINNING or SplitPoint.END, got {split!r}"
    )


# Arguments


class _Inputs:
    """The example's arguments, flat and by name, whichever way a call spells them."""

    def __init__(self, model: nn.Module, arguments: Arguments) -> None:
        self._model = type(model).__name__
        self._signature = inspect.signature(model.forward)
        try:
            bound = self._bind(arguments)
        except TypeError as error:
            raise TraceError(f"the example does not fit {self._model}.forward: {error}") from error
        values, self._spec = tree_flatten(bound)
        # The example itself may be large; what it looked like is enough.
        self._values = [torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x for x in values]
        self._names = list(_named(bound))
        self._tensors = [i for i, value in enumerate(self._values) if isinstance(value, Tensor)]
        if not self._tensors:
            raise TraceError("the example has no tensor; give the arguments that the model is called with")
        self.guards: dict[bool, Callable[..., Any]] = {}
        """Checks of the tensors' sizes by mode; they raise ``AssertionError``."""

    def example(self, arguments: Arguments) -> list[Tensor]:
        """The tensors of a call, contiguous, each an object of its own, so that the export tells them apart."""
        return [x.detach().contiguous() for x in tree_leaves(self._bind(arguments)) if isinstance(x, Tensor)]

    def call(self, model: nn.Module, tensors: Sequence[Tensor]) -> Any:
        """SubmoduleCall the model as in the example, with other tensors."""
        values = list(self._values)
        for i, tensor in zip(self._tensors, tensors, strict=True):
            values[i] = tensor
        bound = self._signature.bind_partial()
        bound.arguments.update(tree_unflatten(values, self._spec))
        return model(*bound.args, **bound.kwargs)

    def tensors(self, arguments: Arguments, training: bool) -> list[Tensor]:
        """The tensors of a call, in the order of the trace. Raises ``BatchError`` where it does not fit."""
        try:
            given = _named(self._bind(arguments))
        except TypeError as error:
            raise BatchError(f"the arguments do not fit {self._model}.forward: {error}") from error
        missing = [name for name in self._names if name not in given]
        extra = [name for name in given if name not in self._names]
        if missing or extra:
            told = [f"{what} {', '.join(names)}" for what, names in (("missing", missing), ("extra", extra)) if names]
            raise BatchError(f"the arguments are not those of the trace: {' and '.join(told)}")
        values = [given[name] for name in self._names]
        for name, value, traced in zip(self._names, values, self._values, strict=True):
            _check_value(name, value, traced)
        tensors = [values[i] for i in self._tensors]
        try:
            # Strides may differ: operations look at them when they run. So the check sees sizes only.
            self.guards[training](*(torch.empty(tensor.shape, device="meta") for tensor in tensors))
        except AssertionError as error:
            condition = str(error).removeprefix("Guard failed: ")
            condition = re.sub(r"leaves_(\d+)", lambda found: self._names[self._tensors[int(found[1])]], condition)
            raise BatchError(
                f"the micro-batch has sizes that the trace is not for, which is for {condition}; trace with an example "
                "like it, of at least two samples, or keep the model's code from depending on sizes"
            ) from error
        return tensors

    def _bind(self, arguments: Arguments) -> dict[str, Any]:
        bound = self._signature.bind(*arguments.args, **arguments.kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)


def _named(bound: dict[str, Any]) -> dict[str, Any]:
    """The leaves of bound arguments by their place: ``mask``, ``batch['ids']``, ``states[0]``."""
    return {f"{path[0].key}{keystr(path[1:])}": leaf for path, leaf in tree_flatten_with_path(bound)[0]}  # type: ignore[attr-defined]


def _check_value(name: str, value: Any, traced: Any) -> None:
    again = "trace again with an example that has it"
    if isinstance(value, Tensor) and isinstance(traced, Tensor):
        if (value.dtype, value.dim()) != (traced.dtype, traced.dim()):
            raise BatchError(
                f"{name} is a tensor of {value.dtype} with {value.dim()} dimensions, but was traced as one of "
                f"{traced.dtype} with {traced.dim()}; {again}"
            )
    elif isinstance(value, Tensor) or isinstance(traced, Tensor):
        now, then = ("a tensor" if isinstance(x, Tensor) else reprlib.repr(x) for x in (value, traced))
        raise BatchError(f"{name} is {now}, but was traced as {then}; {again}")
    elif value is not traced and (type(value) is not type(traced) or value != traced):
        raise BatchError(
            f"{name} is {reprlib.repr(value)}, but was traced as {reprlib.repr(traced)}, which is now part of the "
            f"stages; {again}"
        )


# State


class _State:
    """The model's parameters, buffers and constants by name, as the model's ``named_parameters`` names them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        named = {**dict(model.named_buffers()), **dict(model.named_parameters())}
        self.names = {id(tensor): name for name, tensor in named.items()}
        self.tensors: dict[str, Tensor] = {}
        """What the traces use."""
        self.persistent = set(model.state_dict(keep_vars=True))

    def name(self, path: str, traced: Tensor, mode: str) -> str:
        """The name of what a trace reads at ``path``: the model's own object, or a constant of the trace."""
        tensor: Any = self._model
        for word in path.split(".")[1:]:
            tensor = getattr(tensor, word, None)
        if isinstance(tensor, Tensor):
            name = self.names.setdefault(id(tensor), path.removeprefix(f"{ROOT}."))
        else:
            tensor, name = traced, f"traced_{mode}_{path.replace('.', '_')}"
        self.tensors[name] = tensor
        return name


# Tracing


class _TraceRecord:
    """What the model did while it was traced. No dataclass or list: the export would put those back."""

    shape: OutputShape
    replaced: tuple[str, ...] = ()
    """Buffers that the forward has set to other tensors."""


class _Wrapper(nn.Module):
    """Takes tensors and returns a flat list of tensors and sizes: all that an export has to understand."""

    def __init__(self, model: nn.Module, call: Callable[[nn.Module, Sequence[Tensor]], Any]) -> None:
        super().__init__()
        self.model = model
        self.seen = _TraceRecord()
        self._call = call

    def forward(self, *leaves: Tensor) -> list[Any]:
        before = dict(self.model.named_buffers())
        output = self._call(self.model, leaves)
        after = dict(self.model.named_buffers())
        self.seen.replaced = tuple(name for name, buffer in before.items() if after.get(name) is not buffer)
        self.seen.shape = OutputShape(output, _is_traced)
        return [leaf for leaf in tree_leaves(output) if _is_traced(leaf)]


def _is_traced(leaf: Any) -> bool:
    return isinstance(leaf, Tensor | torch.SymInt | torch.SymFloat | torch.SymBool)


def _trace_mode(
    model: nn.Module, inputs: _Inputs, example: Sequence[Tensor], state: _State, training: bool
) -> TracedGraph:
    mode = "train" if training else "eval"
    device = next(tensor.device for tensor in (*model.parameters(), *model.buffers(), *example))
    wrapper = _Wrapper(model, inputs.call)
    with _unchanged(model):
        if not (training and model.training):
            model.train(training)
        root = _export(wrapper, example, mode, device)
    inputs.guards[training] = _simplify(root)
    placeholders = root.graph.find_nodes(op="placeholder")
    reads = {node: _read(root, node) for node in root.graph.find_nodes(op="get_attr")}
    if wrapper.seen.replaced:
        raise TraceError(
            f"the forward replaces the buffer {wrapper.seen.replaced[0]!r} by another tensor, which a trace does not "
            "keep; change it in place: self.buffer.copy_(...)"
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
    )


def _export(wrapper: _Wrapper, example: Sequence[Tensor], mode: str, device: torch.device) -> fx.GraphModule:
    dims = torch.export.Dim
    # A size of 1 is fixed anyway, since it is broadcast; torch would log that it was to vary.
    sizes = tuple({i: dims.AUTO if n > 1 else dims.STATIC for i, n in enumerate(x.shape)} for x in example)
    try:
        with warnings.catch_warnings(), torch.enable_grad(), torch.autocast(device.type, enabled=False):
            # Recurrent layers keep their weights in a list too; it is put back.
            warnings.filterwarnings("ignore", message=r"The tensor attributes? .*_flat_weights\[")
            program = torch.export.export(wrapper, tuple(example), dynamic_shapes=(sizes,), strict=False)
            return program.module()
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "").rstrip(".")
        raise TraceError(
            f"{type(wrapper.model).__name__} cannot be traced in {mode} mode: {type(error).__name__}: {first}. Keep "
            "Python branches on tensors' values out of the forward (torch.where, torch.cond), check that the example "
            "runs, or cut the model by hand into a list of stages"
        ) from error


def _simplify(root: fx.GraphModule) -> Callable[..., Any]:
    """Take the checks out of the graph, and what nobody uses; return the check of the inputs' sizes.

    The checks of types and devices inside would refuse autocast and other devices.
    """
    guards: Callable[..., Any] = _no_guards
    for node in reversed(list(root.graph.nodes)):
        if node.op == "call_module":
            guards = root.get_submodule(node.target).forward
        elif node.target is not torch.ops.aten._assert_tensor_metadata.default:
            continue
        root.graph.erase_node(node)
    root.graph.eliminate_dead_code(lambda node: node.is_impure() or bool(written(node, root)))
    return guards


def _no_guards(*tensors: Tensor) -> None:
    """For a torch that exports none."""


def _read(root: fx.GraphModule, node: fx.Node) -> Tensor | None:
    value: Any = root
    for word in str(node.target).split("."):
        value = getattr(value, word)
    if isinstance(value, Tensor | nn.Module):
        return value if isinstance(value, Tensor) else None
    raise TraceError(f"the forward uses {node.target}, a {type(value).__name__}, which a stage cannot hold")


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Put back the modules' modes, and take away what they did not have before (the export does the rest)."""
    before = {module: (module.training, set(vars(module))) for module in model.modules()}
    try:
        yield
    finally:
        for module, (training, names) in before.items():
            module.training = training
            for name in set(vars(module)) - names:
                del vars(module)[name]
