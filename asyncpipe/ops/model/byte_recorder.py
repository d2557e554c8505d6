"""Count what layers receive, save and send while a pipeline runs each of them as a stage of its own.

Saved tensors are seen through autograd's hooks, which belong to a thread: so they are set around each call of a
stage, where it runs. Storages count once, and those of parameters and buffers not at all::

    received ──▶ [ stage: what autograd saves ] ──▶ sent        input, saved, output
                      │            │
                 of the input   of the output                   saved_input, saved_output
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from asyncpipe.ops.model.stage import Stage

__all__ = ["ByteRecorder", "LayerBytes", "parameter_bytes"]


@dataclass(slots=True)
class LayerBytes:
    """The bytes of one layer for one micro-batch; ``LayerCosts`` says what each is."""

    inner: bool
    """Whether its input gets a gradient."""
    input: int
    saved: int
    saved_input: int
    saved_output: int
    output: int


class ByteRecorder:
    """Watches stages, each of them one layer, while ``watching``; ``layers`` then has what the first micro-batch took.

    The micro-batches run their forwards in order, and none is larger than the first.
    """

    def __init__(self) -> None:
        self.layers: dict[int, LayerBytes] = {}
        """By stage."""
        self._calls: dict[int, _StageRecording] = {}
        """The call of each stage's first micro-batch, while it is not over."""
        self._last = -1

    @contextmanager
    def watching(self, stages: Sequence[Stage]) -> Iterator[None]:
        """Watch ``stages`` inside; one training step without recomputation must run there."""
        self._last = len(stages) - 1
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
        """``loss_fn``; what it saves while watched counts as the last stage's, which sends nothing then."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            call = self._calls.get(self._last)
            if call is None:
                return loss_fn(*args, **kwargs)
            with call.loss(args, kwargs):
                return loss_fn(*args, **kwargs)

        return counted


class _StageRecording:
    """The first call of one stage, and of the loss behind it; on the stage's thread."""

    def __init__(self, module: nn.Module) -> None:
        self.bytes: LayerBytes | None = None
        # Replicas of tied parameters among them.
        self._uncounted = {_address(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self._saved: dict[int, int] = {}
        """Sizes of storages by address; the graph keeps them, so that no address is given out twice."""
        self._hooks: saved_tensors_hooks | None = None
        self._counts_loss = True

    def begin(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        if self.bytes is None:
            self._hooks = saved_tensors_hooks(self._keep, _unpack)
            self._hooks.__enter__()

    def end(self, _: nn.Module, args: tuple[Any, ...], sent: Mapping[int, Any] | None) -> None:
        if self._hooks is None:
            return
        self._hooks.__exit__(None, None, None)
        self._hooks = None
        received, made = _sizes(args), _sizes(sent)
        self.bytes = LayerBytes(
            inner=any(leaf.requires_grad for leaf in tree_leaves(args) if isinstance(leaf, Tensor)),
            input=sum(received.values()),
            saved=sum(size for address, size in self._saved.items() if address not in received),
            # Of the caller's batch only the micro-batch counts, which is a view of it.
            saved_input=sum(size for address, size in received.items() if address in self._saved),
            saved_output=sum(size for address, size in self._saved.items() if address in made.keys() - received.keys()),
            output=sum(made.values()),
        )

    @contextmanager
    def loss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Counts what autograd saves inside, unless the stage has saved it or it is a target."""
        if not self._counts_loss or self.bytes is None:
            yield
            return
        self._counts_loss = False
        targets = args[1:]
        before = self._saved.keys() | _sizes([targets, kwargs]).keys()
        with saved_tensors_hooks(self._keep, _unpack):
            yield
        self.bytes.saved += sum(size for address, size in self._saved.items() if address not in before)
        self.bytes.output = 0

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if _address(tensor) not in self._uncounted:
            self._saved[_address(tensor)] = storage.nbytes()
        # Detached: an operation's own output, kept as it is, would keep the operation alive.
        return tensor.detach()


def _sizes(value: Any) -> dict[int, int]:
    """The bytes of the tensors in ``value`` by the address of their storage, each storage once."""
    sizes: dict[int, int] = {}
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            size = min(leaf.untyped_storage().nbytes(), leaf.numel() * leaf.element_size())
            sizes[_address(leaf)] = max(size, sizes.get(_address(leaf), 0))
    return sizes


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _unpack(kept: Tensor) -> Tensor:
    return kept


def parameter_bytes(module: nn.Module) -> tuple[int, int]:
    """The bytes of the parameters of ``module``, and of those that get a gradient; one that is there twice once."""
    sizes = [(p.numel() * p.element_size(), p.requires_grad) for p in module.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)
