"""The planner: known optima, memory limits, figures of a direct simulation; the order of hosts, plans on a topology."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise, permutations
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import chain

from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.predict import planner
from asyncpipe.core.predict.layer_profile import LayerCosts, Measurement, Profile, ProfiledLayer, SelectiveCosts
from asyncpipe.core.predict.memory import peak_memory
from asyncpipe.core.predict.placement import MOST_EXACT, best_host_order
from asyncpipe.core.predict.planner import Plan, plan
from asyncpipe.core.predict.report import report
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.predict.topology import Host, NetworkLink, Topology
from asyncpipe.core.schedules.gpipe import GPipeSchedule
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import PlanError, ProfileError, ScheduleError, UnknownScheduleError

SIZE = 1000


def profile_of(
    times: list[float], *, measured: tuple[int, ...] = (4,), sizes: list[int] | None = None, overhead: float = 0.125
) -> Profile:
    """Layers whose forward takes ``times``, a backward twice that; each keeps its size, and sends ``SIZE`` on."""
    sizes = sizes or [SIZE] * len(times)
    layers = tuple(LayerCosts(t, t, t, 2 * t, t, t, size) for t, size in zip(times, sizes, strict=True))
    sent = chain(*[SIZE] * (len(times) + 1))
    return Profile(
        layers=tuple(ProfiledLayer(f"layer {k}", 0, 0) for k in range(len(times))),
        links=tuple((k, k + 1) for k in range(len(times) - 1)),
        measurements={
            m: Measurement(layers, dict.fromkeys("FRBIW", overhead), step=0.5, latency=0.0, bandwidth=inf, sent=sent)
            for m in measured
        },
    )


def direct(profile: Profile, devices: int, found: Plan) -> Plan:
    """The same plan, from a simulation of its own."""
    graph = lower(
        find_schedule(found.schedule),
        Shape(len(found.balance), found.microbatches, devices),
        checkpoint=found.checkpoint,
        wiring=profile.wiring(found.balance),
    )
    record = simulate(graph, profile.costs(found.balance, found.microbatches, found.checkpoint))
    done = report(record)
    return Plan(
        *(found.schedule, found.balance, found.microbatches, found.checkpoint),
        seconds=done.seconds + profile.measurement(found.microbatches).step,
        memory=tuple(peak_memory(record, profile.memory(found.balance, found.microbatches))),
        bubble=done.bubble_ratio,
    )


def all_balances(layers: int, stages: int) -> list[tuple[int, ...]]:
    borders = ((0, *inner, layers) for inner in combinations(range(1, layers), stages - 1))
    return [tuple(b - a for a, b in pairwise(ends)) for ends in borders]


def never(profile: Profile, devices: int, **options: object) -> list[Plan]:
    return plan(profile, devices, checkpoints=["never"], **options)  # type: ignore[arg-type]


class TwoADevice(GPipeSchedule):
    """Serves nothing but two stages a device."""

    virtual = 2

    def check(self, shape: Shape) -> None:
        if shape.stages != 2 * shape.devices:
            raise ScheduleError("two, please")


# Steps that overlap


def test_where_steps_overlap_the_time_from_one_to_the_next_ranks() -> None:
    profile = profile_of([1.0] * 4, measured=(8,))
    one_by_one = {found.schedule: found for found in never(profile, 4, schedules=["zb-h1", "zb-h2", "backward-first"])}
    overlapping = {
        found.schedule: found for found in never(profile, 4, schedules=["zb-h1", "zb-h2", "backward-first"], ahead=1)
    }
    assert next(iter(overlapping)) == "zb-h2"
    work = 8 * (3 + 3 * 0.125)
    assert overlapping["zb-h2"].seconds == pytest.approx(work)
    assert overlapping["zb-h2"].bubble == pytest.approx(0.0)
    # The 0.5 s that a step takes outside its tasks pass while another computes; but steps of a rule do not overlap.
    assert overlapping["zb-h1"].seconds == pytest.approx(one_by_one["zb-h1"].seconds - 0.5)
    assert overlapping["backward-first"] == one_by_one["backward-first"]
    assert one_by_one["zb-h2"].seconds == pytest.approx(one_by_one["zb-h1"].seconds)
    assert overlapping["zb-h2"].memory == one_by_one["zb-h2"].memory


# The best


@pytest.mark.parametrize("times", [[3.0, 1.0, 2.0, 5.0, 1.0, 4.0, 1.0], [1.0, 9.0, 1.0, 1.0, 1.0, 1.0, 6.0]])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_no_balance_is_better_than_the_chosen_one(times, schedule):
    profile = profile_of(times)
    every = never(profile, 3, schedules=[schedule], balances=lambda stages: all_balances(len(times), stages))
    best = min(each.seconds for each in every)
    assert never(profile, 3, schedules=[schedule])[0].seconds == pytest.approx(best)


def test_a_plan_says_how_to_have_it():
    best = never(profile_of([1.0, 1.0]), 2, schedules=["gpipe"])[0]
    assert best.options() == {"schedule": "gpipe", "balance": [1, 1], "microbatches": 4, "checkpoint": "never"}
    assert str(best) == "gpipe, balance 1-1, 4 micro-batches, checkpoint never"


# Replicas


def heavy(**measured: object) -> Profile:
    """Four layers with 4 bytes of parameters each."""
    bare = profile_of([1.0] * 4, measured=(8,), overhead=0.0)
    layers = tuple(replace(layer, parameters=4, trained=4) for layer in bare.layers)
    return replace(bare, layers=layers, measurements={8: replace(bare.measurements[8], **measured)})


def test_replicas_share_devices_and_micro_batches() -> None:
    profile, schedules = heavy(reducing=16.0, updating=2.0), ["1f1b"]
    plans = never(profile, 4, schedules=schedules, replicas=[1, 2, 3, 4])
    found = {each.replicas: each for each in reversed(plans)}
    assert {rows: (each.balance, each.microbatches) for rows, each in found.items()} == {
        1: ((1, 1, 1, 1), 8),
        2: ((2, 2), 4),
        4: ((4,), 2),
    }
    # The work, then A and G for 1 s each, or half of it, and the update of what a stage has.
    assert found[4].seconds == pytest.approx(2 * 12 + 2 + 8 + 0.5)
    assert found[2].seconds == pytest.approx(5 * 6 + 1 + 4 + 0.5)
    assert found[1].seconds == pytest.approx(11 * 3 + 2 + 0.5)
    chosen = found[2].options()
    assert (chosen["balance"], chosen["microbatches"]) == ([2, 2], 4)
    assert (chosen["replicas"], chosen["shard_optimizer"]) == (2, False)
    assert str(found[2]) == "2 replicas, 1f1b, balance 2-2, 4 micro-batches, checkpoint never"
    with pytest.raises(PlanError, match="3 replicas must divide the devices and the micro-batches"):
        never(profile, 4, replicas=[3])


def test_shards_save_what_optimizers_keep_and_do() -> None:
    profile = heavy(reducing=16.0, updating=2.0)
    options = {"schedules": ["gpipe"], "replicas": [4], "shards": [True, False], "parameter_scale": 4.0}
    shared, whole = sorted(never(profile, 4, **options), key=lambda each: not each.shards)
    assert whole.seconds - shared.seconds == pytest.approx(8 * 3 / 4)
    assert [a - b for a, b in zip(whole.memory, shared.memory, strict=True)] == [16 * 2 * 3 // 4] * 4
    assert shared.options()["shard_optimizer"]
    assert never(profile, 4, memory_limit=max(shared.memory), **options) == [shared]
    assert str(shared).startswith("4 replicas with shards, gpipe")


def test_what_replicas_cost_depends_on_their_links() -> None:
    """Over a slow link four stages are faster than four replicas; each of these gets a quarter from each other one."""

    def best(bandwidth: float) -> Plan:
        topology = hosts_with(dict.fromkeys(permutations(range(4), 2), 0.0), 4)
        topology = replace(topology, link=NetworkLink(0.0, bandwidth), links={})
        return never(heavy(), 4, schedules=["1f1b"], replicas=[1, 4], topology=topology)[0]

    assert best(inf).replicas == 4
    assert best(inf).seconds == pytest.approx(2 * 12 + 0.5)
    assert best(10.0).replicas == 4, "parameters have few bytes, activations many"
    assert best(10.0).seconds == pytest.approx(2 * 12 + 0.5 + 2 * 4 / 10)


# Memory


def test_what_does_not_fit_is_left_out():
    profile = profile_of([1.0] * 4, measured=(8,))
    free = plan(profile, 2, schedules=["gpipe", "1f1b"])
    limit = max(free[0].memory) - 1
    plans = plan(profile, 2, schedules=["gpipe", "1f1b"], memory_limit=limit)
    assert plans
    assert all(max(each.memory) <= limit for each in plans)
    # Without a limit, the same plans come in the same order, and one that does not fit is the first.
    assert next(each for each in free if max(each.memory) <= limit).seconds == plans[0].seconds


def test_nothing_fits_says_the_smallest_that_was_found():
    profile = profile_of([1.0] * 4)
    everything = plan(profile, 2, schedules=["gpipe", "1f1b"])
    with pytest.raises(
        PlanError, match="nothing fits into 10 bytes a device; the smallest that was found needs"
    ) as caught:
        plan(profile, 2, schedules=["gpipe", "1f1b"], memory_limit=10)
    said = int(str(caught.value).split("needs ")[1].split(":")[0].replace(",", ""))
    assert said <= min(max(each.memory) for each in everything)


# What can be tried


def test_schedules_that_cannot_serve_a_shape_are_left_out():
    profile = profile_of([1.0] * 3)
    two_a_device = TwoADevice()
    schedules = {"1f1b": find_schedule("1f1b"), "two a device": two_a_device}
    assert {each.schedule for each in never(profile, 2, schedules=schedules)} == {"1f1b"}
    with pytest.raises(PlanError, match="no schedule serves 2 devices and 3 layers: two a device: two, please"):
        never(profile, 2, schedules={"two a device": two_a_device})
    with pytest.raises(PlanError, match="no schedule serves 4 devices and 3 layers"):
        never(profile, 4)


def test_wrong_options_are_told():
    profile = profile_of([1.0] * 4)
    with pytest.raises(UnknownScheduleError, match="zigzag"):
        never(profile, 2, schedules=["zigzag"])
    with pytest.raises(ProfileError, match="3 micro-batches were not measured; the profile knows 4"):
        never(profile, 2, microbatches=[3])
    with pytest.raises(PlanError, match="none of the balances has as many stages"):
        never(profile, 2, schedules=["gpipe"], balances=lambda *_: [[1, 1, 2]])


# Figures


PROFILES = st.builds(
    lambda times, m, sizes: profile_of(times, measured=(m,), sizes=[round(10 * size) for size in sizes[: len(times)]]),
    st.lists(st.floats(0.0, 5.0), min_size=4, max_size=7),
    st.integers(1, 6),
    st.lists(st.floats(0.0, 50.0), min_size=7, max_size=7),
)


@settings(max_examples=25)
@given(PROFILES, st.integers(1, 3))
def test_figures_are_those_of_a_direct_simulation(profile, devices):
    for found in plan(profile, devices, schedules=["gpipe", "1f1b", "interleaved"]):
        assert found == direct(profile, devices, found)


def test_what_is_left_out_early_is_not_the_best(monkeypatch):
    """The same best plan, whether the borders of one candidate are moved or of all."""
    profile = profile_of([3.0, 1.0, 2.0, 5.0, 1.0, 4.0, 1.0, 2.0], measured=(2, 4, 8))
    thorough, quick = [], []
    for refined, plans in ((10**6, thorough), (1, quick)):
        monkeypatch.setattr(planner, "REFINED", refined)
        plans += plan(profile, 2, schedules=["gpipe", "1f1b", "interleaved"])
    assert len(quick) < len(thorough)
    assert quick[0] == thorough[0]


@pytest.mark.promise("Memory", "The planner offloads only what does not fit, and recomputes where that is faster.")
def test_what_does_not_fit_offloads_as_little_as_fits() -> None:
    profile = profile_of([1.0] * 4, measured=(8,), sizes=[10 * SIZE] * 4)
    whole = never(profile, 2, schedules=["gpipe"], balances=lambda _: [(2, 2)])[0]
    limit = max(whole.memory) * 2 // 3
    with pytest.raises(PlanError, match="nothing fits"):
        never(profile, 2, schedules=["gpipe"], balances=lambda _: [(2, 2)], memory_limit=limit)
    (found,) = never(profile, 2, schedules=["gpipe"], balances=lambda _: [(2, 2)], memory_limit=limit, offload=True)
    assert max(found.memory) <= limit
    assert found.options()["offload"] == list(found.offload)
    assert "offload" in str(found)
    fewer = [0.0, *(k / 8 for k in range(9) if k / 8 < max(found.offload))]
    for part in fewer:
        graph = lower(find_schedule("gpipe"), Shape(2, 8, 2), offload=[part, part], wiring=profile.wiring((2, 2)))
        record = simulate(graph, profile.costs((2, 2), 8))
        assert max(peak_memory(record, profile.memory((2, 2), 8))) > limit
    # What fits offloads nothing.
    assert not never(profile, 2, schedules=["gpipe"], memory_limit=limit * 2, offload=True)[0].offload


@pytest.mark.promise("Memory", "The planner offloads only what does not fit, and recomputes where that is faster.")
@pytest.mark.parametrize(("seconds", "offloads"), [(0.05, True), (50.0, False)])
def test_offload_is_held_against_recomputation_by_time(seconds: float, offloads: bool) -> None:
    profile = profile_of([1.0] * 4, measured=(8,), sizes=[10 * SIZE] * 4)
    slow = replace(profile.measurements[8], host_bandwidth=22 * SIZE / seconds)
    profile = replace(profile, measurements={8: slow})
    options = {"schedules": ["gpipe"], "balances": lambda _: [(2, 2)], "checkpoints": ["never", "always"]}
    fastest = plan(profile, 2, **options)[0]  # type: ignore[arg-type]
    assert fastest.checkpoint is CheckpointMode.NEVER
    limit = max(fastest.memory) * 2 // 3
    best = plan(profile, 2, memory_limit=limit, offload=True, **options)[0]  # type: ignore[arg-type]
    assert bool(best.offload) is offloads
    assert best.checkpoint is (CheckpointMode.NEVER if offloads else CheckpointMode.ALWAYS)


# On a topology


def hosts_with(latencies: dict[tuple[int, int], float], count: int) -> Topology:
    return Topology(
        tuple(Host(f"h{k}", ("cpu:0",)) for k in range(count)),
        links={frozenset((f"h{a}", f"h{b}")): NetworkLink(latency) for (a, b), latency in latencies.items()},
    )


def length(topology: Topology, names: tuple[str, ...]) -> float:
    return sum(topology.between(a, b).latency for a, b in pairwise(names))


@settings(max_examples=30, deadline=None)
@given(st.data(), st.integers(1, 5))
def test_no_order_of_hosts_crosses_less(data: st.DataObject, count: int) -> None:
    pairs = [*combinations(range(count), 2)]
    latencies = data.draw(st.tuples(*[st.integers(0, 9)] * len(pairs)))
    topology = hosts_with(dict(zip(pairs, map(float, latencies), strict=True)), count)
    names = tuple(host.name for host in topology.hosts)
    found = tuple(host.name for host in best_host_order(topology, 1.0).hosts)
    least = min(length(topology, order) for order in permutations(names))
    assert length(topology, found) == least
    if length(topology, names) == least:
        assert found == names, "an order that is as good as any stays"


def test_an_order_of_many_hosts_stays() -> None:
    count = MOST_EXACT + 1
    topology = hosts_with({(0, 1): 9.0}, count)
    assert best_host_order(topology, 1.0) == topology


def test_a_plan_goes_around_slow_links_and_gives_fast_devices_more() -> None:
    """b and c are close, and so are c and a: the hosts come as a, c, b, whatever the file says."""
    fast, slow = NetworkLink(0.01, 1e6), NetworkLink(5.0, 1e6)
    hosts = Host("a", ("cpu:0",)), Host("b", ("cpu:0",), (3.0,)), Host("c", ("cpu:0", "cpu:1"))
    topology = Topology(hosts, link=fast, links={frozenset("ab"): slow})
    best = plan(
        profile_of([1.0] * 12, measured=(8,), overhead=0.0),
        4,
        schedules=["1f1b"],
        checkpoints=["never"],
        topology=topology,
    )[0]
    assert best.placing is not None
    assert best.placing.devices in {
        ("a/cpu:0", "c/cpu:0", "c/cpu:1", "b/cpu:0"),
        ("b/cpu:0", "c/cpu:0", "c/cpu:1", "a/cpu:0"),
    }
    by_device = dict(zip(best.placing.devices, best.balance, strict=True))
    assert by_device == {"a/cpu:0": 2, "c/cpu:0": 2, "c/cpu:1": 2, "b/cpu:0": 6}
    assert best.options()["devices"] == list(best.placing.devices)
    # 8 micro-batches and 3 to fill the pipe, of 6 s each, and twice the way.
    assert best.seconds == pytest.approx((8 + 3) * 6 + 0.5, rel=0.02)
    assert all(0 <= share < 0.02 for share in best.placing.waits)


def test_the_devices_of_a_topology_are_all_planned_for() -> None:
    with pytest.raises(PlanError, match="the topology has 2 devices, got 3 to plan for"):
        plan(profile_of([1.0] * 4), 3, topology=hosts_with({}, 2))


def selective(profile: Profile, **costs: Any) -> Profile:
    """``profile`` where products were measured as well: they take the most time and keep the least."""
    measured = {
        m: replace(each, layers=tuple(replace(la, selective=SelectiveCosts(**costs)) for la in each.layers))
        for m, each in profile.measurements.items()
    }
    return replace(profile, measurements=measured)


def test_selective_recomputation_is_chosen_where_all_does_not_fit_and_it_is_faster_than_all_again():
    plain = profile_of([1.0] * 4, sizes=[10 * SIZE] * 4)
    profile = selective(plain, forward=1.0, recompute=0.25, kept=2 * SIZE)
    options: dict[str, Any] = {"schedules": ["gpipe"], "checkpoints": ["never", "selective", "always"]}
    options["balances"] = lambda stages: [[2, 2]]
    found = {each.checkpoint.value: each for each in plan(profile, 2, **options)}
    assert found["never"].seconds < found["selective"].seconds < found["always"].seconds
    memories = [max(found[mode].memory) for mode in ("never", "selective", "always")]
    assert memories == sorted(memories, reverse=True)
    # Four micro-batches of two layers, and one of them recomputed.
    assert memories[1] - memories[2] == 3 * 2 * 2 * SIZE
    assert plan(profile, 2, memory_limit=memories[0] - 1, **options)[0].checkpoint is CheckpointMode.SELECTIVE
    assert plan(profile, 2, memory_limit=memories[1] - 1, **options)[0].checkpoint is CheckpointMode.ALWAYS
    assert {each.checkpoint for each in plan(plain, 2, **options)} == {CheckpointMode.NEVER, CheckpointMode.ALWAYS}
    with pytest.raises(ProfileError, match="was not measured"):
        plan(plain, 2, schedules=["gpipe"], checkpoints=["selective"])
