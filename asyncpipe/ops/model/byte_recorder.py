"""Counts the bytes that layers receive, save for the backward and send, while each runs as a stage of a pipeline.

Autograd's saved-tensor hooks see what is saved. They are thread-local, so they are set around each call of a stage, on
the thread that runs it. Each storage counts once; those of parameters and buffers do not count::

    received ──▶ [ stage: what autograd saves ] ──▶ sent        saved (without what was received)

``travelling`` says which tensors go from layer to layer: those that one sends are, one by one, those that the other
receives, even where they were copied to another device in between; and which of them a layer saves.

What a task needs only while it runs is seen in a forward and a backward of their own, on copies of what the stage
receives, right before its forward; and in those of the loss, right before it: ``working``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from asyncpipe.core.predict.layer_profile import SentTensor, TiedTensor
from asyncpipe.ops.autograd.selective import is_product
from asyncpipe.ops.model.microbatch import Packet
from asyncpipe.ops.model.nested import tensors_of
from asyncpipe.ops.model.stage import CALLER, Stage
from asyncpipe.ops.model.tensor_uses import tensor_uses
from asyncpipe.ops.torch_internals import TorchDispatchMode, tree_leaves

__all__ = ["ByteRecorder", "LayerBytes", "LiveBytes", "parameter_bytes", "tied_parameters", "travelling"]


class TensorBytes(NamedTuple):
    """A tensor that a layer receives or sends."""

    address: int
    """Of its memory, while the layer runs."""
    size: int
    saved: bool
    """Whether the layer's backward needs it."""


@dataclass(slots=True)
class LayerBytes:
    """The bytes of one layer for one micro-batch; the fields are explained at ``LayerCosts``."""

    inner: bool
    """Whether its input gets a gradient."""
    saved: int
    working: int
    received: Mapping[int, Sequence[TensorBytes]]
    """By source, in the order in which it sends them."""
    sent: Mapping[int, Sequence[TensorBytes]]
    """By user."""
    products: int = 0
    """Of what ``checkpoint="selective"`` keeps."""


class ByteRecorder:
    """Counts the bytes of stages that are one layer each. ``layers`` has them after ``watching``.

    Only the first micro-batch is counted: forwards run in order, and no micro-batch is larger than the first.
    """

    def __init__(self) -> None:
        self.layers: dict[int, LayerBytes] = {}
        """By stage."""
        self._calls: dict[int, _StageRecording] = {}
        """By stage, while ``watching``."""

    @contextmanager
    def watching(self, stages: Sequence[Stage]) -> Iterator[None]:
        """Count inside. One training step without recomputation must run there."""
        handles = []
        for stage in stages:
            call = self._calls[stage.index] = _StageRecording(stage.module)
            handles.append(stage.module.register_forward_pre_hook(call.begin))
            handles.append(stage.module.register_forward_hook(call.end, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.layers = {index: call.bytes for index, call in self._calls.items() if call.bytes is not None}
            self._calls = {}

    def loss(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """``loss_fn``, whose saved bytes count as the last stage's while watched. That stage then sends nothing."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            call = next(reversed(self._calls.values()), None)
            if call is not None:
                with call.loss(loss_fn, args, kwargs):
                    return loss_fn(*args, **kwargs)
            return loss_fn(*args, **kwargs)

        return counted


class LiveBytes(TorchDispatchMode):
    """Counts the memory that operators make inside, until it is freed; on this thread, and in backwards begun here."""

    def __init__(self, others: Iterable[Tensor] = ()) -> None:
        """``others`` are not counted."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._storages = {id(each.untyped_storage()) for each in _plain(others)}

    def note(self, tensors: Iterable[Any]) -> None:
        """Count what is there already."""
        for tensor in _plain(tensors):
            storage = tensor.untyped_storage()
            if id(storage) not in self._storages:
                self._storages.add(id(storage))
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                # The Python object of a storage is kept as long as the storage.
                weakref.finalize(storage, self._free, id(storage), storage.nbytes()).atexit = False

    def _free(self, storage: int, size: int) -> None:
        self._storages.discard(storage)
        self.live -= size

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        self.note(tree_leaves(made))
        return made


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of what ``checkpoint="selective"`` keeps."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if is_product(function):
            self.count += sum(each.nbytes for each in tree_leaves(made) if isinstance(each, Tensor))
        return made


def _plain(values: Iterable[Any]) -> Iterator[Tensor]:
    return (each for each in values if isinstance(each, Tensor) and each.layout is torch.strided)


def _working(call: Callable[..., Any], parameters: Iterable[Tensor], *args: Any) -> tuple[int, int, int]:
    """The bytes that forward and backward of ``call`` need at most, beyond those that the forward leaves; and these."""
    packet = Packet(args)
    copies = [each.detach().clone().requires_grad_(each.requires_grad) for each in packet.tensors]
    trained = [each for each in parameters if each.requires_grad]
    with torch.enable_grad(), ExitStack() as stack:
        for each in trained:
            # A gradient is added to those of other micro-batches, and freed.
            hook = each.register_hook(lambda g: g if g.is_sparse else g.new_zeros(()).expand_as(g))  # type: ignore[no-untyped-call]
            stack.callback(hook.remove)
        # As clones, which a layer may overwrite.
        given = packet.rebuild([each.clone() for each in copies])
        memory = stack.enter_context(LiveBytes([*tensors_of(given), *trained]))
        sent = [each for each in tensors_of(call(*given)) if each.requires_grad]
        forward, left, memory.peak = memory.peak, memory.live, memory.live
        if sent and (ends := [*(each for each in copies if each.requires_grad), *trained]):
            torch.autograd.grad(sent, ends, [torch.ones_like(each) for each in sent], allow_unused=True)
    return forward - left, memory.peak - left, left


class _StageRecording:
    """Counts the first call of one stage, and the loss if it is the last stage; on the stage's thread."""

    def __init__(self, module: nn.Module) -> None:
        self.bytes: LayerBytes | None = None
        # Parameters include replicas of tied ones.
        self._uncounted = {_address(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self._saved: dict[int, int] = {}
        """Sizes of saved storages by address. The graph keeps them alive, so no address is used twice."""
        self._inside: ExitStack | None = None
        self._products = _Products()  # type: ignore[no-untyped-call]
        self._counts_loss = True
        self._working: int | None = None

    def begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self.bytes is None and self._working is None:
            self._working = 0
            # Before the forward, which saves buffers as they are then.
            self._working = max(_working(module, module.parameters(), *args)[:2])
            self._inside = ExitStack()
            self._inside.enter_context(saved_tensors_hooks(self._keep, lambda kept: kept))
            self._inside.enter_context(self._products)

    def end(self, _: nn.Module, args: tuple[Any, ...], sent: Mapping[int, Any] | None) -> None:
        if self._inside is None:
            return
        self._inside.close()
        self._inside = None
        # A micro-batch is a view of the caller's batch.
        own = self._saved.keys() - _addresses(args)
        self.bytes = LayerBytes(
            inner=any(tensor.requires_grad for tensor in tensors_of(args)),
            saved=sum(self._saved[address] for address in own),
            working=self._working or 0,
            received={source: _each(value, self._saved.keys()) for source, value in args[0].items()},
            sent={user: _each(value, own) for user, value in (sent or {}).items()},
            products=self._products.count,
        )

    @contextmanager
    def loss(self, loss_fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Count what autograd saves inside, except targets and what the stage has saved already."""
        if not self._counts_loss or self.bytes is None:
            yield
            return
        self._counts_loss = False
        output, *targets = args
        forward, backward, left = _working(lambda output: loss_fn(output, *targets, **kwargs), (), output)
        # What the stage returns is there in the loss's forward. What the loss leaves is not in the stage's backward.
        forward += sum(each.nbytes for each in tensors_of(output))
        self.bytes.working = max(self.bytes.working - left, forward, backward)
        before = self._saved.keys() | _addresses([targets, kwargs])
        with saved_tensors_hooks(self._keep, lambda kept: kept):
            yield
        self.bytes.saved += sum(size for address, size in self._saved.items() if address not in before)
        self.bytes.sent = {}

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if _address(tensor) not in self._uncounted:
            self._saved[_address(tensor)] = storage.nbytes()
        # Detached, since an operation that saves its own output would otherwise be part of a reference cycle.
        return tensor.detach()


def _addresses(value: Any) -> set[int]:
    """Of the memory of the tensors in ``value``."""
    return set(map(_address, tensors_of(value)))


def _each(value: Any, saved: Collection[int]) -> list[TensorBytes]:
    found = []
    for tensor in tensors_of(value):
        size = min(tensor.untyped_storage().nbytes(), tensor.numel() * tensor.element_size())
        found.append(TensorBytes(_address(tensor), size, _address(tensor) in saved))
    return found


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def parameter_bytes(module: nn.Module) -> tuple[int, int]:
    """The bytes of the parameters of ``module``, and of those that require a gradient; each parameter once."""
    sizes = [(p.numel() * p.element_size(), p.requires_grad) for p in module.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


def tied_parameters(layers: Sequence[nn.Module]) -> tuple[TiedTensor, ...]:
    """The parameters that several of ``layers`` use."""
    tensors = [
        (uses[0].tensor, tuple(dict.fromkeys(use.stage for use in uses))) for uses in tensor_uses(layers).values()
    ]
    return tuple(
        TiedTensor(users, tensor.nbytes, tensor.requires_grad)
        for tensor, users in tensors
        if len(users) > 1 and isinstance(tensor, nn.Parameter)
    )


class _Travelling(NamedTuple):
    size: int
    users: list[int]
    saved_by: list[int]


def travelling(layers: Sequence[LayerBytes]) -> tuple[SentTensor, ...]:
    """What layers, the caller included, send each other; a tensor that several use is one."""
    found: dict[tuple[int, int], _Travelling] = {}
    callers: dict[int, int] = {}
    """Numbers of memory by address: what the caller gives is there during the whole step, other memory is not."""
    sent: dict[tuple[int, int], list[int]] = {}
    """By source and user, the numbers of the memory of each tensor."""
    count = 0

    def add(source: int, memory: int, user: int, tensor: TensorBytes) -> None:
        size, users, _ = found.setdefault((source, memory), _Travelling(tensor.size, [], []))
        if size < tensor.size:
            found[source, memory] = found[source, memory]._replace(size=tensor.size)
        if user not in users:
            users.append(user)

    def keep(source: int, memory: int, layer: int) -> None:
        saved_by = found[source, memory].saved_by
        if layer not in saved_by:
            saved_by.append(layer)

    for number, layer in enumerate(layers):
        here: dict[int, int] = {}
        for source, tensors in layer.received.items():
            for position, tensor in enumerate(tensors):
                if source == CALLER:
                    memory = callers.setdefault(tensor.address, count)
                    count += memory == count
                    add(CALLER, memory, number, tensor)
                else:
                    memory = sent[source, number][position]
                here.setdefault(tensor.address, memory)
                if tensor.saved:
                    keep(source, memory, number)
        for user, tensors in layer.sent.items():
            for tensor in tensors:
                memory = here.setdefault(tensor.address, count)
                count += memory == count
                add(number, memory, user, tensor)
                sent.setdefault((number, user), []).append(memory)
                if tensor.saved:
                    keep(number, memory, number)
    return tuple(
        SentTensor(source, tuple(users), size, tuple(saved_by), memory)
        for (source, memory), (size, users, saved_by) in found.items()
    )
