"""What a check finds: figures beside what was expected of them, and a verdict.

PASS     what must be so is so, and each figure is as expected
FAIL     what must be so is not, or the check did not come to its end; its output is kept
MISSED   what must be so is so, but a figure is not as expected of a GPU
RAN      measured on a CPU, where what is expected of a GPU is not judged
SKIP     it cannot run here, and says why
NOT RUN  the time was over
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

__all__ = ["CHECKS", "VERDICTS", "Check", "Figure", "Outcome", "at_least", "at_most", "check", "judge", "seen"]

VERDICTS = ("PASS", "FAIL", "MISSED", "RAN", "SKIP", "NOT RUN")


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured number, and the one that was expected."""

    name: str
    measured: float
    bound: float
    """The most or the least that is expected; not a number where nothing is."""
    unit: str = ""
    most: bool = True
    promised: bool = False
    """Whether it must be so on every device; otherwise it is an expectation of a GPU."""

    @property
    def is_met(self) -> bool:
        if math.isnan(self.bound):
            return True
        return self.measured <= self.bound if self.most else self.measured >= self.bound

    @property
    def expected(self) -> str:
        """In words."""
        return "" if math.isnan(self.bound) else f"{'≤' if self.most else '≥'} {number(self.bound)} {self.unit}".strip()

    @property
    def shown(self) -> str:
        """The measured number with its unit."""
        return f"{number(self.measured)} {self.unit}".strip()


def number(value: float) -> str:
    """Three digits."""
    if not math.isfinite(value) or value == int(value) < 1e6:
        return f"{value:g}"
    return (
        f"{value:.1e}"
        if value and not 1e-3 <= abs(value) < 1e6
        else f"{value:.3g}"
        if abs(value) < 100
        else f"{value:.0f}"
    )


def at_most(name: str, measured: float, bound: float, unit: str = "", *, promised: bool = False) -> Figure:
    """A figure that is expected to be at most ``bound``."""
    return Figure(name, float(measured), bound, unit, True, promised)


def at_least(name: str, measured: float, bound: float, unit: str = "", *, promised: bool = False) -> Figure:
    """A figure that is expected to be at least ``bound``."""
    return Figure(name, float(measured), bound, unit, False, promised)


def seen(name: str, measured: float, unit: str = "") -> Figure:
    """A reference: nothing is expected of it."""
    return Figure(name, float(measured), math.nan, unit)


class Outcome(NamedTuple):
    """What a check returns."""

    figures: Sequence[Figure]
    text: str = ""
    """What else there is to say, in one line."""


def judge(outcome: Outcome, *, on_gpu: bool) -> str:
    """The verdict."""
    if not all(each.is_met for each in outcome.figures if each.promised):
        return "FAIL"
    if not on_gpu:
        return "PASS" if all(each.promised or math.isnan(each.bound) for each in outcome.figures) else "RAN"
    return "PASS" if all(each.is_met for each in outcome.figures) else "MISSED"


@dataclass(frozen=True, slots=True)
class Check:
    """A question, and the function that answers it."""

    name: str
    question: str
    run: Callable[[Any], Outcome]
    """Given the ``Machine``; in a process of its own."""
    limit: float
    """Seconds after which it is killed."""
    needs_gpu: str
    """Why CPU devices cannot do; empty if they can."""
    gpus: int
    items: tuple[int, ...]
    """The points of the list of what was made fast on GPUs that it answers (``docs/measuring.md``)."""


CHECKS: dict[str, Check] = {}
"""By name."""


def check(
    question: str, *items: int, limit: float = 60.0, needs_gpu: str = "", gpus: int = 1
) -> Callable[[Callable[[Any], Outcome]], Callable[[Any], Outcome]]:
    """Register a check."""

    def register(run: Callable[[Any], Outcome]) -> Callable[[Any], Outcome]:
        CHECKS[run.__name__] = Check(run.__name__, question, run, limit, needs_gpu, gpus, items)
        return run

    return register


def as_json(figure: Figure) -> dict[str, Any]:
    """The figure with its words, for JSON."""
    values = {
        name: value if not isinstance(value, float) or math.isfinite(value) else str(value)
        for name, value in asdict(figure).items()
    }
    return {**values, "expected": figure.expected, "shown": figure.shown, "is_met": figure.is_met}
