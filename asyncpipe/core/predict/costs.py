"""Cost models: the virtual seconds of each task.

A cost model is any function of a task, so models stack: one says what a kind, or a kind at a stage, costs, and
another one shakes what the first says::

    simulate(graph, Costs(copy=0.5))                                the same for every stage
    simulate(graph, StageCosts(seconds, sent, bandwidth=1e9))       measured: stages differ, copies by their bytes
    simulate(graph, Jitter(Costs(), sigma=0.3, seed=7))             each task a little dearer or cheaper
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import cos, exp, inf, log, log1p, pi, sqrt

from asyncpipe.core.graph.task import WHOLE_STEP, Task
from asyncpipe.core.kinds import COMPUTE_KINDS, TaskKind
from asyncpipe.core.splitmix import splitmix64
from asyncpipe.errors import OptionError

__all__ = ["Costs", "Jitter", "StageCosts", "parse_costs"]

_F, _R, _B, _C, _U = (TaskKind.FORWARD, TaskKind.RECOMPUTE, TaskKind.BACKWARD, TaskKind.COPY, TaskKind.UPDATE)
_I, _W = TaskKind.INPUT_GRADIENT, TaskKind.WEIGHT_GRADIENT


@dataclass(frozen=True, slots=True)
class Costs:
    """A cost model: the same virtual seconds for every task of a kind.

    A full backward costs its two halves unless ``backward`` is given. Updates and sums (U, S) cost nothing.
    """

    forward: float = 1.0
    backward: float | None = None
    recompute: float = 1.0
    copy: float = 0.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0

    @property
    def full_backward(self) -> float:
        """The virtual seconds of B."""
        return self.input_gradient + self.weight_gradient if self.backward is None else self.backward

    def __call__(self, task: Task) -> float:
        """The virtual seconds of ``task``."""
        match task.kind:
            case TaskKind.FORWARD:
                return self.forward
            case TaskKind.BACKWARD:
                return self.full_backward
            case TaskKind.INPUT_GRADIENT:
                return self.input_gradient
            case TaskKind.WEIGHT_GRADIENT:
                return self.weight_gradient
            case TaskKind.RECOMPUTE:
                return self.recompute
            case TaskKind.COPY:
                return self.copy
            case _:
                return 0.0


_FIELDS = {
    "F": "forward",
    "R": "recompute",
    "B": "backward",
    "I": "input_gradient",
    "W": "weight_gradient",
    "C": "copy",
}


def parse_costs(text: str) -> Costs:
    """The costs in ``F=1,I=1,W=1,B=2,R=1,C=0``, as a command line gives them; those left out keep their defaults.

    B is I + W unless it is given. Raises ``OptionError`` that quotes the item for an unknown kind, a kind that is
    there twice, and a cost that is no number, negative or infinite.
    """
    given: dict[str, float] = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        kind, _, value = item.partition("=")
        try:
            field, cost = _FIELDS[kind.strip()], float(value)
        except (KeyError, ValueError):
            raise OptionError(f"--costs takes KIND=NUMBER with the kinds F, R, B, I, W and C, got {item!r}") from None
        if not 0 <= cost < inf:
            raise OptionError(f"--costs must not be negative or infinite, got {item!r}")
        if field in given:
            raise OptionError(f"--costs takes each kind once, got {kind.strip()} again in {item!r}")
        given[field] = cost
    return Costs(**given)


@dataclass(frozen=True, slots=True)
class StageCosts:
    """A cost model of a real model: seconds for each kind at each stage, and copies by their bytes.

    Values travel over a link in the time ``latency + bytes / bandwidth``. Copies of tied parameters, of which a step
    has one for each user, take ``latency`` alone, since ``sent`` does not tell their size; sums (S) cost nothing.
    Everything given is kept as tuples and plain dicts. Raises ``OptionError`` for rows of different lengths, for
    unknown kinds, and for numbers that are negative, infinite or not numbers.
    """

    seconds: Mapping[TaskKind, Sequence[float]]
    """For each kind (F, R, B, I, W) its seconds at each stage. F must be there; R is F and B is I + W where they are
    left out. A kind that is neither given nor implied raises ``OptionError`` when a task of it asks for its cost."""
    sent: Sequence[int]
    """Bytes of one micro-batch that stage j sends to stage j + 1, and that come back as gradients; nothing for the
    last stage."""
    latency: float = 0.0
    """Seconds that each copy takes, however small."""
    bandwidth: float = inf
    """Bytes per second."""
    update: Sequence[float] | None = None
    """Seconds of the optimizer's update of each stage; nothing if left out."""

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.seconds if kind not in COMPUTE_KINDS]
        if unknown or _F not in self.seconds:
            got = ", ".join(map(str, self.seconds)) or "nothing"
            raise OptionError(f"seconds takes rows for the kinds F (always), R, B, I and W, got {got}")
        rows = {TaskKind(kind): tuple(row) for kind, row in self.seconds.items()}
        rows.setdefault(_R, rows[_F])
        stages = max(1, len(rows[_F]))
        for kind, row in rows.items():
            _check_row(f"seconds of {kind.value}", row, stages)
        if _B not in rows and _I in rows and _W in rows:
            rows[_B] = tuple(i + w for i, w in zip(rows[_I], rows[_W], strict=True))
        if self.update is not None:
            _check_row("update", self.update, stages)
            object.__setattr__(self, "update", tuple(self.update))
        _check_row("sent", self.sent, stages - 1)
        _check_row("latency", (self.latency,), 1)
        if not self.bandwidth > 0:
            raise OptionError(f"bandwidth must be more than 0 bytes per second, got {self.bandwidth}")
        object.__setattr__(self, "seconds", rows)
        object.__setattr__(self, "sent", tuple(self.sent))

    def __call__(self, task: Task) -> float:
        """The virtual seconds of ``task``."""
        row = self.seconds.get(task.kind)
        if row is not None:
            return row[task.stage]
        if task.kind is _C:
            return self._copy(task)
        if task.kind is _U:
            return 0.0 if self.update is None else self.update[task.stage]
        if task.kind in COMPUTE_KINDS:
            raise OptionError(f"{task.id} has no cost: give the seconds of {task.kind.value} at each stage")
        return 0.0

    def _copy(self, task: Task) -> float:
        assert task.source is not None
        if task.microbatch == WHOLE_STEP:
            return self.latency
        return self.latency + self.sent[min(task.source, task.stage)] / self.bandwidth


def _check_row(name: str, row: Sequence[float], length: int) -> None:
    if len(row) != length:
        raise OptionError(f"{name} must have {length} numbers, by stage, got {len(row)}: {list(row)}")
    for number in row:
        if not 0 <= number < inf:
            raise OptionError(f"{name} must be finite and not negative, got {number}")


_LETTERS = {kind: number for number, kind in enumerate(TaskKind)}


@dataclass(frozen=True, slots=True)
class Jitter:
    """A cost model that multiplies what ``costs`` says by a random factor of mean 1 and standard deviation ``sigma``.

    Factors are log-normal: always positive, and few are very large, as with real tasks. They depend on ``seed`` and
    on what a task is (kind, micro-batch, stage, source), not on its number in the graph, so an action is as slow
    under one schedule as under another and two schedules can be compared seed by seed. The mean makespans of
    1F1B for p = 4, m = 16 agree with those from normal factors to one percent at sigma = 0.3.

    With ``per_microbatch`` all tasks of a micro-batch share one factor, as they do where its length varies; tasks
    that a step has once keep their cost. Raises ``OptionError`` for a ``sigma`` that is negative or infinite.
    """

    costs: Callable[[Task], float]
    sigma: float
    seed: int = 0
    per_microbatch: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.sigma < inf:
            raise OptionError(f"sigma must be finite and not negative, got {self.sigma}")

    def __call__(self, task: Task) -> float:
        """The virtual seconds of ``task``."""
        cost = self.costs(task)
        return cost * self.factor(task) if cost else 0.0

    def factor(self, task: Task) -> float:
        """What the cost of ``task`` is multiplied by."""
        if not self.per_microbatch:
            source = WHOLE_STEP if task.source is None else task.source
            return self._log_normal(_LETTERS[task.kind], task.microbatch, task.stage, source)
        return 1.0 if task.microbatch == WHOLE_STEP else self._log_normal(task.microbatch)

    def _log_normal(self, *identity: int) -> float:
        """exp(N(-v/2, v)) with v = log(1 + sigma²), which has mean 1 and standard deviation sigma.

        The normal number is that of Box and Muller (1958), from two uniform ones in (0, 1].
        """
        variance = log1p(self.sigma * self.sigma)
        state = splitmix64(self.seed)
        for number in identity:
            state = splitmix64(state ^ number)
        first, second = (((splitmix64(state ^ k) >> 11) + 1) * 2.0**-53 for k in (1, 2))
        normal = sqrt(-2.0 * log(first)) * cos(2.0 * pi * second)
        return exp(sqrt(variance) * normal - variance / 2.0)
