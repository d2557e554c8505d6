"""Steps on hosts: topologies and their files, what links make of a step, and steps too large for a graph."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task import Task
from asyncpipe.core.graph.task_graph import TaskGraph, Wiring
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.costs import Jitter, StageCosts
from asyncpipe.core.predict.report import link_waits, report
from asyncpipe.core.predict.simulate import simulate, simulate_steps
from asyncpipe.core.predict.topology import Host, NetworkLink, Topology, TopologyCosts
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import DeviceError

NAMES = ["gpipe", "1f1b", "eager-1f1b", "interleaved", "zb-h1", "zbv"]
FREE = NetworkLink()
PAIR = Topology((Host("a", ("cpu:0",)), Host("b", ("cpu:0",))), link=NetworkLink(0.5, 100.0))


def shape_of(name: str, devices: int, microbatches: int) -> Shape:
    return Shape(devices * (find_schedule(name).virtual or 1), microbatches, devices)


def costs_of(stages: int, uneven: int = 0) -> StageCosts:
    """A forward takes 1 and a bit, a backward twice that; each stage sends 100 bytes and some."""
    even = [1.0 + (stage * uneven % 7) / 10 for stage in range(stages)]
    halves = dict.fromkeys((TaskKind.INPUT_GRADIENT, TaskKind.WEIGHT_GRADIENT), even)
    sent = [100 + 13 * (stage * uneven % 5) for stage in range(stages - 1)]
    return StageCosts({TaskKind.FORWARD: even, **halves}, sent)


def topology_of(
    hosts: int, devices: int, link: NetworkLink, inside: NetworkLink = FREE, *, slow: bool = False
) -> Topology:
    speeds = [[1.0 - (slow and (host + device) % 3 == 1) / 2 for device in range(devices)] for host in range(hosts)]
    return Topology(
        tuple(Host(f"h{k}", tuple(f"cpu:{d}" for d in range(devices)), tuple(speeds[k])) for k in range(hosts)),
        link=link,
        inside=inside,
    )


def graph_on(topology: Topology, name: str, microbatches: int, checkpoint: CheckpointMode) -> TaskGraph:
    names = topology.devices
    shape = shape_of(name, len(names), microbatches)
    return lower(find_schedule(name), shape, devices=names, checkpoint=checkpoint)


def on_links(graph: TaskGraph, costs: TopologyCosts) -> dict[int, float]:
    """How long each task takes where nothing else uses the links."""

    def seconds(task: Task) -> float:
        if task.source is None:
            return costs(task)
        _, link = costs.route(graph.devices[graph.placement[task.source]], task.lane.device)
        return link.seconds(costs.size(task))

    return {task.number: seconds(task) for task in graph.tasks}


def longest_chain(graph: TaskGraph, seconds: dict[int, float]) -> float:
    """The critical path, without the order of copies: their messages may be on their way together."""
    ends: dict[int, float] = {}
    for number, taken in seconds.items():
        ends[number] = max((ends[before] for before in graph.read_by(number)), default=0.0) + taken
    return max(ends.values())


TOPOLOGIES = st.builds(
    lambda hosts, devices, latency, bandwidth, inside, slow: topology_of(
        hosts, devices, NetworkLink(latency, bandwidth), inside, slow=slow
    ),
    *(st.integers(1, 3), st.integers(1, 2)),
    *(st.sampled_from([0.0, 0.3, 4.0]), st.sampled_from([inf, 200.0, 40.0])),
    *(st.sampled_from([FREE, NetworkLink(0.1, 500.0)]), st.booleans()),
)
STEPS = st.tuples(
    st.sampled_from(NAMES), st.integers(1, 9), st.sampled_from(CheckpointMode), st.integers(0, 6), TOPOLOGIES
)


# Links


def test_messages_follow_each_other_on_a_link_by_hand() -> None:
    """A message of 100 bytes has the link for 1 s and is there 0.5 s later, while the next one has the link."""
    graph = lower(find_schedule("gpipe"), Shape(2, 3, 2), devices=PAIR.devices)
    costs = StageCosts({TaskKind.FORWARD: [0.5, 1.0], TaskKind.BACKWARD: [1.0, 1.0]}, [100])
    record = simulate(graph, TopologyCosts(costs, PAIR))
    began = {time.task.id: time.start for time in report(record).tasks}
    assert [began[f"C({i},0>1)"] for i in range(3)] == [2.0, 3.0, 4.0]
    assert [began[f"F({i},1)"] for i in range(3)] == [2.0, 3.0, 4.0]
    assert [began[f"B({i},1)"] for i in (2, 1, 0)] == [5.0, 6.0, 7.0]
    assert [began[f"B({i},0)"] for i in (2, 1, 0)] == [7.5, 8.5, 9.5]
    assert sorted(record.notes.arrived.values()) == [2.0, 3.0, 4.0, 7.5, 8.5, 9.5]
    # The first device waits from 6 on for what is made then, and the last one from 0.5 on, but not while it is made.
    assert link_waits(report(record), graph) == {"a/cpu:0": 1.5, "b/cpu:0": 1.5}


def test_what_replicas_reduce_travels_too_by_hand() -> None:
    """Parts of 10 bytes of two buckets have the link for 0.1 s and are there 0.5 s later; A and G take 0.2 s."""
    wiring = Wiring((), rows=2, reduces=((0, 2),), updates=(0,))
    graph = lower(find_schedule("gpipe"), Shape(2, 2, 2), devices=PAIR.devices, wiring=wiring)
    rows = {TaskKind.FORWARD: [1.0], TaskKind.BACKWARD: [1.0]}
    costs = StageCosts(rows, [], latency=9.0, buckets=[[20, 20]], rows=2, reducing=100.0, update=[0.25])
    record = simulate(graph, TopologyCosts(costs, PAIR))
    assert record.graph is graph
    done = report(record)
    ran = {time.task.id: (time.start, time.end) for time in done.tasks}
    assert {task: ran[task] for task in ("A(1,0)", "A(1,1)", "G(1,0)", "G(1,1)", "U(1)")} == {
        "A(1,0)": (pytest.approx(2.6), pytest.approx(2.8)),
        "A(1,1)": (pytest.approx(2.8), pytest.approx(3.0)),  # Its message is there at 2.7.
        "G(1,0)": (pytest.approx(3.4), pytest.approx(3.6)),
        "G(1,1)": (pytest.approx(3.6), pytest.approx(3.8)),
        "U(1)": (pytest.approx(3.8), pytest.approx(4.05)),
    }
    assert link_waits(done, graph) == {name: pytest.approx(0.6) for name in PAIR.devices}


@settings(max_examples=40, deadline=None)
@given(STEPS, st.sampled_from([0.0, 0.4]))
def test_no_step_is_faster_than_its_bound(step: tuple[str, int, CheckpointMode, int, Topology], sigma: float) -> None:
    name, microbatches, checkpoint, uneven, topology = step
    graph = graph_on(topology, name, microbatches, checkpoint)
    inner = costs_of(graph.shape.stages, uneven)
    costs = TopologyCosts(Jitter(inner, sigma, seed=3), topology, inner.size)
    found = report(simulate(graph, costs))
    seconds = on_links(graph, costs)
    assert found.seconds >= longest_chain(graph, seconds) - 1e-9
    assert found.seconds >= found.bound - 1e-9
    carried: dict[tuple[str, ...], float] = {}
    for task in graph.tasks:
        if task.source is not None:
            channel, link = costs.route(graph.devices[graph.placement[task.source]], task.lane.device)
            carried[channel] = carried.get(channel, 0.0) + costs.size(task) / link.bandwidth
    assert found.seconds >= max(carried.values(), default=0.0) - 1e-9
    for device, waited in link_waits(found, graph).items():
        assert waited <= found.seconds - found.device_busy[device] + 1e-9


@settings(max_examples=25, deadline=None)
@given(STEPS)
def test_one_host_with_free_links_is_what_there_was(step: tuple[str, int, CheckpointMode, int, Topology]) -> None:
    name, microbatches, checkpoint, uneven, topology = step
    topology = topology_of(1, len(topology.devices), NetworkLink(9.0, 1.0))
    graph = graph_on(topology, name, microbatches, checkpoint)
    costs = costs_of(graph.shape.stages, uneven)

    def journals(records: list[StepRecord]) -> list[object]:
        return [record.journal for record in records]

    bare, placed = (simulate_steps(graph, each, steps=2) for each in (costs, TopologyCosts(costs, topology)))
    assert journals(bare) == journals(placed)


def test_a_rule_and_tied_parameters_have_links_too() -> None:
    wiring = Wiring(((0, 1),), ties=((0, 1),))
    graph = lower(find_schedule("backward-first"), Shape(2, 2, 2), devices=PAIR.devices, wiring=wiring)
    record = simulate(graph, TopologyCosts(costs_of(2), PAIR))
    copies = [task.number for task in graph.tasks if task.kind is TaskKind.COPY]
    assert sorted(record.notes.arrived) == copies
    # Tied parameters leave when the step begins.
    assert record.notes.arrived[next(c for c in copies if not graph.read_by(c))] == 0.5


def test_a_device_that_no_host_has_is_refused() -> None:
    graph = lower(find_schedule("1f1b"), Shape(2, 2, 2))
    with pytest.raises(DeviceError, match="has no device 'dev:0'; it has a/cpu:0, b/cpu:0"):
        simulate(graph, TopologyCosts(costs_of(2), PAIR))
