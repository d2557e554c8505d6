"""Optimizers of which each replica has a part: it updates some elements of each parameter, and has their states alone.

A piece is a view of some consecutive elements of one parameter, which the optimizer has in the place of the parameter.
So its update is in the parameter at once::

    parameter    0 1 2 3 4 5 6 7 8      elements
    replica 0    └─ piece ─┘            states of 5 elements
    replica 1              └piece─┘     states of 4

That is right for an optimizer that computes each element from that element alone. ZeRO-1 (Rajbhandari, Rasley, Ruwase
and He, ZeRO: memory optimizations toward training trillion parameter models, arXiv 1910.02054).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asyncpipe.errors import OptionError
from asyncpipe.ops.execute.buckets import Bucket, Section
from asyncpipe.ops.execute.host_optimizer import on_host, original

__all__ = ["Piece", "Shard", "check_elementwise", "cut", "joined", "piece_of"]

_PIECE = "_asyncpipe_piece"
"""The attribute of a piece that says of what."""
_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)


class Piece(NamedTuple):
    """Of what a piece is."""

    parameter: nn.Parameter
    start: int
    """The first of its elements."""


class Shard:
    """What one replica updates of the parameters of a stage."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        buckets: Sequence[Bucket],
        parts: Sequence[range],
        optimizer: torch.optim.Optimizer,
        *,
        hosted: bool,
    ) -> None:
        """``optimizer`` was made of the ``parameters``, or of their copies on the host; ``parts`` are the buckets'.

        Raises ``OptionError`` for a parameter whose elements do not lie behind each other.
        """
        self._pieces: list[list[tuple[nn.Parameter, Section]]] = []
        """By bucket: the pieces, and where they are."""
        by_parameter: dict[nn.Parameter, nn.Parameter] = {}
        for bucket, part in zip(buckets, parts, strict=True):
            mine = []
            for overlap in bucket.overlaps(part):
                parameter = parameters[bucket.first + overlap.number]
                piece = by_parameter[parameter] = _piece(parameter, overlap.elements)
                mine.append((piece, overlap))
            self._pieces.append(mine)
        _give_pieces(optimizer, by_parameter, hosted=hosted)

    def refresh(self) -> None:
        """Look for parameters that have got other memory (``parameter.data = …``)."""
        for piece, overlap in chain.from_iterable(self._pieces):
            parameter, start = getattr(piece, _PIECE)
            if piece.data_ptr() != parameter.data_ptr() + start * parameter.element_size():
                piece.data = _elements(parameter, overlap.elements)

    def take(self, reduced: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Make the sums of the parts, by bucket, the gradients of the pieces."""
        for mine, (values, present) in zip(self._pieces, reduced, strict=True):
            has_gradient = present.tolist()
            for piece, overlap in mine:
                piece.grad = values[overlap.place] if has_gradient[overlap.number] else None


def _piece(parameter: nn.Parameter, elements: slice) -> nn.Parameter:
    piece = nn.Parameter(_elements(parameter, elements), requires_grad=parameter.requires_grad)
    setattr(piece, _PIECE, Piece(parameter, elements.start))
    return piece


def _elements(parameter: nn.Parameter, elements: slice) -> Tensor:
    if not parameter.is_contiguous():
        raise OptionError(
            f"a parameter of the shape {tuple(parameter.shape)} is not contiguous, so shard_optimizer cannot cut it; "
            "make it contiguous, or leave shard_optimizer out"
        )
    return parameter.detach().view(-1)[elements]


def piece_of(parameter: nn.Parameter) -> Piece | None:
    """Of what ``parameter`` is a piece; ``None`` if it is whole."""
    return getattr(parameter, _PIECE, None)


def _give_pieces(
    optimizer: torch.optim.Optimizer, pieces: Mapping[nn.Parameter, nn.Parameter], *, hosted: bool = False
) -> None:
    for group in optimizer.param_groups:
        found = [pieces[original(each)] for each in group["params"] if original(each) in pieces]
        group["params"] = on_host(found) if hosted else found


def check_elementwise(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
    """Raise ``OptionError`` unless the optimizers that ``make`` makes can be sharded.

    Those of torch that can are known. Others make two steps on a small parameter, whole and in pieces.
    """
    whole = nn.Parameter(torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4))
    optimizer = make([whole])
    if type(optimizer) in _ELEMENTWISE:
        return
    cut = nn.Parameter(whole.detach().clone())
    in_pieces = make([cut])
    name = type(optimizer).__name__
    try:
        pieces = [_piece(cut, slice(0, 9)), _piece(cut, slice(9, 24))]
        for group in in_pieces.param_groups:
            group["params"] = pieces if group["params"] else []
        for step in range(2):
            gradient = torch.linspace(1 + step, -2, 24, dtype=torch.float64).square()
            whole.grad = gradient.view(6, 4).clone()
            for piece, values in zip(pieces, (gradient[:9], gradient[9:]), strict=True):
                piece.grad = values.clone()
            optimizer.step()
            in_pieces.step()
        is_same = torch.equal(whole, cut)
    except Exception as error:
        raise OptionError(
            f"shard_optimizer: {name} failed on pieces of a parameter ({type(error).__name__}: {error}); use one that "
            "updates each element alone, as Adam, or leave shard_optimizer out"
        ) from error
    if not is_same:
        raise OptionError(
            f"shard_optimizer: {name} does not update each element alone, so replicas cannot share its update; use one "
            "that does, as Adam, or leave shard_optimizer out"
        )


def joined(shape: torch.Size, pieces: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """The state of a whole parameter of ``shape``, from those of all its pieces by their first elements."""
    states = [state for _, state in sorted(pieces.items())]
    whole: dict[str, Any] = {}
    for key, value in states[0].items():
        if isinstance(value, Tensor) and value.dim():
            whole[key] = torch.cat([state[key] for state in states]).view(shape)
        else:
            whole[key] = value
    return whole


def cut(value: Any, parameter: nn.Parameter, start: int, length: int) -> Any:
    """What a piece has of ``value``, which is in the state of the whole ``parameter``."""
    if isinstance(value, Tensor) and value.shape == parameter.shape:
        return value.reshape(-1)[start : start + length]
    return value
