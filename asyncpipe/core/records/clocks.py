"""Times of several clocks on one: nothing arrives before it left.

What a clock is off is known by round trips, to within half the shortest one. Two workers' times may still contradict
each other by as much. Messages that went between them say more: each one left before it arrived. So the times of each
worker are shifted, within its error, until no message contradicts them. These are difference constraints::

    shift[sender] - shift[receiver] <= arrived - left      of each message
    -error[worker] <= shift[worker] <= error[worker]

whose solutions are shortest paths from and to the controller's clock (Bellman and Ford); what is between the least and
the greatest solution is a solution as well, and its middle is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import NamedTuple

__all__ = ["EdgePassage", "agreed_shifts"]

MOST_DOUBLINGS = 40
ROUNDING = 1e-9
"""Seconds that the arithmetic may be off. Less is no contradiction."""
_CONTROLLER = ""
_Bound = tuple[str, str, float]
"""The shift of the first is at most that of the second, and so many seconds."""


class EdgePassage(NamedTuple):
    """A message from one worker to another, with times on their own clocks as far as these are known."""

    sender: str
    left: float
    receiver: str
    arrived: float


def agreed_shifts(errors: Mapping[str, float], crossings: Iterable[EdgePassage]) -> dict[str, float]:
    """Seconds to add to each worker's times: 0 for all if nothing arrived before it left.

    ``errors`` are how far each worker's times may be off, in seconds. Shifts stay within them, or if that contradicts
    the messages, since clocks drift, within the least multiple of them by a power of two that does not. Where no
    constant shifts can explain the messages, all are 0.
    """
    slack: dict[tuple[str, str], float] = {}
    for sender, left, receiver, arrived in crossings:
        slack[sender, receiver] = min(slack.get((sender, receiver), arrived - left), arrived - left)
    nothing = dict.fromkeys(errors, 0.0)
    contradiction = -sum(each for each in slack.values() if each < -ROUNDING)
    if not contradiction:
        return nothing
    between = [(sender, receiver, most) for (sender, receiver), most in slack.items()]
    limits = {worker: contradiction if error == inf else error for worker, error in errors.items()}
    for _ in range(MOST_DOUBLINGS):
        within = [bound for worker, most in limits.items() for bound in _both_ways(worker, most)]
        greatest = _greatest([*between, *within], errors)
        least = _greatest([(second, first, most) for first, second, most in (*between, *within)], errors)
        if greatest is not None and least is not None:
            # What is true is in between as well, so the middle is off by no more than the errors.
            return {worker: (greatest[worker] - least[worker]) / 2 for worker in errors}
        limits = {worker: 2 * most for worker, most in limits.items()}
    return nothing


def _both_ways(worker: str, most: float) -> Iterable[_Bound]:
    return (worker, _CONTROLLER, most), (_CONTROLLER, worker, most)


def _greatest(bounds: Iterable[_Bound], workers: Iterable[str]) -> dict[str, float] | None:
    """The greatest shifts within ``bounds``, that of the controller being 0; ``None`` if there are none."""
    found = {**dict.fromkeys(workers, inf), _CONTROLLER: 0.0}
    kept = list(bounds)
    for _ in range(len(found)):
        changed = False
        for first, second, most in kept:
            if found[second] + most < found[first] - ROUNDING:
                found[first] = found[second] + most
                changed = True
        if not changed:
            return found
    return None
