"""Where jobs are placed: as few used devices as can be, few hosts, neighbours, little load; always the same."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncpipe.core.hosts import host_of
from asyncpipe.service.job_states import DeviceRequest
from asyncpipe.service.jobs.placement import index_apart, place, why_there

EIGHT = tuple(f"cuda:{number}" for number in range(8))
HOSTS = tuple(f"{host}/cuda:{number}" for host in "abc" for number in range(4))


@pytest.mark.parametrize(
    ("request_", "devices", "load", "placed"),
    [
        (DeviceRequest(2), EIGHT, {}, "0 1"),
        (DeviceRequest(2), EIGHT, {"cuda:0": 1, "cuda:2": 1}, "3 4"),
        (DeviceRequest(2), EIGHT, {f"cuda:{number}": 1 for number in (0, 1, 3, 4, 6, 7)}, "2 5"),
        (DeviceRequest(2), EIGHT, {f"cuda:{number}": 1 for number in range(7)}, "6 7"),
        (DeviceRequest(1), EIGHT, dict(zip(EIGHT, (3, 2, 1, 4, 1, 2, 3, 4), strict=True)), "2"),
        (DeviceRequest(3), ("cuda:0", "cuda:0", "cuda:1"), {}, "0 0 1"),
        (DeviceRequest(2, ("cuda:5", "cuda:1")), EIGHT, {"cuda:5": 1}, "5 1"),
        (DeviceRequest(2, ("cuda:8", "cuda:1")), EIGHT, {}, None),
        (DeviceRequest(9), EIGHT, {}, None),
        (DeviceRequest(2), HOSTS, {"c/cuda:0": 1, "c/cuda:1": 1}, "c2 c3"),
        (DeviceRequest(4, (), 1), HOSTS, {"a/cuda:0": 1, "b/cuda:3": 1}, "c0 c1 c2 c3"),
        (DeviceRequest(5, (), 1), HOSTS, {}, None),
        (DeviceRequest(6, (), 2), (*HOSTS[:4], *HOSTS[6:]), {}, "a0 a1 a2 a3 b2 b3"),
    ],
)
def test_a_place_is_chosen_by_use_hosts_neighbours_and_load(request_, devices, load, placed):
    found = place(request_, devices, load)
    short = None if found is None else " ".join(name.replace("cuda:", "").replace("/", "") for name in found)
    assert short == placed


@given(
    st.integers(1, 4),
    st.sampled_from([None, 1, 2]),
    st.sets(st.sampled_from(HOSTS)).map(sorted),
    st.dictionaries(st.sampled_from(HOSTS), st.integers(1, 3)),
)
def test_no_other_choice_uses_fewer_devices_of_others_or_fewer_hosts(count, hosts, usable, load):
    request = DeviceRequest(count, (), hosts)

    def worse(chosen):
        return sum(each in load for each in chosen), len(set(map(host_of, chosen)))

    found = place(request, usable, load)
    assert found == place(request, usable, load)
    possible = [each for each in combinations(usable, count) if request.fits(each) and hosts_of(each) <= (hosts or 3)]
    if not possible:
        assert found is None
        return
    assert sorted(found) == list(found)
    assert hosts_of(found) <= (hosts or 3)
    best = min(map(worse, possible))
    if not best[0]:  # Where some have to be used, one host is looked at after the other.
        assert worse(found) == best


def hosts_of(chosen):
    return len(set(map(host_of, chosen)))


def test_a_topology_says_who_is_next_to_whom():
    pairs = {frozenset(("cuda:0", "cuda:3")), frozenset(("cuda:1", "cuda:2"))}

    def linked(one, other):
        return 1.0 if frozenset((one, other)) in pairs else 9.0 * (one != other)

    assert place(DeviceRequest(2), EIGHT[:4], {}, linked) == ("cuda:0", "cuda:3")
    assert place(DeviceRequest(2), EIGHT[:4], {"cuda:0": 1}, linked) == ("cuda:1", "cuda:2")
    assert (index_apart("cuda:1", "cuda:4"), index_apart("a/cpu", "a/cpu:2")) == (3, 2)


def test_operators_read_where_and_why():
    assert why_there(("cuda:2", "cuda:3"), {}, {"cuda:2": 41 << 30}) == (
        "on cuda:2 and cuda:3: free neighbours, 41 GiB left on each"
    )
    assert why_there(("cuda:2",), {"cuda:2": 1}, {"cuda:2": 1 << 30}) == "on cuda:2: the least loaded, 1 GiB left"
    assert why_there(("a/cuda:0", "b/cuda:1"), {}, {}) == "on a/cuda:0 and b/cuda:1: free, on 2 hosts"
