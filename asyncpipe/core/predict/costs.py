"""Cost models: the virtual seconds of each task.

A cost model is any function from a task to seconds, so one model can wrap another::

    simulate(graph, Costs(copy=0.5))                                the same for every stage
    simulate(graph, StageCosts(seconds, sent, bandwidth=1e9))       by stage, and for copies by bytes
    simulate(graph, Jitter(Costs(), sigma=0.3, seed=7))             each task randomly longer or shorter
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import cos, exp, inf, log, log1p, pi, sqrt

from asyncpipe.core.graph.task import WHOLE_STEP, Task
from asyncpipe.core.kinds import COLLECTIVE_KINDS, COMPUTE_KINDS, COPY_KINDS, TaskKind
from asyncpipe.core.splitmix import splitmix64
from asyncpipe.errors import OptionError

__all__ = ["Costs", "Jitter", "StageCosts", "parse_costs"]

_F, _R, _B, _C, _U = (TaskKind.FORWARD, TaskKind.RECOMPUTE, TaskKind.BACKWARD, TaskKind.COPY, TaskKind.UPDATE)
_I, _W, _S = TaskKind.INPUT_GRADIENT, TaskKind.WEIGHT_GRADIENT, TaskKind.SUM


@dataclass(frozen=True, slots=True)
class Costs:
    """A cost model: the same virtual seconds for every task of a kind.

    A full backward costs its two halves unless ``backward`` is given. Sums (S) cost nothing. What is offloaded, reduced
    over replicas, gathered, updated and measured for a norm takes no time unless it is given.
    """

    forward: float = 1.0
    backward: float | None = None
    recompute: float = 1.0
    copy: float = 0.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0
    offload: float = 0.0
    load: float = 0.0
    update: float = 0.0
    reduce: float = 0.0
    gather: float = 0.0
    norm: float = 0.0

    @property
    def full_backward(self) -> float:
        """The virtual seconds of B."""
        return self.input_gradient + self.weight_gradient if self.backward is None else self.backward

    def __call__(self, task: Task) -> float:
        """The virtual seconds of ``task``."""
        if task.kind is _B:
            return self.full_backward
        field = _FIELDS.get(task.kind)
        return 0.0 if field is None else float(getattr(self, field))


_FIELDS = {kind: kind.name.lower() for kind in (*COMPUTE_KINDS, *COPY_KINDS, _U, *COLLECTIVE_KINDS, TaskKind.NORM)}
"""The field of ``Costs`` for each kind that has one."""
_KINDS = " and ".join(", ".join(_FIELDS).rsplit(", ", 1))


def parse_costs(text: str) -> Costs:
    """The costs in the text ``F=1,I=1,W=1,B=2,R=1,C=0`` of a command line; those left out keep their defaults.

    B is I + W unless it is given. Raises ``OptionError``, which quotes the item, for an unknown kind, a kind given
    twice, and a cost that is not a number, negative or infinite.
    """
    given: dict[str, float] = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        kind, _, value = item.partition("=")
        try:
            field, cost = _FIELDS[TaskKind(kind.strip())], float(value)
        except (KeyError, ValueError):
            raise OptionError(f"--costs takes KIND=NUMBER with the kinds {_KINDS}, got {item!r}") from None
        if not 0 <= cost < inf:
            raise OptionError(f"--costs must not be negative or infinite, got {item!r}")
        if field in given:
            raise OptionError(f"--costs takes each kind once, got {kind.strip()} again in {item!r}")
        given[field] = cost
    return Costs(**given)


@dataclass(frozen=True, slots=True)
class StageCosts:
    """A cost model of a real model: seconds for each kind at each stage, and copies by their bytes.

    A copy takes ``latency + bytes / bandwidth``. Stages are those of one replica; the others cost the same. If the
    seconds of A and G are not known, they follow from the bytes of a bucket: what comes from the other replicas takes
    as long as a copy, then A adds up its part and G copies all. Sequences are kept as tuples. Raises ``OptionError``
    for rows of different lengths, unknown kinds, and numbers that are negative, infinite or NaN.
    """

    seconds: Mapping[TaskKind, Sequence[float]]
    """For each kind (F, R, B, I, W, and A, G and U if they were measured), its seconds at each stage. F is required; by
    default R is F and B is I + W. Calling the model for a task of F, R, B, I or W without a row raises
    ``OptionError``."""
    sent: Sequence[int]
    """For each stage but the last, the bytes of one micro-batch that it sends to the next stage, and that come back as
    gradients."""
    latency: float = 0.0
    """Seconds that a copy of nothing would take."""
    bandwidth: float = inf
    """Bytes per second."""
    update: Sequence[float] | None = None
    """Seconds of the optimizer's update at each stage; by default zero."""
    skips: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """By (source, user): the bytes on links that jump stages; on others than these, what the source sends the next."""
    tied: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """By (owner, user): the bytes of the parameters that the user has replicas of, which come once in a step, and go
    back as gradients; by default nothing, so their copies take the latency."""
    sums: Sequence[float] | None = None
    """Seconds in which each stage adds up the gradients of such parameters (S); by default zero."""
    kept: Sequence[int] | None = None
    """The bytes of one micro-batch that an offload or a load of each stage moves; by default none."""
    kept_recomputed: Sequence[int] | None = None
    """The same of micro-batches that are recomputed, of which only the input is kept; by default ``kept``."""
    recomputed: int = 0
    """How many micro-batches, from the first on, are recomputed."""
    host_bandwidth: float = inf
    """Bytes per second between a device and the host's memory, each way."""
    buckets: Sequence[Sequence[int]] | None = None
    """Of each stage, the bytes of its buckets; by default nothing, so A and G take the latency."""
    rows: int = 1
    """How many replicas there are."""
    reducing: float = inf
    """Bytes of a bucket per second that A adds up; G copies as many."""

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.seconds if kind not in _MEASURED]
        if unknown or _F not in self.seconds:
            got = ", ".join(map(str, self.seconds)) or "nothing"
            raise OptionError(f"seconds takes rows for the kinds F (always), R, B, I, W, A, G and U, got {got}")
        rows = {TaskKind(kind): tuple(row) for kind, row in self.seconds.items()}
        rows.setdefault(_R, rows[_F])
        stages = max(1, len(rows[_F]))
        for kind, row in rows.items():
            _check_row(f"seconds of {kind.value}", row, stages)
        if _B not in rows and _I in rows and _W in rows:
            rows[_B] = tuple(i + w for i, w in zip(rows[_I], rows[_W], strict=True))
        for name in ("update", "sums", "kept", "kept_recomputed"):
            if (row := getattr(self, name)) is not None:
                _check_row(name, row, stages)
                object.__setattr__(self, name, tuple(row))
        _check_row("skips", tuple(self.skips.values()), len(self.skips))
        _check_row("tied", tuple(self.tied.values()), len(self.tied))
        _check_row("sent", self.sent, stages - 1)
        _check_row("latency", (self.latency,), 1)
        for name, speed in (("bandwidth", self.bandwidth), ("host_bandwidth", self.host_bandwidth)):
            if not speed > 0:
                raise OptionError(f"{name} must be more than 0 bytes per second, got {speed}")
        object.__setattr__(self, "seconds", rows)
        object.__setattr__(self, "sent", tuple(self.sent))

    def __call__(self, task: Task) -> float:
        """The virtual seconds of ``task``."""
        row, stage = self.seconds.get(task.kind), task.stage % len(self.seconds[_F])
        if row is not None:
            return row[stage]
        if task.kind is _C:
            return self.latency + self.size(task) / self.bandwidth
        if task.kind in (_U, _S):
            row = self.update if task.kind is _U else self.sums
            return 0.0 if row is None else row[stage]
        if task.kind in COLLECTIVE_KINDS:
            part = self.size(task)
            return part * self.rows / self.reducing + self.latency + part * (self.rows - 1) / self.bandwidth
        if task.kind in COPY_KINDS:
            is_light = task.microbatch < self.recomputed and self.kept_recomputed is not None
            moved = self.kept_recomputed if is_light else self.kept
            return 0.0 if moved is None else moved[stage] / self.host_bandwidth
        if task.kind in COMPUTE_KINDS:
            raise OptionError(f"{task.id} has no cost: give the seconds of {task.kind.value} at each stage")
        return 0.0

    def size(self, task: Task) -> float:
        """The bytes that the copy ``task`` brings; of A and G those that come from each of the other replicas."""
        stages = len(self.seconds[_F])
        if task.bucket is not None:
            return 0.0 if self.buckets is None else self.buckets[task.stage % stages][task.bucket] / self.rows
        assert task.source is not None
        source, user = sorted((task.source % stages, task.stage % stages))
        if task.microbatch == WHOLE_STEP:
            return self.tied.get((source, user), 0)
        return self.sent[source] if user == source + 1 else self.skips.get((source, user), self.sent[source])


_MEASURED = (*COMPUTE_KINDS, *COLLECTIVE_KINDS, _U)


def _check_row(name: str, row: Sequence[float], length: int) -> None:
    if len(row) != length:
        raise OptionError(f"{name} must have {length} numbers, by stage, got {len(row)}: {list(row)}")
    for number in row:
        if not 0 <= number < inf:
            raise OptionError(f"{name} must be finite and not negative, got {number}")


_KIND_NUMBERS = {kind: number for number, kind in enumerate(TaskKind)}


@dataclass(frozen=True, slots=True)
class Jitter:
    """A cost model that multiplies those of ``costs`` by random factors of mean 1 and standard deviation ``sigma``.

    Factors are log-normal: always positive, and a few are large, as with real tasks. A factor depends on ``seed`` and
    on the task's kind, micro-batch, stage and source, not on its number in the graph. An action is therefore equally
    slow under every schedule, and schedules can be compared seed by seed. The mean makespans of 1F1B for p = 4, m = 16
    agree with those from normal factors to one percent at sigma = 0.3.

    With ``per_microbatch`` all tasks of a micro-batch share one factor, as with micro-batches of different lengths;
    tasks of the whole step keep their cost. Raises ``OptionError`` for a ``sigma`` that is negative or infinite.
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
        """The factor by which the cost of ``task`` is multiplied."""
        if not self.per_microbatch:
            source = WHOLE_STEP if task.source is None else task.source
            return self._log_normal(_KIND_NUMBERS[task.kind], task.microbatch, task.stage, source)
        return 1.0 if task.microbatch == WHOLE_STEP else self._log_normal(task.microbatch)

    def _log_normal(self, *identity: int) -> float:
        """exp(N(-v/2, v)) with v = log(1 + sigma²), which has mean 1 and standard deviation sigma.

        The normal variate is made from two uniform ones in (0, 1] by the method of Box and Muller (1958).
        """
        variance = log1p(self.sigma * self.sigma)
        state = splitmix64(self.seed)
        for number in identity:
            state = splitmix64(state ^ number)
        first, second = (((splitmix64(state ^ k) >> 11) + 1) * 2.0**-53 for k in (1, 2))
        normal = sqrt(-2.0 * log(first)) * cos(2.0 * pi * second)
        return exp(sqrt(variance) * normal - variance / 2.0)
