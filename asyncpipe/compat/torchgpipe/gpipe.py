"""torchgpipe's ``GPipe``: a sequence of layers, split by a balance, called like the sequence itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from asyncpipe.compat.module import PipelinedModule, check_sequential
from asyncpipe.compat.state import place_by_name
from asyncpipe.core.predict.balance import check_balance
from asyncpipe.errors import ArgumentTypeError, BalanceError, DeviceError, TooFewDevicesError
from asyncpipe.ops.model.sequential import split
from asyncpipe.ops.model.skip_layout import verify_skippables

__all__ = ["GPipe"]


class GPipe(PipelinedModule):
    """A pipeline in place of ``module``: the same layers, output and gradients, with the stages on ``devices``.

    ``module``: an ``nn.Sequential``, whose layers are moved in place and stay the objects that they are.
    ``balance``: the number of layers in each stage.
    ``devices``: one per stage, by default all CUDA devices; extra ones are not used. Several may be ``"cpu"``, each
    with a thread of its own.
    ``chunks``: into how many micro-batches a mini-batch is cut; a mini-batch with fewer samples makes fewer.
    ``checkpoint``: which micro-batches are recomputed in training: ``"always"``, ``"except_last"``, ``"never"``.
    ``deferred_batch_norm``: whether batch norms update their running statistics once per mini-batch.

    Raises ``ValueError`` for a wrong balance, ``chunks`` or ``checkpoint``, ``IndexError`` for fewer devices than
    stages, ``TypeError`` for another type of module and for skips that do not match. Stages may share a parameter.
    """

    balance: list[int]
    """The number of layers in each stage."""

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[int | str | torch.device] | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__(chunks, checkpoint)
        verify_skippables(check_sequential(module))
        self.balance = _checked(balance, len(module))
        names = _names(devices, len(self.balance))
        parts = split(module, self.balance, len(self.balance)) if self.balance else []
        self._arrange(parts, range(len(parts)), names, deferred_batch_norm=deferred_batch_norm)

    def forward(self, input: Any) -> Any:  # noqa: A002 - torchgpipe's name, which callers may use
        """The output for a mini-batch: a tensor, or a tuple, which the first layer gets as one argument.

        Tensors are cut along dimension 0. Raises ``TypeError`` for an input of another type, ``ValueError`` for one
        that cannot be cut, and whatever a layer raises. An error in ``backward`` is the cause of a ``TaskError``.
        """
        if not isinstance(input, Tensor | tuple):
            raise ArgumentTypeError(f"the input must be a tensor or a tuple of tensors, got {type(input).__name__}")
        return self._run(input) if len(self.partitions) else input

    def _place_layers(self, state: dict[str, Any], prefix: str) -> None:
        # A layer has its name from the whole module, whatever the balance is.
        if not place_by_name(self, state, prefix):
            super()._place_layers(state, prefix)


def _checked(balance: Iterable[int] | None, layers: int) -> list[int]:
    tool = "asyncpipe.compat.torchgpipe.balance finds one: balance_by_time(partitions, module, sample)"
    if balance is None:
        raise BalanceError(f"balance is required: the number of layers in each stage; {tool}")
    # Accepts integers of other libraries, but no fractions.
    sizes = [size.__index__() if hasattr(size, "__index__") else size for size in balance]
    try:
        return check_balance(sizes, layers) if sizes or layers else []
    except BalanceError as error:
        raise BalanceError(f"{error}; {tool}") from None


def _names(devices: Iterable[int | str | torch.device] | None, stages: int) -> list[str]:
    """The names of the first ``stages`` devices."""
    if isinstance(devices, str | torch.device):
        raise DeviceError(f"devices must be a list such as ['cuda:0', 'cuda:1'], got {devices!r}")
    there = range(torch.cuda.device_count()) if devices is None else devices
    names = [f"cuda:{device}" if isinstance(device, int) else str(device) for device in there]
    if len(names) < stages:
        default = " (by default all CUDA devices of this machine)" if devices is None else ""
        raise TooFewDevicesError(
            f"{stages} stages need {stages} devices, got {len(names)}{default}; give devices, such as "
            f"{['cpu'] * stages}, or fewer stages"
        )
    return names[:stages]
