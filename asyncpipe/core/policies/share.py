"""What a job gets of the lanes that it shares with others.

A pipeline that has its devices for itself names no job. Where several pipelines use the same devices, each step says to
which job it belongs, the job's weight, and whether it is a *background* job, which runs only where the others leave a
lane idle. ``policies/fair_share.py`` divides the lanes accordingly.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from asyncpipe.errors import OptionError

__all__ = ["Share"]


@dataclass(frozen=True, slots=True)
class Share:
    """What the steps of one job get of the lanes that other jobs use as well.

    Steps with the same ``job`` belong to one job. The empty name stands for a pipeline that has its devices for itself;
    its tasks are not measured. Two foreground jobs of weights 1 and 3 get device time in the ratio 1 : 3 on every lane
    that both keep busy. A ``background`` job runs only where no foreground job needs the lane; between background jobs
    weights count as well. A job's share is that of the step that it submitted last.

    Raises ``OptionError`` for a weight that is not finite and positive.
    """

    job: str = ""
    weight: float = 1.0
    background: bool = False

    def __post_init__(self) -> None:
        if not (isfinite(self.weight) and self.weight > 0):
            raise OptionError(f"the weight of a job must be a finite number above 0, got {self.weight!r}")
