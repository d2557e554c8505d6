"""The costs of layers from steps of whole stages, and whether another split adds the same numbers."""

from __future__ import annotations

import pytest

from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task import Task
from asyncpipe.core.graph.task_graph import TaskGraph, Wiring
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.profile_from_journals import MeasuredStep
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.predict.split_anew import plan_anew, profile_of_stages, same_sums
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import BalanceError, PlanError

NEVER = CheckpointMode.NEVER
SECONDS = {TaskKind.FORWARD: 1.0, TaskKind.BACKWARD: 2.0, TaskKind.INPUT_GRADIENT: 1.0, TaskKind.WEIGHT_GRADIENT: 1.0}


def graph_of(schedule: str, devices: int, stages: int | None = None) -> TaskGraph:
    shape = Shape(stages or devices, 4, devices)
    return lower(find_schedule(schedule), shape, wiring=Wiring.chain(shape.stages))


def steps_of(schedule: str, *factors: float) -> list[MeasuredStep]:
    """One step on as many devices, whose stages take so many times as long."""

    def cost(task: Task) -> float:
        return SECONDS.get(task.kind, 0.0) * factors[task.stage]

    return [MeasuredStep(0.0, simulate(graph_of(schedule, len(factors)), cost))]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_stages_time_is_divided_among_its_layers_by_their_weights(schedule):
    profile = profile_of_stages(steps_of(schedule, 4.0, 1.0), [2, 1], [1.0, 3.0, 9.0])
    assert profile.layer_seconds(4) == pytest.approx([3.0, 9.0, 3.0])
    halves = [layer.input_gradient for layer in profile.measurement(4).layers]
    assert halves == pytest.approx([1.0, 3.0, 1.0])
    with pytest.raises(BalanceError, match="sums up to 3, but the model has 2 layers"):
        profile_of_stages(steps_of(schedule, 4.0, 1.0), [2, 1], [1.0, 3.0])


def test_the_balance_follows_from_what_steps_have_cost_and_not_from_weights():
    # The first two layers take as long as all others.
    steps, schedule = steps_of("1f1b", 8.0, 2.0, 2.0, 2.0), find_schedule("1f1b")
    weights = [1.0] * 8
    assert plan_anew(steps, [2, 2, 2, 2], weights, 2, schedule, NEVER).balance == (2, 6)
    assert plan_anew(steps, [2, 2, 2, 2], weights, 3, schedule, NEVER).balance == (1, 2, 5)
    with pytest.raises(PlanError, match="stages need as many layers"):
        plan_anew(steps, [1, 1, 1, 1], weights[:4], 5, schedule, NEVER)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_stages_add_alike_however_many_there_are(schedule):
    assert same_sums(graph_of(schedule, 4), graph_of(schedule, 3))


@pytest.mark.parametrize("other", ["gpipe", "zb-h1", "backward-first"])
def test_another_order_other_tasks_or_a_rule_may_add_otherwise(other):
    assert not same_sums(graph_of("1f1b", 4), graph_of(other, 4))
    rule = graph_of("backward-first", 4)
    assert not same_sums(rule, rule)
