"""Profiles: costs of stages from those of layers, files, and costs of layers from journals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import chain

from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task_graph import Wiring
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.costs import StageCosts
from asyncpipe.core.predict.layer_profile import (
    ADAMW_SCALE,
    CALLER,
    LayerCosts,
    Measurement,
    Profile,
    ProfiledLayer,
    SentTensor,
    TiedTensor,
)
from asyncpipe.core.predict.profile_from_journals import (
    MeasuredStep,
    StepVariant,
    combine,
    layer_seconds,
    task_seconds,
)
from asyncpipe.core.predict.report import report
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.schedules.protocol import Action, B, F, I, OrderedSchedule, Shape, W
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import BalanceError, ProfileError

OVERHEAD = {"F": 0.5, "R": 0.25, "B": 1.0, "I": 0.75, "W": 0.125}


def layer(seconds: float, saved: int = 0) -> LayerCosts:
    """All its times are different multiples of ``seconds``."""
    times = (seconds, 0.5 * seconds, 1.5 * seconds, 4 * seconds, 3 * seconds, 2 * seconds)
    return LayerCosts(*times, saved)


# Linear, Tanh (saves its output), Linear with a loss behind it (saves 3 more).
LAYERS = (
    layer(1.0),
    layer(2.0, saved=20),
    layer(4.0, saved=3),
)
SENT = chain(10, 20, 20, 0, saved_by={0: (0,), 2: (1, 2)})
PROFILE = Profile(
    layers=(ProfiledLayer("a", 100, 100), ProfiledLayer("b", 0, 0), ProfiledLayer("c", 60, 40)),
    links=((0, 1), (1, 2)),
    measurements={4: Measurement(LAYERS, OVERHEAD, step=0.5, latency=0.25, bandwidth=80.0, sent=SENT)},
    devices=("cpu:0", "cpu:1"),
)


# Stages


def test_a_stage_takes_the_sum_of_its_layers_and_one_overhead():
    costs = PROFILE.costs([2, 1], 4)
    assert costs.seconds == {
        TaskKind.FORWARD: (3.5, 4.5),
        TaskKind.RECOMPUTE: (4.75, 6.25),
        TaskKind.BACKWARD: (13.0, 17.0),
        TaskKind.INPUT_GRADIENT: (9.75, 12.75),
        TaskKind.WEIGHT_GRADIENT: (6.125, 8.125),
    }
    assert (tuple(costs.sent), costs.latency, costs.bandwidth) == ((20,), 0.25, 80.0)


def test_a_stage_whose_input_gets_no_gradient_does_all_with_its_weights():
    first = replace(PROFILE, layers=(replace(PROFILE.layers[0], inner=False), *PROFILE.layers[1:]))
    costs = first.costs([2, 1], 4)
    assert costs.seconds[TaskKind.INPUT_GRADIENT] == (0.75, 12.75)
    assert costs.seconds[TaskKind.WEIGHT_GRADIENT] == (9.0 + 6.0 + 0.125, 8.125)


@pytest.mark.parametrize("mode", ["except_last", "always"])
def test_a_forward_that_is_recomputed_costs_what_one_without_a_graph_does(mode):
    costs = PROFILE.costs([2, 1], 4, CheckpointMode(mode))
    assert costs.seconds[TaskKind.FORWARD] == (2.0, 2.5)


def test_a_stage_keeps_its_borders_and_what_its_layers_save_once():
    # The second layer has saved what the third one's input is.
    whole = PROFILE.memory([3], 4)
    assert (whole.saved, whole.inputs) == ((10 + 20 + 3,), (10,))
    # Apart, both keep the border: one as its output, one as its input.
    parts = PROFILE.memory([2, 1], 4)
    assert (parts.saved, parts.inputs) == ((10 + 20, 20 + 3), (10, 20))
    # The output of the first is saved by nobody else, but waits for the backward.
    assert PROFILE.memory([1, 2], 4).saved == (10 + 20, 20 + 20 + 3)


def test_trained_parameters_count_with_gradient_and_state_and_frozen_ones_once():
    assert PROFILE.memory([2, 1], 4).fixed == (200, 100)
    assert PROFILE.memory([2, 1], 4, parameter_scale=4.0).fixed == (400, 180)


# Skips and ties

CARRIED = (
    # The caller's ids go to the first layer, its mask to all; the first makes a bias that the others keep.
    SentTensor(CALLER, (0,), 8, (0,), 0),
    SentTensor(CALLER, (0, 1, 2), 4, (1, 2), 1),
    SentTensor(0, (1, 2), 16, (1, 2), 2),
    SentTensor(0, (1,), 32, (0, 1), 3),
    SentTensor(1, (2,), 32, (2,), 4),
    # Passed on as it came.
    SentTensor(1, (2,), 16, (2,), 2),
    SentTensor(2, (CALLER,), 64, (), 5),
)
SKIPPING = Profile(
    layers=(ProfiledLayer("a", 100, 100), ProfiledLayer("b", 0, 0), ProfiledLayer("c", 140, 140)),
    links=((0, 1), (0, 2), (1, 2)),
    measurements={
        4: Measurement(
            (layer(1.0, saved=32), layer(1.0, saved=5), layer(1.0)),
            OVERHEAD,
            step=0.0,
            latency=0.5,
            bandwidth=8.0,
            sent=CARRIED,
            adding=50.0,
        )
    },
    ties=(TiedTensor((0, 2), 100, trained=True),),
)


def test_a_value_that_several_layers_use_is_sent_once_to_each_of_their_stages():
    costs = SKIPPING.costs([1, 1, 1], 4)
    assert (costs.sent, costs.skips) == ((48, 48), {(0, 2): 16})
    # Both ways into the last stage are one link now.
    assert SKIPPING.costs([2, 1], 4).sent == (16 + 48,)
    assert SKIPPING.costs([2, 1], 4).skips == {}
    assert SKIPPING.costs([1, 2], 4).sent == (48,)
    graph = lower(find_schedule("1f1b"), Shape(3, 1, 3), wiring=SKIPPING.wiring([1, 1, 1]))
    seconds = {task.id: costs(task) for task in graph.tasks}
    assert (seconds["C(0,0>2)"], seconds["C(0,2>0)"], seconds["C(0,1>2)"]) == (2.5, 2.5, 6.5)
    # The tied weight comes, and goes back as a gradient, which is added to its owner's.
    assert (seconds["C(0>2)"], seconds["C(2>0)"], seconds["S(0)"]) == (13.0, 13.0, 2.0)


def test_memory_is_counted_once_where_a_value_is_passed_on_or_kept_by_several():
    apart = SKIPPING.memory([1, 1, 1], 4)
    # Its inputs, what it saves, and what it sends: the bias.
    assert apart.saved[0] == 8 + 4 + 32 + 16
    assert apart.inputs == (12, 4 + 16 + 32, 4 + 16 + 32)
    assert apart.saved[1] == 4 + 16 + 32 + 5 + 32
    assert apart.saved[2] == 4 + 16 + 32 + 64
    assert SKIPPING.memory([3], 4).saved == (8 + 4 + 32 + 5 + 16 + 32 + 64,)
    assert SKIPPING.layer_bytes(4)[1] == apart.saved[1]


@pytest.mark.parametrize(
    ("balance", "placement", "fixed", "ties"),
    [
        # A replica has a gradient, and no state of an optimizer.
        ([1, 2], None, (400, 200 + 160), ((0, 1),)),
        ([1, 1, 1], (0, 1, 0), (400, 0, 160), ()),
        ([3], None, (400 + 160,), ()),
    ],
)
def test_a_tied_parameter_is_owned_once_and_has_a_replica_on_another_device(balance, placement, fixed, ties):
    assert SKIPPING.memory(balance, 4, ADAMW_SCALE, placement).fixed == fixed
    assert SKIPPING.wiring(balance, placement).ties == ties
    assert SKIPPING.costs(balance, 4, placement=placement).tied == dict.fromkeys(ties, 100)


def test_what_was_not_measured_is_an_error_that_lists_what_was():
    twice = replace(PROFILE, measurements={8: PROFILE.measurements[4], 4: PROFILE.measurements[4]})
    for ask in (twice.costs, twice.memory):
        with pytest.raises(ProfileError, match="6 micro-batches were not measured; the profile knows 4, 8;"):
            ask([2, 1], 6)
    with pytest.raises(BalanceError, match="sums up to 4, but the model has 3 layers"):
        PROFILE.costs([2, 2], 4)


# From journals


class AllAtOnce(OrderedSchedule):
    """Forwards, then backwards, for any number of stages a device."""

    def __init__(self, split: bool) -> None:
        self.split = split

    def check(self, shape: Shape) -> None:
        pass

    def order(self, device: int, shape: Shape) -> Iterator[Action]:
        mine = range(device, shape.stages, shape.devices)
        yield from (F(i, j) for j in mine for i in range(shape.microbatches))
        for j in reversed(mine):
            for i in range(shape.microbatches):
                yield from (I(i, j), W(i, j)) if self.split else (B(i, j),)


def steps_of(costs: StageCosts, stages: int, devices: int = 2, m: int = 5) -> dict[StepVariant, list[MeasuredStep]]:
    """What steps of each variant are like if tasks take exactly ``costs``; a step takes 0.5 s beside its tasks."""

    def step(variant: StepVariant) -> MeasuredStep:
        modes = {StepVariant.RECOMPUTED: CheckpointMode.ALWAYS, StepVariant.SELECTIVE: CheckpointMode.SELECTIVE}
        mode = modes.get(variant, CheckpointMode.NEVER)
        schedule = AllAtOnce(split=variant is StepVariant.SPLIT)
        record = simulate(lower(schedule, Shape(stages, m, devices), checkpoint=mode), costs)
        return MeasuredStep(report(record).seconds + 0.5, record)

    return {variant: [step(variant)] for variant in StepVariant}


SECONDS = st.floats(0.01, 10.0)


@settings(max_examples=20)
@given(st.lists(st.tuples(*[SECONDS] * 5), min_size=4, max_size=7), st.tuples(*[st.floats(0.0, 5.0)] * 4), SECONDS)
def test_layers_and_overheads_are_found_again_in_the_steps_they_make(times, overheads, latency):
    """What steps of known costs give is a profile whose stages cost what those of the steps did."""
    kinds = (TaskKind.FORWARD, TaskKind.RECOMPUTE, TaskKind.BACKWARD, TaskKind.INPUT_GRADIENT, TaskKind.WEIGHT_GRADIENT)
    saved = [8] * len(times)

    def costs(balance: list[int]) -> StageCosts:
        ends = [sum(balance[: k + 1]) for k in range(len(balance))]
        rows = {
            kind: [o + sum(t[k] for t in times[end - size : end]) for end, size in zip(ends, balance, strict=True)]
            for k, (kind, o) in enumerate(zip(kinds, (*overheads, overheads[-1]), strict=True))
        }
        return StageCosts(rows, [8] * (len(balance) - 1), latency=latency)

    coarse_balance = [len(times) - 2, 2]
    fine, coarse = steps_of(costs([1] * len(times)), len(times)), steps_of(costs(coarse_balance), 2)
    found = combine(fine, coarse, saved, saved, instant=True, sent=(), products=[3] * len(times))
    layers = tuple(ProfiledLayer(str(k), 0, 0) for k in range(len(times)))
    profile = Profile(layers, (), {5: found})
    for balance in (coarse_balance, [1] * len(times), [2, len(times) - 2]):
        predicted, wanted = profile.costs(balance, 5), costs(balance)
        for kind in kinds:
            assert predicted.seconds[kind] == pytest.approx(wanted.seconds[kind], rel=1e-6), kind
        chosen = profile.costs(balance, 5, CheckpointMode.SELECTIVE).seconds[TaskKind.RECOMPUTE]
        assert chosen == pytest.approx(wanted.seconds[TaskKind.RECOMPUTE], rel=1e-6)
        assert profile.memory(balance, 5, checkpoint=CheckpointMode.SELECTIVE).inputs == tuple(3 * s for s in balance)
    assert found.step == pytest.approx(0.5)
    assert found.latency == pytest.approx(latency, rel=1e-6)
    assert found.bandwidth == inf


def test_what_replicas_and_updates_cost_is_found_again_in_their_steps():
    rows = {kind: [1.0 + stage, 2.0] for stage, kind in enumerate((TaskKind.FORWARD, TaskKind.BACKWARD))}
    rows |= {TaskKind.REDUCE: [3.0, 4.0], TaskKind.GATHER: [0.5, 0.25], TaskKind.UPDATE: [5.0, 6.0]}
    wiring = Wiring.chain(2).in_rows(2, [2, 1])
    costs = StageCosts(rows, [0])
    graph = lower(AllAtOnce(split=False), Shape(4, 6, 4), wiring=wiring)
    # Tasks of one replica take half as long again as the mean, those of the other half of it.
    record = simulate(graph, lambda task: costs(task) * (1.5 if task.stage < 2 else 0.5))
    step = MeasuredStep(report(record).seconds, record)
    means = task_seconds([step])
    found = StageCosts({kind: [means[kind, stage] for stage in range(2)] for kind in rows}, [0])
    assert {kind: found.seconds[kind] for kind in rows} == {kind: pytest.approx(row) for kind, row in rows.items()}
    assert layer_seconds(step) == pytest.approx([3.0, 4.0])
    single = simulate(lower(AllAtOnce(split=False), Shape(2, 3, 2), wiring=Wiring(((0, 1),), (), (0, 1))), found)
    kept = simulate(lower(AllAtOnce(split=False), Shape(2, 3, 2)), found)
    steps = {name: [MeasuredStep(9.0, each)] for name, each in zip(("kept", "updated"), (kept, single), strict=True)}
    variants = {StepVariant(name): each for name, each in steps.items()}
    measured = combine(variants, variants, [0, 0], [0, 0], instant=True, sent=(), updated=44)
    assert measured.updating == pytest.approx(44 / 11)
    layers = tuple(ProfiledLayer(str(k), 8 * k, 8 * k) for k in range(2))
    profile = Profile(layers, ((0, 1),), {3: replace(measured, reducing=2.0)})
    assert profile.wiring([1, 1]) == Wiring(((0, 1),), (), (0, 1))
    assert profile.buckets([1, 1]) == [[], [8]]
    shared = profile.costs([1, 1], 3, replicas=2, shards=True)
    assert (shared.update, shared.buckets, shared.rows, shared.reducing) == ((0.0, 1.0), [[], [8]], 2, 2.0)


def test_bandwidth_follows_from_copies_between_devices_that_copy():
    seconds = {TaskKind.FORWARD: [1.0, 1.0], TaskKind.BACKWARD: [1.0, 1.0]}
    record = simulate(lower(AllAtOnce(split=False), Shape(2, 3, 2)), StageCosts(seconds, [64], bandwidth=128.0))
    steps = {StepVariant.KEPT: [MeasuredStep(report(record).seconds, record)]}
    found = combine(steps, steps, [0, 0], [0, 0], instant=False, sent=chain(0, 64, 64))
    assert found.bandwidth == pytest.approx(128.0)
    assert found.latency == pytest.approx(0.0, abs=1e-9)
