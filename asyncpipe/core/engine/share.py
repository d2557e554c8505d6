"""What a job gets of the lanes that it shares with others.

A pipeline by itself has the lanes for itself and names no job. Where several pipelines work on the same devices, each
says in every step which job it belongs to, how much that job weighs against others, and whether it is a *background*
job, which runs only where the others leave a lane idle. ``core/engine/lanes.py`` says how the shares come about.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite

from asyncpipe.core.graph.task import Task
from asyncpipe.core.kinds import TaskKind
from asyncpipe.errors import OptionError

__all__ = ["JobState", "Share"]

_LAST = 8


@dataclass(frozen=True, slots=True)
class Share:
    """What the steps of one job get of the lanes that other jobs use as well.

    Steps with the same ``job`` are one job; the empty name is that of a pipeline which is by itself, and nothing is
    measured for it. Two foreground jobs of weights 1 and 3 get device time as 1 : 3 on every lane that both keep
    busy. A ``background`` job runs only where no foreground job needs the lane; weights count among such jobs, too.
    The share of a job is that of the step that it submitted last.

    Raises ``OptionError`` for a weight that is not finite and positive.
    """

    job: str = ""
    weight: float = 1.0
    background: bool = False

    def __post_init__(self) -> None:
        if not (isfinite(self.weight) and self.weight > 0):
            raise OptionError(f"the weight of a job must be a finite number above 0, got {self.weight!r}")


@dataclass(slots=True, eq=False)
class JobState:
    """One job as the scheduler knows it: its share, and how long its tasks take. Mutated by the scheduler alone."""

    share: Share
    steps: int = 0
    """Under way."""
    _means: dict[tuple[TaskKind, int, int | None], tuple[int, float]] = field(default_factory=dict)
    """(measured so often, mean seconds) for a kind of task at a stage, and for a copy by where it comes from."""

    @property
    def is_named(self) -> bool:
        """Whether it is worth measuring; a pipeline by itself names no job and pays nothing."""
        return self.share.job != ""

    def took(self, task: Task, seconds: float) -> None:
        """Take in that ``task`` was done in ``seconds``."""
        key = (task.kind, task.stage, task.source)
        count, mean = self._means.get(key, (0, 0.0))
        count = min(count + 1, _LAST)
        self._means[key] = (count, mean + (seconds - mean) / count)

    def expected(self, task: Task) -> float | None:
        """The mean seconds of the last such tasks; ``None`` before the first.

        The mean of all until there are eight, from then on an average in which each new one weighs an eighth.
        """
        found = self._means.get((task.kind, task.stage, task.source))
        return None if found is None else found[1]
