"""The planner: simulates many pipelines of a model with measured costs, and ranks those that fit into memory.

A *candidate* is a number of replicas, and for each of them a schedule, a number of stages, a number of micro-batches
and a recomputation mode; a candidate with a balance is a *plan*. Every candidate is simulated with the balances that
are even by time and by memory. Then the best candidates move one layer at a time over a border between stages, for as
long as that helps::

    candidates ──▶ even by time, even by memory ──▶ the best few ──▶ neighbours ──▶ ranked plans
                   (a candidate is skipped if its busiest device alone
                    needs more time than the best few plans so far)

With ``offload``, a plan that does not fit offloads activations at the stages of the devices that lack memory, of as few
micro-batches as fit. So offload is held against recomputation, which other candidates have, by time.

Replicas share the devices evenly, one behind the other, and have one balance. Each updates its parameters in the step,
or with ``shards`` a part of them, and keeps the optimizer's state of that part alone.

On a topology, its hosts are first put into the order that crosses slow links least (``placement.py``); then the search
is the same, with layers by the speed of devices in the place of even ones, and messages on links.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from math import inf
from operator import truediv
from typing import Any, NamedTuple

from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task_graph import TaskGraph, Wiring
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.balance import balance_by_speed, check_balance, even_balance
from asyncpipe.core.predict.costs import StageCosts
from asyncpipe.core.predict.layer_profile import PARAMETER_SCALE, Profile
from asyncpipe.core.predict.memory import peak_memory
from asyncpipe.core.predict.placement import best_host_order
from asyncpipe.core.predict.report import Report, link_waits, reports, steady_state
from asyncpipe.core.predict.simulate import can_overlap, simulate_steps
from asyncpipe.core.predict.topology import Topology, TopologyCosts
from asyncpipe.core.schedules.protocol import RuledSchedule, Schedule, Shape
from asyncpipe.core.schedules.registry import find_schedule, known_schedules
from asyncpipe.errors import PlanError, ProfileError, ScheduleError

__all__ = ["Placing", "Plan", "best_of_each", "busiest_device", "plan"]

MOST_VIRTUAL = 4
"""The most stages on each device that are tried."""
REFINED = 10
"""How many candidates have their borders moved."""
MOST_MOVES = 8
"""How many times a border of one candidate is moved."""
OVERLAPPING = 3
"""How many steps are simulated where they overlap: from the end of the first on, they follow each other evenly."""


@dataclass(frozen=True, slots=True)
class Placing:
    """Where the stages of a plan are on a topology."""

    devices: tuple[str, ...]
    """In the order of the plan: ``host-a/cuda:0``."""
    stages: tuple[int, ...]
    """The index in ``devices`` of each stage."""
    waits: tuple[float, ...]
    """The share of the step in which each device stands still because what it waits for is on a link."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to run a model, with its predicted time and memory."""

    schedule: str
    balance: tuple[int, ...]
    """The number of layers of each stage."""
    microbatches: int
    """Of each replica."""
    checkpoint: CheckpointMode
    seconds: float
    """The time of one step; where steps overlap, from the end of one to the end of the next."""
    memory: tuple[int, ...]
    """The peak bytes of each device."""
    bubble: float
    """The idle share of the devices in that time."""
    placing: Placing | None = None
    """For a plan on a topology."""
    offload: tuple[float, ...] = ()
    """The fraction of the micro-batches that each stage offloads; empty if none does."""
    replicas: int = 1
    shards: bool = False
    """Whether replicas share the optimizer's state."""

    def __str__(self) -> str:
        layers = "-".join(map(str, self.balance))
        offload = f", offload {' '.join(f'{each:.0%}' for each in self.offload)}" if self.offload else ""
        rows = f"{self.replicas} replicas{' with shards' if self.shards else ''}, " if self.replicas > 1 else ""
        return (
            f"{rows}{self.schedule}, balance {layers}, {self.microbatches} micro-batches, checkpoint "
            f"{self.checkpoint.value}{offload}"
        )

    def options(self) -> dict[str, Any]:
        """The keyword arguments of ``Pipeline`` that choose this plan, with its devices if it is on a topology."""
        return {
            **({} if self.placing is None else {"devices": list(self.placing.devices)}),
            "schedule": self.schedule,
            "balance": list(self.balance),
            "microbatches": self.microbatches,
            "checkpoint": self.checkpoint.value,
            **({"offload": list(self.offload)} if self.offload else {}),
            **({"replicas": self.replicas, "shard_optimizer": self.shards} if self.replicas > 1 else {}),
        }


class _PlanCandidate(NamedTuple):
    schedule: str
    stages: int
    """Of each replica, as the micro-batches."""
    microbatches: int
    checkpoint: CheckpointMode
    replicas: int
    shards: bool

    @property
    def pieces(self) -> int:
        """Micro-batches of all replicas together."""
        return self.microbatches * self.replicas


def plan(
    profile: Profile,
    devices: int,
    *,
    schedules: Sequence[str] | Mapping[str, Schedule] | None = None,
    microbatches: Sequence[int] | None = None,
    checkpoints: Sequence[CheckpointMode | str] = tuple(CheckpointMode),
    balances: Callable[[int], Sequence[Sequence[int]]] | None = None,
    memory_limit: int | None = None,
    parameter_scale: float = PARAMETER_SCALE,
    ahead: int = 0,
    topology: Topology | None = None,
    offload: bool = False,
    replicas: Sequence[int] = (1,),
    shards: Sequence[bool] = (False,),
    progress: Callable[[str], None] | None = None,
) -> list[Plan]:
    """Every plan that was tried and fits into memory, the fastest first.

    ``devices`` is their number; with a ``topology`` all of its devices. ``schedules`` are names, or schedules by
    name, by default all known ones; each is tried with the shapes that it supports. ``microbatches``, those of all
    replicas together, must have been measured; by default all measured numbers are tried. ``balances`` gives the
    balances to try for a number of stages, in place of the even ones and their neighbours. ``memory_limit`` is in
    bytes for each device; ``parameter_scale`` is that of ``Profile.memory``. ``ahead`` is how many steps are
    submitted behind the one under way, as by ``Pipeline.steps``: plans are then ranked by how soon one step follows
    the other. ``topology`` puts the stages on hosts; the profile is that of devices of speed 1, and links take the
    place of the transfers that were measured. ``offload`` says whether plans above the limit may offload activations
    to the host. ``replicas`` are the numbers to try; those that do not divide the devices and the micro-batches are
    left out. ``shards`` says whether to try them with a sharded optimizer, without, or both. ``progress`` is called
    with a line about what is tried.

    Raises ``PlanError`` if no schedule supports a shape or nothing fits, ``ProfileError`` for a number of micro-batches
    that was not measured, and ``UnknownScheduleError``; ``PlanError`` also if a topology has another number of devices.
    """
    names = known_schedules() if schedules is None else schedules
    by_name = dict(names) if isinstance(names, Mapping) else {name: find_schedule(name) for name in names}
    modes = [CheckpointMode.parse(mode) for mode in checkpoints]
    if not profile.knows_selective:
        modes = [mode for mode in modes if mode is not CheckpointMode.SELECTIVE]
        if not modes:
            raise ProfileError("checkpoint='selective' was not measured; measure again, or give other modes")
    numbers = profile.measured if microbatches is None else list(microbatches)
    for number in numbers:
        profile.measurement(number)
    tell = progress or (lambda _: None)
    if topology is not None:
        if len(topology.devices) != devices:
            raise PlanError(f"the topology has {len(topology.devices)} devices, got {devices} to plan for")
        topology = best_host_order(topology, profile.message_size(numbers[0]))
    limit = inf if memory_limit is None else memory_limit
    search = _Search(profile, devices, by_name, parameter_scale, limit, ahead, topology, offload)
    rows = [(count, each) for count in replicas for each in (shards if count > 1 else [False])]
    candidates = [each for count, shard in rows for each in search.candidates(numbers, modes, count, shard)]
    if not candidates:
        raise PlanError(search.refusal())
    for number, each in enumerate(candidates, 1):
        tell(f"simulating {each.schedule}, {each.microbatches} micro-batches ({number} of {len(candidates)})")
        search.begin(each, search.balances(each) if balances is None else balances(each.stages))
    for each in search.promising() if balances is None else ():
        tell(f"moving the borders of {each.schedule}, {each.microbatches} micro-batches")
        search.refine(each)
    return search.ranked()


def best_of_each(plans: Sequence[Plan]) -> list[Plan]:
    """The first plan of each candidate, in the order given."""
    first: dict[_PlanCandidate, Plan] = {}
    for each in plans:
        shape = each.schedule, len(each.balance), each.microbatches, each.checkpoint
        first.setdefault(_PlanCandidate(*shape, each.replicas, each.shards), each)
    return list(first.values())


def busiest_device(
    costs: StageCosts, placement: Sequence[int], microbatches: int, recomputed: int, speeds: Sequence[float] = ()
) -> float:
    """The seconds that the busiest device computes: no step is shorter.

    Backwards are whole or split, whichever takes less; ``recomputed`` of the ``microbatches`` are recomputed.
    ``speeds`` are those of the devices, by default 1.
    """
    seconds = costs.seconds
    load = [0.0] * (max(placement) + 1)
    for stage, device in enumerate(placement):
        halves = seconds[TaskKind.INPUT_GRADIENT][stage] + seconds[TaskKind.WEIGHT_GRADIENT][stage]
        whole = seconds[TaskKind.BACKWARD][stage]
        load[device] += microbatches * (seconds[TaskKind.FORWARD][stage] + min(whole, halves))
        load[device] += recomputed * seconds[TaskKind.RECOMPUTE][stage]
    return max(map(truediv, load, speeds)) if speeds else max(load)


@dataclass(eq=False)
class _Search:
    """The plans tried so far, and the task graphs, which plans of a candidate share if their skips cross alike."""

    profile: Profile
    devices: int
    schedules: Mapping[str, Schedule]
    parameter_scale: float
    limit: float
    ahead: int
    topology: Topology | None
    offload: bool

    def __post_init__(self) -> None:
        self._graphs: dict[tuple[_PlanCandidate, Wiring, tuple[float, ...]], TaskGraph] = {}
        self._plans: dict[tuple[_PlanCandidate, tuple[int, ...]], Plan] = {}
        self._refusals: dict[str, str] = {}

    def candidates(
        self, numbers: Sequence[int], modes: Sequence[CheckpointMode], replicas: int, shards: bool
    ) -> Iterator[_PlanCandidate]:
        """Every candidate with so many replicas whose shape its schedule supports."""
        numbers = [number // replicas for number in numbers if number % replicas == 0]
        devices = 0 if self.devices % replicas or not numbers else self.devices // replicas
        for name, schedule in self.schedules.items():
            for virtual in sorted({schedule.virtual, *range(1, MOST_VIRTUAL + 1)}):
                stages, layers = devices * virtual, len(self.profile.layers)
                if not 0 < stages <= layers:
                    reason = f"{stages} stages need as many layers"
                    odd = f"{replicas} replicas must divide the devices and the micro-batches"
                    self._refusals.setdefault(name, reason if stages else odd)
                    continue
                for number in numbers:
                    try:
                        schedule.check(Shape(stages, number, devices))
                    except ScheduleError as error:
                        self._refusals.setdefault(name, str(error))
                    else:
                        yield from (_PlanCandidate(name, stages, number, mode, replicas, shards) for mode in modes)

    def refusal(self) -> str:
        """Why there is no candidate."""
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self._refusals.items())
        return f"no schedule serves {self.devices} devices and {len(self.profile.layers)} layers: {reasons}"

    def begin(self, candidate: _PlanCandidate, balances: Sequence[Sequence[int]]) -> None:
        """Try the candidate with these balances, except where it cannot be among the best."""
        fitting = [seconds for excess, seconds in self._best().values() if not excess]
        slowest_of_best = max(nsmallest(REFINED, fitting)) if len(fitting) >= REFINED else inf
        for balance in balances:
            if len(balance) == candidate.stages and self._bound(candidate, balance) < slowest_of_best:
                self._try(candidate, tuple(check_balance(balance, len(self.profile.layers))))

    def _bound(self, candidate: _PlanCandidate, balance: Sequence[int]) -> float:
        """Seconds that no step of this plan is shorter than."""
        m = candidate.microbatches
        placement = self._placement(candidate)
        recomputed = sum(candidate.checkpoint.recomputes(i, m) for i in range(m))
        costs = self._costs(candidate, balance)
        between = 0.0 if self.ahead else self.profile.measurement(candidate.pieces).step
        return busiest_device(costs, placement, m, recomputed, self._speeds(candidate)) + between

    def _costs(self, candidate: _PlanCandidate, balance: Sequence[int]) -> StageCosts:
        pieces, mode, at = candidate.pieces, candidate.checkpoint, self._placement(candidate)
        rows, shards = candidate.replicas, candidate.shards
        return self.profile.costs(balance, pieces, mode, at, replicas=rows, shards=shards)

    def _speeds(self, candidate: _PlanCandidate) -> list[float]:
        """Those of the devices of a replica, at each place that of the slowest; nothing without a topology."""
        speeds = [] if self.topology is None else list(self.topology.speeds.values())
        each = self.devices // candidate.replicas
        return [min(speeds[place::each]) for place in range(each)] if speeds else []

    def balances(self, candidate: _PlanCandidate) -> list[list[int]]:
        """The balances that are even by time and even by memory; one if they are the same."""
        stages, m = candidate.stages, candidate.pieces
        seconds = self.profile.layer_seconds(m, candidate.checkpoint)
        if speeds := self._speeds(candidate):
            placement = self._placement(candidate)
            by_time = balance_by_speed(seconds, [speeds[device] for device in placement])
        else:
            by_time = even_balance(seconds, stages)
        by_memory = even_balance(self.profile.layer_bytes(m), stages)
        return [by_time] if by_time == by_memory else [by_time, by_memory]

    def _placement(self, candidate: _PlanCandidate) -> Sequence[int]:
        shape = Shape(candidate.stages, candidate.microbatches, self.devices // candidate.replicas)
        return self.schedules[candidate.schedule].placement(shape)

    def _try(self, candidate: _PlanCandidate, balance: tuple[int, ...]) -> Plan:
        key = candidate, balance
        if key not in self._plans:
            plan = self._simulated(candidate, balance)
            can_offload = self.offload and candidate.checkpoint is not CheckpointMode.SELECTIVE
            if can_offload and max(plan.memory) > self.limit:
                plan = self._with_offload(candidate, plan) or plan
            self._plans[key] = plan
        return self._plans[key]

    def _with_offload(self, candidate: _PlanCandidate, plan: Plan) -> Plan | None:
        """``plan`` with as little offload as makes it fit, or ``None`` if it cannot.

        On each device that lacks memory, all stages offload the same number of micro-batches: the least that fits, by
        bisection on all devices at a time.
        """
        schedule, m = self.schedules[candidate.schedule], candidate.microbatches
        if isinstance(schedule, RuledSchedule):
            return None
        least, most = [0] * self.devices, [m if held > self.limit else 0 for held in plan.memory]
        placement = self._placement(candidate)

        def tried(counts: Sequence[int]) -> Plan:
            return self._simulated(candidate, plan.balance, tuple(counts[device] / m for device in placement))

        best = tried(most)
        if max(best.memory) > self.limit:
            return None
        while any(few < many - 1 for few, many in zip(least, most, strict=True)):
            counts = [(few + many) // 2 for few, many in zip(least, most, strict=True)]
            offloaded = tried(counts)
            for device, held in enumerate(offloaded.memory):
                if counts[device] > least[device]:
                    (least if held > self.limit else most)[device] = counts[device]
            best = offloaded if max(offloaded.memory) <= self.limit else best
        last = tried(most)
        return last if max(last.memory) <= self.limit else best

    def _simulated(self, candidate: _PlanCandidate, balance: tuple[int, ...], offload: tuple[float, ...] = ()) -> Plan:
        graph = self._graph(candidate, balance, offload)
        overlap = self.ahead > 0 and can_overlap(graph)
        costs, steps = self._costs(candidate, balance), OVERLAPPING if overlap else 1
        placed = costs if self.topology is None else TopologyCosts(costs, self.topology)
        records = simulate_steps(graph, placed, steps=steps, ahead=self.ahead)
        measured = reports(records)
        # What a step does outside its tasks is done while another step computes.
        pace = steady_state(measured) if overlap else None
        scale, at = self.parameter_scale, self._placement(candidate)
        if candidate.shards:
            scale = min(scale, PARAMETER_SCALE) + max(0.0, scale - PARAMETER_SCALE) / candidate.replicas
        memory = self.profile.memory(balance, candidate.pieces, scale, at, candidate.checkpoint)
        return Plan(
            *(candidate.schedule, balance, candidate.microbatches, candidate.checkpoint),
            seconds=pace.seconds if pace else measured[0].seconds + self.profile.measurement(candidate.pieces).step,
            # Each device runs one step after the other, so it holds no more than in a single one.
            memory=tuple(peak_memory(records[0], memory)),
            bubble=(pace or measured[0]).bubble_ratio,
            placing=self._placing(graph, measured[-2:], (pace or measured[0]).seconds),
            offload=offload,
            replicas=candidate.replicas,
            shards=candidate.shards,
        )

    def _placing(self, graph: TaskGraph, last: Sequence[Report], seconds: float) -> Placing | None:
        """The places of stages, and the shares of waits for links in the last of two steps, or in the only one."""
        if self.topology is None:
            return None
        waits = link_waits(last[-1], graph, last[0] if len(last) > 1 else None).values()
        return Placing(graph.devices, graph.placement, tuple(wait / seconds if seconds else 0.0 for wait in waits))

    def _graph(self, candidate: _PlanCandidate, balance: tuple[int, ...], offload: tuple[float, ...] = ()) -> TaskGraph:
        rows, wiring = candidate.replicas, self.profile.wiring(balance, self._placement(candidate))
        if rows > 1:
            buckets = [*map(len, self.profile.buckets(balance))]
            wiring = wiring.in_rows(rows, buckets, shards=candidate.shards)
        key = candidate, wiring, offload
        if key not in self._graphs:
            self._graphs[key] = lower(
                self.schedules[candidate.schedule],
                Shape(candidate.stages * rows, candidate.pieces, self.devices),
                devices=None if self.topology is None else self.topology.devices,
                checkpoint=candidate.checkpoint,
                wiring=wiring,
                offload=offload * rows,
            )
        return self._graphs[key]

    def _best(self) -> dict[_PlanCandidate, tuple[float, float]]:
        """The rank of each candidate's best plan."""
        best: dict[_PlanCandidate, tuple[float, float]] = {}
        for (candidate, _), each in self._plans.items():
            best[candidate] = min(self._rank(each), best.get(candidate, (inf, inf)))
        return best

    def promising(self) -> list[_PlanCandidate]:
        """The candidates with the best plans so far."""
        best = self._best()
        return nsmallest(REFINED, best, key=best.__getitem__)

    def refine(self, candidate: _PlanCandidate) -> None:
        """Move one layer over a border of the candidate's best plan, again and again while the plan gets better."""
        best = min((each for (of, _), each in self._plans.items() if of == candidate), key=self._rank)
        for _ in range(MOST_MOVES):
            near = [self._try(candidate, balance) for balance in _neighbours(best.balance)]
            moved = min(near, key=self._rank, default=best)
            if self._rank(moved) >= self._rank(best):
                return
            best = moved

    def _rank(self, each: Plan) -> tuple[float, float]:
        """The bytes above the limit, then the seconds: a plan that fits ranks before one that does not."""
        return max(0, max(each.memory) - self.limit), each.seconds

    def ranked(self) -> list[Plan]:
        """All plans that fit, the fastest first; equals by memory."""
        fitting = [each for each in self._plans.values() if max(each.memory) <= self.limit]
        if fitting:
            return sorted(fitting, key=lambda each: (each.seconds, max(each.memory)))
        if not self._plans:
            raise PlanError("none of the balances has as many stages as a schedule can serve here")
        least = min(self._plans.values(), key=lambda each: max(each.memory))
        raise PlanError(
            f"nothing fits into {self.limit:,} bytes a device; the smallest that was found needs "
            f"{max(least.memory):,}: {least}"
        )


def _neighbours(balance: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The balances that move one layer over one border."""
    for border in range(1, len(balance)):
        before, first, second, after = balance[: border - 1], *balance[border - 1 : border + 1], balance[border + 1 :]
        if first > 1:
            yield (*before, first - 1, second + 1, *after)
        if second > 1:
            yield (*before, first + 1, second - 1, *after)
