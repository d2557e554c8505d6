"""A model that trains is split anew over other devices, with the costs that its own steps have had.

Only whole stages are measured then. What a stage took is divided among its layers by their weights, which is how many
parameters they have::

    journals of steps on 4 devices ──▶ seconds of each stage ──▶ of each layer ──▶ planner: the balance on 3 devices

A split may change which numbers are added first, and then the bits differ. ``same_sums`` says whether it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.task import WHOLE_STEP
from asyncpipe.core.graph.task_graph import TaskGraph, Wiring
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.balance import check_balance
from asyncpipe.core.predict.layer_profile import LayerCosts, Measurement, Profile, ProfiledLayer
from asyncpipe.core.predict.planner import Plan, plan
from asyncpipe.core.predict.profile_from_journals import MeasuredStep, task_seconds
from asyncpipe.core.schedules.protocol import Schedule

__all__ = ["plan_anew", "profile_of_stages", "same_sums"]

_F, _R, _B = TaskKind.FORWARD, TaskKind.RECOMPUTE, TaskKind.BACKWARD
_I, _W = TaskKind.INPUT_GRADIENT, TaskKind.WEIGHT_GRADIENT
_ADDING = (_B, _W)
"""Kinds of tasks that add to the gradients of parameters."""


def profile_of_stages(steps: Sequence[MeasuredStep], balance: Sequence[int], weights: Sequence[float]) -> Profile:
    """The costs of the layers of a chain of stages, of which ``steps`` (at least one) are measured.

    ``balance`` is how many layers each of their stages has. ``weights``, one a layer, are in any unit. No bytes are
    known. Raises ``BalanceError`` unless the layers are as many.
    """
    graph = steps[-1].record.graph
    sizes = check_balance(balance, len(weights))
    seconds = task_seconds(steps)
    costs: list[LayerCosts] = []
    for stage, size in enumerate(sizes):
        mine = weights[len(costs) : len(costs) + size]

        def took(kind: TaskKind, stage: int = stage) -> float:
            return seconds.get((kind, stage), 0.0)

        forward, halves = took(_F), took(_I) + took(_W)
        backward = took(_B) or halves
        first, second = (took(_I), took(_W)) if halves else (backward / 2, backward / 2)
        total = sum(mine) or 1.0
        costs += [
            LayerCosts(
                forward=forward * weight / total,
                light_forward=forward * weight / total,
                recompute=(took(_R) or forward) * weight / total,
                backward=backward * weight / total,
                input_gradient=first * weight / total,
                weight_gradient=second * weight / total,
                saved=0,
            )
            for weight in mine
        ]
    layers = tuple(ProfiledLayer(f"layer {number}", 0, 0) for number in range(len(weights)))
    measured = Measurement(tuple(costs), overhead={}, step=0.0, latency=0.0, bandwidth=inf)
    return Profile(layers, Wiring.chain(len(layers)).links, {graph.shape.microbatches: measured}, graph.devices)


def plan_anew(
    steps: Sequence[MeasuredStep],
    balance: Sequence[int],
    weights: Sequence[float],
    devices: int,
    schedule: Schedule,
    checkpoint: CheckpointMode,
) -> Plan:
    """The fastest balance on so many ``devices``, by prediction from ``steps`` that overlap; see ``profile_of_stages``.

    Raises ``PlanError`` if the schedule cannot serve them.
    """
    profile = profile_of_stages(steps, balance, weights)
    return plan(profile, devices, schedules={schedule.name: schedule}, checkpoints=[checkpoint], ahead=1)[0]


def same_sums(before: TaskGraph, after: TaskGraph) -> bool:
    """Whether the gradients of every layer are added up alike, wherever a stage begins and ends.

    So they are if each stage of either graph takes its micro-batches in one and the same order, in tasks of the same
    kind. A graph whose rule decides as it goes has no order.
    """
    if before.rule is not None or after.rule is not None:
        return False
    return len(_orders(before) | _orders(after)) == 1


def _orders(graph: TaskGraph) -> set[tuple[tuple[TaskKind, int], ...]]:
    orders: list[list[tuple[TaskKind, int]]] = [[] for _ in range(graph.shape.stages)]
    for task in graph.tasks:
        if task.kind in _ADDING and task.microbatch != WHOLE_STEP:
            orders[task.stage].append((task.kind, task.microbatch))
    return set(map(tuple, orders))
