"""Which pipeline of a model is the fastest that fits: choices are simulated with measured costs, and ranked.

A *choice* is a schedule, a number of stages and of micro-batches, and a recomputation mode; a choice with a balance
is a *plan*. Every choice is tried with the balances that are even by time and by memory. The best choices then move
one border after the other while that helps::

    choices ──▶ even by time, even by memory ──▶ the best few ──▶ neighbours ──▶ ranked plans
                      (those that cannot be among the best are left out:
                       no step is shorter than what its busiest device has to do)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import Any, NamedTuple

from asyncpipe.core.graph.lower import CheckpointMode, lower
from asyncpipe.core.graph.task_graph import TaskGraph, Wiring
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.balance import check_balance, even_balance
from asyncpipe.core.predict.costs import StageCosts
from asyncpipe.core.predict.layer_profile import PARAMETER_SCALE, Profile
from asyncpipe.core.predict.memory import peak_memory
from asyncpipe.core.predict.report import report
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.schedules.protocol import Schedule, Shape
from asyncpipe.core.schedules.registry import find_schedule, known_schedules
from asyncpipe.errors import PlanError, ScheduleError

__all__ = ["Plan", "best_of_each", "plan"]

MOST_VIRTUAL = 4
"""Stages a device that are tried."""
REFINED = 10
"""Choices whose borders are moved."""
MOST_MOVES = 8
"""Borders that are moved of one choice."""

Balances = Callable[[Profile, int, int, CheckpointMode], Sequence[Sequence[int]]]
"""From a profile, a number of stages, one of micro-batches and a mode: the balances to begin with."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to run a model, and what it is predicted to take."""

    schedule: str
    balance: tuple[int, ...]
    """Layers of each stage."""
    microbatches: int
    checkpoint: CheckpointMode
    seconds: float
    """Of one step."""
    memory: tuple[int, ...]
    """Bytes at the fullest moment, by device."""
    bubble: float
    """Idle share of the devices."""

    def __str__(self) -> str:
        layers = "-".join(map(str, self.balance))
        return (
            f"{self.schedule}, balance {layers}, {self.microbatches} micro-batches, checkpoint {self.checkpoint.value}"
        )

    def options(self) -> dict[str, Any]:
        """The keyword arguments of ``Pipeline`` that choose this plan."""
        return {
            "schedule": self.schedule,
            "balance": list(self.balance),
            "microbatches": self.microbatches,
            "checkpoint": self.checkpoint.value,
        }


class _Candidate(NamedTuple):
    schedule: str
    stages: int
    microbatches: int
    checkpoint: CheckpointMode


def plan(
    profile: Profile,
    devices: int,
    *,
    schedules: Sequence[str] | Mapping[str, Schedule] | None = None,
    microbatches: Sequence[int] | None = None,
    checkpoints: Sequence[CheckpointMode | str] = tuple(CheckpointMode),
    balances: Balances | None = None,
    memory_limit: int | None = None,
    parameter_scale: float = PARAMETER_SCALE,
    progress: Callable[[str], None] | None = None,
) -> list[Plan]:
    """Every plan that was tried and fits, the fastest first.

    ``devices`` is how many there are. ``schedules`` are names, or schedules by name, by default all that are known;
    those that cannot serve a shape are left out of it. ``microbatches`` must have been measured; by default all that
    were. ``balances`` gives balances to try in place of the even ones and their neighbours. ``memory_limit`` is in
    bytes, for each device; ``parameter_scale`` is that of ``Profile.memory``. ``progress`` is told what is tried.

    Raises ``PlanError`` if no schedule serves, or if nothing fits; ``ProfileError`` for numbers of micro-batches that
    were not measured, ``UnknownScheduleError`` for names.
    """
    names = known_schedules() if schedules is None else schedules
    by_name = dict(names) if isinstance(names, Mapping) else {name: find_schedule(name) for name in names}
    modes = [CheckpointMode.parse(mode) for mode in checkpoints]
    numbers = profile.measured if microbatches is None else list(microbatches)
    for number in numbers:
        profile.measurement(number)
    search = _Search(profile, devices, by_name, parameter_scale, memory_limit)
    choices = list(search.choices(numbers, modes))
    if not choices:
        raise PlanError(search.refusal())
    tell = progress if progress is not None else _silent
    for number, choice in enumerate(choices, 1):
        tell(f"simulating {choice.schedule}, {choice.microbatches} micro-batches ({number} of {len(choices)})")
        search.begin(choice, balances)
    for choice in search.promising() if balances is None else ():
        tell(f"moving the borders of {choice.schedule}, {choice.microbatches} micro-batches")
        search.refine(choice)
    return search.ranked()


def _silent(_: str) -> None:
    pass


def best_of_each(plans: Sequence[Plan]) -> list[Plan]:
    """The first plan of each (schedule, number of stages and of micro-batches, mode), in the order given."""
    first: dict[_Candidate, Plan] = {}
    for each in plans:
        first.setdefault(_Candidate(each.schedule, len(each.balance), each.microbatches, each.checkpoint), each)
    return list(first.values())


class _Search:
    """Plans that were tried, and task graphs, which all balances of a choice share unless skips cross otherwise."""

    def __init__(
        self,
        profile: Profile,
        devices: int,
        schedules: Mapping[str, Schedule],
        parameter_scale: float,
        limit: int | None,
    ) -> None:
        self._profile = profile
        self._devices = devices
        self._schedules = schedules
        self._scale = parameter_scale
        self._limit = limit
        self._graphs: dict[tuple[_Candidate, Wiring], TaskGraph] = {}
        self._plans: dict[tuple[_Candidate, tuple[int, ...]], Plan] = {}
        self._refusals: dict[str, str] = {}

    # What there is to try

    def choices(self, numbers: Sequence[int], modes: Sequence[CheckpointMode]) -> Iterator[_Candidate]:
        """Every choice that its schedule can serve."""
        for name, schedule in self._schedules.items():
            for virtual in sorted({schedule.virtual, *range(1, MOST_VIRTUAL + 1)}):
                stages = self._devices * virtual
                if stages > len(self._profile.layers):
                    self._refusals.setdefault(name, f"{stages} stages need as many layers")
                    continue
                for number in numbers:
                    if self._serves(name, schedule, Shape(stages, number, self._devices)):
                        yield from (_Candidate(name, stages, number, mode) for mode in modes)

    def _serves(self, name: str, schedule: Schedule, shape: Shape) -> bool:
        try:
            schedule.check(shape)
        except ScheduleError as error:
            self._refusals.setdefault(name, str(error))
            return False
        return True

    def refusal(self) -> str:
        """Why there is no choice."""
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self._refusals.items())
        return f"no schedule serves {self._devices} devices and {len(self._profile.layers)} layers: {reasons}"

    # Trying

    def begin(self, choice: _Candidate, balances: Balances | None) -> None:
        """Try the choice with its first balances, unless it cannot be among the best."""
        worst_of_best = self._worst_of_best()
        for balance in (balances or _even_balances)(
            self._profile, choice.stages, choice.microbatches, choice.checkpoint
        ):
            if len(balance) == choice.stages and self._bound(choice, balance) < worst_of_best:
                self._try(choice, tuple(check_balance(balance, len(self._profile.layers))))

    def _worst_of_best(self) -> float:
        """What a plan must beat to be among the best."""
        best: dict[_Candidate, float] = {}
        for (choice, _), each in self._plans.items():
            if self._excess(each) == 0:
                best[choice] = min(each.seconds, best.get(choice, each.seconds))
        return max(nsmallest(REFINED, best.values())) if len(best) >= REFINED else float("inf")

    def _bound(self, choice: _Candidate, balance: Sequence[int]) -> float:
        """What the busiest device has to do: no step is shorter."""
        costs = self._costs(choice, balance)
        m = choice.microbatches
        recomputed = sum(choice.checkpoint.recomputes(i, m) for i in range(m))
        seconds = costs.seconds
        load = [0.0] * self._devices
        shape = Shape(choice.stages, m, self._devices)
        for stage, device in enumerate(self._schedules[choice.schedule].placement(shape)):
            halves = seconds[TaskKind.INPUT_GRADIENT][stage] + seconds[TaskKind.WEIGHT_GRADIENT][stage]
            load[device] += m * (seconds[TaskKind.FORWARD][stage] + min(seconds[TaskKind.BACKWARD][stage], halves))
            load[device] += recomputed * seconds[TaskKind.RECOMPUTE][stage]
        return max(load) + self._profile.measurement(m).step

    def _costs(self, choice: _Candidate, balance: Sequence[int]) -> StageCosts:
        return self._profile.costs(balance, choice.microbatches, choice.checkpoint)

    def _try(self, choice: _Candidate, balance: tuple[int, ...]) -> Plan:
        key = choice, balance
        if key not in self._plans:
            record = simulate(self._graph(choice, self._profile.wiring(balance)), self._costs(choice, balance))
            done = report(record)
            memory = self._profile.memory(balance, choice.microbatches, self._scale)
            self._plans[key] = Plan(
                choice.schedule,
                balance,
                choice.microbatches,
                choice.checkpoint,
                seconds=done.seconds + self._profile.measurement(choice.microbatches).step,
                memory=tuple(peak_memory(record, memory)),
                bubble=done.bubble_ratio,
            )
        return self._plans[key]

    def _graph(self, choice: _Candidate, wiring: Wiring) -> TaskGraph:
        if (choice, wiring) not in self._graphs:
            self._graphs[choice, wiring] = lower(
                self._schedules[choice.schedule],
                Shape(choice.stages, choice.microbatches, self._devices),
                checkpoint=choice.checkpoint,
                wiring=wiring,
            )
        return self._graphs[choice, wiring]

    # Moving borders

    def promising(self) -> list[_Candidate]:
        """The choices with the best plans so far."""
        best: dict[_Candidate, tuple[float, float]] = {}
        for (choice, _), each in self._plans.items():
            best[choice] = min(self._rank(each), best.get(choice, self._rank(each)))
        return nsmallest(REFINED, best, key=best.__getitem__)

    def refine(self, choice: _Candidate) -> None:
        """Move one border by one layer after the other, as long as that makes the choice's best plan better."""
        best = min((each for (of, _), each in self._plans.items() if of == choice), key=self._rank)
        for _ in range(MOST_MOVES):
            moved = min((self._try(choice, near) for near in _neighbours(best.balance)), key=self._rank, default=best)
            if self._rank(moved) >= self._rank(best):
                return
            best = moved

    def _rank(self, each: Plan) -> tuple[float, float]:
        """What fits comes first, then what is quicker."""
        return self._excess(each), each.seconds

    def _excess(self, each: Plan) -> float:
        return 0 if self._limit is None else max(0, max(each.memory) - self._limit)

    def ranked(self) -> list[Plan]:
        """All plans that fit, the fastest first; equals by memory."""
        fitting = [each for each in self._plans.values() if self._excess(each) == 0]
        if fitting:
            return sorted(fitting, key=lambda each: (each.seconds, max(each.memory)))
        if not self._plans:
            raise PlanError("none of the balances has as many stages as a schedule can serve here")
        least = min(self._plans.values(), key=lambda each: max(each.memory))
        raise PlanError(
            f"nothing fits into {self._limit:,} bytes a device; the smallest that was found needs "
            f"{max(least.memory):,}: {least}"
        )


def _even_balances(profile: Profile, stages: int, microbatches: int, checkpoint: CheckpointMode) -> list[list[int]]:
    """Even by time, and even by memory."""
    by_time = even_balance(profile.layer_seconds(microbatches, checkpoint), stages)
    by_memory = even_balance(profile.layer_bytes(microbatches), stages)
    return [by_time] if by_time == by_memory else [by_time, by_memory]


def _neighbours(balance: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The balances with one layer on the other side of one border."""
    for border in range(len(balance) - 1):
        for source, user in ((border, border + 1), (border + 1, border)):
            if balance[source] > 1:
                moved = list(balance)
                moved[source] -= 1
                moved[user] += 1
                yield tuple(moved)
