"""Stages on hosts: the order of hosts and layers by speed, against all there are; plans on a topology."""

from __future__ import annotations

from itertools import combinations, pairwise, permutations
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import chain

from asyncpipe.core.predict.layer_profile import LayerCosts, Measurement, Profile, ProfiledLayer
from asyncpipe.core.predict.placement import MOST_EXACT, best_host_order
from asyncpipe.core.predict.planner import plan
from asyncpipe.core.predict.topology import Host, NetworkLink, Topology
from asyncpipe.errors import PlanError


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


def even_profile(layers: int) -> Profile:
    costs = tuple(LayerCosts(1.0, 1.0, 1.0, 2.0, 1.0, 1.0, 100) for _ in range(layers))
    return Profile(
        layers=tuple(ProfiledLayer(f"layer {k}", 0, 0) for k in range(layers)),
        links=tuple((k, k + 1) for k in range(layers - 1)),
        measurements={
            8: Measurement(
                costs,
                dict.fromkeys("FRBIW", 0.0),
                step=0.0,
                latency=0.0,
                bandwidth=inf,
                sent=chain(*[100] * (layers + 1)),
            )
        },
    )


def test_a_plan_goes_around_slow_links_and_gives_fast_devices_more() -> None:
    """b and c are close, and so are c and a: the hosts come as a, c, b, whatever the file says."""
    fast, slow = NetworkLink(0.01, 1e6), NetworkLink(5.0, 1e6)
    hosts = Host("a", ("cpu:0",)), Host("b", ("cpu:0",), (3.0,)), Host("c", ("cpu:0", "cpu:1"))
    topology = Topology(hosts, link=fast, links={frozenset("ab"): slow})
    best = plan(even_profile(12), 4, schedules=["1f1b"], checkpoints=["never"], topology=topology)[0]
    assert best.placing is not None
    assert best.placing.devices in {
        ("a/cpu:0", "c/cpu:0", "c/cpu:1", "b/cpu:0"),
        ("b/cpu:0", "c/cpu:0", "c/cpu:1", "a/cpu:0"),
    }
    by_device = dict(zip(best.placing.devices, best.balance, strict=True))
    assert by_device == {"a/cpu:0": 2, "c/cpu:0": 2, "c/cpu:1": 2, "b/cpu:0": 6}
    assert best.options()["devices"] == list(best.placing.devices)
    # 8 micro-batches and 3 to fill the pipe, of 6 s each, and twice the way.
    assert best.seconds == pytest.approx((8 + 3) * 6, rel=0.02)
    assert all(0 <= share < 0.02 for share in best.placing.waits)


def test_the_devices_of_a_topology_are_all_planned_for() -> None:
    with pytest.raises(PlanError, match="the topology has 2 devices, got 3 to plan for"):
        plan(even_profile(4), 3, topology=hosts_with({}, 2))
