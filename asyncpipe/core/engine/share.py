"""What a job gets of the lanes that it shares with others.

A pipeline by itself has the lanes for itself and names no job. Where several pipelines work on the same devices, each
says in every step which job it belongs to, how much that job weighs against others, and whether it is a *background*
job, which runs only where the others leave a lane idle. ``policies/fair_share.py`` says how the shares come about.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from asyncpipe.errors import OptionError

__all__ = ["Share"]


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
