"""1F1B and eager 1F1B: as few forwards ahead as keep the pipe full, or as many as hide the copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from asyncpipe.core.checks import check_positive
from asyncpipe.core.schedules.protocol import Action, B, F, OrderedSchedule, Shape

__all__ = ["EagerOneFOneB", "OneFOneB", "alternate"]


class OneFOneB(OrderedSchedule):
    """Fill the pipe, then alternate one backward and one forward (PipeDream-flush, arXiv 2006.09503).

    Bubble (p-1)(t_F + t_B), as GPipe; p - r micro-batches in flight on device r (at most m). Any m, also
    m < p; one stage a device.
    """

    name = "1f1b"

    def order(self, device: int, shape: Shape) -> Iterator[Action]:
        passes = [(i, device) for i in range(shape.microbatches)]
        return alternate(passes, passes, shape.stages - device)


@dataclass(frozen=True)
class EagerOneFOneB(OrderedSchedule):
    """1F1B with twice the forwards ahead, so that copies hide behind compute (JaxPP, arXiv 2412.14374).

    Bubble (p-1)(t_F + t_B) with free copies, as 1F1B. In 1F1B the gradient of a micro-batch must return to device r
    just in time. Here device r has p - r - 1 more micro-batches in flight to work on meanwhile, so slow copies and
    uneven micro-batches cost little: with copies as long as a forward, t_B = 2 t_F, p = 4 and m = 16, a step takes
    63 t_F and not 85. It needs more memory: 2(p-r) - 1 micro-batches in flight on device r (at most m). Any m, also
    m < p; one stage a device.

    ``cap`` is the most micro-batches in flight on any device; a cap of at least min(m, 2p - 1) changes nothing. With a
    smaller cap, the forwards ahead of each device shrink in proportion. A cap of p gives 1F1B; caps between p and
    2p - 1 trade memory for slack; with a cap below p the step gets longer (with 1, micro-batches run one at a time).
    """

    cap: int | None = None

    name = "eager-1f1b"

    def __post_init__(self) -> None:
        if self.cap is not None:
            check_positive("cap", self.cap)

    def order(self, device: int, shape: Shape) -> Iterator[Action]:
        ahead, most = 2 * (shape.devices - device) - 1, 2 * shape.devices - 1
        if self.cap is not None and self.cap < min(most, shape.microbatches):
            # Rounded up. Not min(ahead, cap): neighbours with equal numbers have no slack between them.
            ahead = -(-ahead * self.cap // most)
        passes = [(i, device) for i in range(shape.microbatches)]
        return alternate(passes, passes, ahead)


def alternate(
    forwards: Sequence[tuple[int, int]], backwards: Iterable[tuple[int, int]], ahead: int
) -> Iterator[Action]:
    """1F1B over (micro-batch, stage) pairs: ``ahead`` forwards, then a backward and a forward in turn.

    There may be fewer forwards than ``ahead``. Backwards remain at the end.
    """
    yield from (F(*pair) for pair in forwards[:ahead])
    for done, pair in enumerate(backwards):
        yield B(*pair)
        if done + ahead < len(forwards):
            yield F(*forwards[done + ahead])
