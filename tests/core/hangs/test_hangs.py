"""Of a step that stands still, the root that is found is the one that was planted; on any graph, in any order."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from random_graphs import random_graph, random_partition

from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.part import part
from asyncpipe.core.graph.programs import programs
from asyncpipe.core.hangs.reports import (
    PartReport,
    ReceiverReport,
    RunningReport,
    SeenWorker,
    SenderReport,
    WorkerReport,
)
from asyncpipe.core.hangs.roots import HangRoot, HangState, cut_off, hang_roots
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule

S = HangState
PLANTS = (S.COMPUTING, S.SILENT, S.GONE, S.NOT_TAKING, S.NOT_SENDING, S.WAITS_FOR_EDGE, S.WAITS_FOR_CREDIT)
STEP = 5
MANY = 1 << 30
ATTEMPTS = 6


@dataclass
class Edge:
    """Messages from one worker to another."""

    window: int = MANY
    loses_credits: bool = False
    """All that are given back."""
    keeps_credits: bool = False
    """The receiver gives none back."""
    good: int = MANY
    """So many arrive."""
    sent: int = 0
    came: int = 0
    released: int = 0
    queued: list[tuple[int, int]] = field(default_factory=list)
    held: list[tuple[int, int]] = field(default_factory=list)

    @property
    def limit(self) -> int:
        """As the sender knows it."""
        return self.window + (0 if self.loses_credits else self.released)


class World:
    """Workers that run their parts of one step until nothing can happen any more."""

    def __init__(self, draw: random.Random, plant: HangState, *, windows: bool = False) -> None:
        self.draw, self.plant, self.windows = draw, plant, windows
        self.graph = random_graph(draw, most_devices=5, ruled=0.3)
        devices = random_partition(self.graph.devices, draw)
        self.devices = {f"worker {n}": tuple(each) for n, each in enumerate(devices)}
        self.home = {device: name for name, each in self.devices.items() for device in each}
        self.parts = {name: part(self.graph, each) for name, each in self.devices.items()}
        self.orders: dict[str, list[int]] = {}
        if self.graph.rule is None:
            for program in programs(self.graph).programs:
                self.orders[self.graph.devices[program.device]] = list(program.tasks)
        else:
            for task in self.graph.tasks:
                self.orders.setdefault(task.lane.device, []).append(task.number)
        self.ended: dict[str, set[int]] = {name: set() for name in self.devices}
        self.came: dict[str, set[tuple[int, int]]] = {name: set() for name in self.devices}
        self.edges: dict[tuple[str, str], Edge] = {}
        self.running: dict[str, int] = {}
        self.stopped = ""
        self._plant()

    def _plant(self) -> None:
        draw, names = self.draw, list(self.devices)
        self.task, self.worker, self.peer = -1, draw.choice(names), ""
        self.after = draw.randrange(len(self.graph.tasks))
        if self.plant is S.COMPUTING:
            self.task = draw.choice(self.graph.tasks).number
            self.worker = self.home[self.graph.tasks[self.task].lane.device]
        elif self.plant not in (S.SILENT, S.GONE):
            crossing = [(self.home[device], name) for name, each in self.parts.items() for device in each.arrivals_from]
            if crossing:
                sender, receiver = draw.choice(crossing)
                at_sender = self.plant is S.NOT_SENDING
                self.worker, self.peer = (sender, receiver) if at_sender else (receiver, sender)
            good = draw.randrange(3)
            # Credits that are given back and lost on their way are the link's.
            loses = self.plant is S.WAITS_FOR_EDGE and draw.random() < 0.3
            keeps = self.plant is S.WAITS_FOR_CREDIT
            self.edges[self.sender, self.receiver] = (
                Edge(window=1 + good, loses_credits=loses, keeps_credits=keeps) if loses or keeps else Edge(good=good)
            )
        if self.windows:
            for edge in ((a, b) for a in names for b in names):
                self.edges.setdefault(edge, Edge(window=draw.randint(1, 4)))

    @property
    def sender(self) -> str:
        return self.worker if self.plant is S.NOT_SENDING else self.peer

    @property
    def receiver(self) -> str:
        return self.peer if self.plant is S.NOT_SENDING else self.worker

    def run(self) -> bool:
        """Whether it stands still before the end, because of what was planted."""
        for name, each in self.parts.items():
            for departure in each.at_start:
                self._depart(name, departure.device, (departure.task, departure.dependency))
        for moved in range(len(self.graph.tasks) + 1):
            if moved == self.after and self.plant in (S.SILENT, S.GONE):
                self.stopped = self.worker
            able = [(device, task) for device in self.orders for task in self._able(device)]
            if not able:
                break
            self._run_task(*self.draw.choice(able))
        return self.is_still

    @property
    def is_still(self) -> bool:
        return sum(map(len, self.ended.values())) < len(self.graph.tasks)

    def _heads(self, device: str) -> list[int]:
        left = [task for task in self.orders[device] if task not in self.ended[self.home[device]]]
        return left[:1] if self.graph.rule is None else left

    def _able(self, device: str) -> list[int]:
        worker = self.home[device]
        if worker == self.stopped or device in self.running:
            return []
        return [task for task in self._heads(device) if self._has_all(worker, task)]

    def _has_all(self, worker: str, task: int) -> bool:
        messages = {before for waiting, before in self.parts[worker].arrivals if waiting == task}
        local = set(self.graph.dependencies[task]) - messages
        return local <= self.ended[worker] and all((task, before) in self.came[worker] for before in messages)

    def _run_task(self, device: str, task: int) -> None:
        worker = self.home[device]
        if task == self.task:
            self.running[device] = task
            return
        self.ended[worker].add(task)
        for (sender, receiver), edge in self.edges.items():
            if receiver == worker:
                self._release(sender, receiver, edge)
        for departure in self.parts[worker].departures[self.parts[worker].whole.index(task)]:
            self._depart(worker, departure.device, (departure.task, departure.dependency))

    def _release(self, sender: str, receiver: str, edge: Edge) -> None:
        taken = [message for message in edge.held if message[0] in self.ended[receiver]]
        if edge.keeps_credits or not taken:
            return
        edge.held = [message for message in edge.held if message not in taken]
        edge.released += len(taken)
        queued, edge.queued = edge.queued, []
        for task, before in queued:
            self._depart(sender, self.graph.tasks[task].lane.device, (task, before))

    def _depart(self, worker: str, device: str, message: tuple[int, int]) -> None:
        receiver = self.home[device]
        edge = self.edges.setdefault((worker, receiver), Edge())
        is_planted = (worker, receiver) == (self.sender, self.receiver)
        if edge.sent >= edge.limit or (is_planted and self.plant is S.NOT_SENDING and edge.sent >= edge.good):
            edge.queued.append(message)
            return
        edge.sent += 1
        if edge.sent <= edge.good:
            edge.came += 1
            self.came[receiver].add(message)
            edge.held.append(message)
        elif self.plant is S.NOT_TAKING and self.draw.random() < 0.5:
            edge.came += 1  # And nobody was told.

    def seen(self) -> list[SeenWorker]:
        found = []
        for name, devices in self.devices.items():
            running = [
                RunningReport(device, STEP, task, self.graph.tasks[task].id, 7.0)
                for device, task in self.running.items()
                if device in devices
            ]
            report = None if name == self.stopped else self._report(name, running)
            lost = "was killed" if report is None and self.plant is S.GONE else ""
            found.append(SeenWorker(name, devices, report, 3.0 if report is None else 0.1, running, lost))
        return found

    def _report(self, name: str, running: list[RunningReport]) -> WorkerReport:
        heads = {}
        if self.graph.rule is None:
            for device in self.devices[name]:
                left = [task for task in self.orders.get(device, ()) if task not in self.ended[name]]
                # A program is behind the task that runs.
                left = left[1:] if device in self.running else left
                heads.update({device: left[0]} if left else {})
        sends, takes = {}, {}
        for (sender, receiver), edge in self.edges.items():
            is_planted = (sender, receiver) == (self.sender, self.receiver)
            if sender == name:
                sends[receiver] = SenderReport(edge.sent, edge.limit, frozenset(edge.queued))
            if receiver == name:
                is_stuck = is_planted and self.plant is S.NOT_TAKING and edge.sent > edge.good
                holders = {self.graph.tasks[task].lane.device for task, _ in edge.held if task not in self.ended[name]}
                told = edge.window + edge.released
                takes[sender] = ReceiverReport(edge.came, told, frozenset(holders), is_stuck=is_stuck)
        part_report = PartReport(frozenset(self.ended[name]), heads, frozenset(self.came[name]))
        return WorkerReport(0, running, part_report, sends, takes)


def check(world: World, roots: list[HangRoot]) -> None:
    root = roots[0]
    edge = world.edges.get((world.sender, world.receiver))
    if edge is not None and edge.loses_credits and not edge.released:
        world.plant = S.WAITS_FOR_CREDIT  # None was lost: so few are a hang by themselves.
    assert root.state is world.plant, root
    assert root.worker == world.worker, root
    assert {each.state for each in roots} == {world.plant}, "nothing else is at fault"
    assert str(root)
    if world.plant is S.COMPUTING:
        assert (root.task, root.seconds) == (world.graph.tasks[world.task].id, 7.0)
    elif world.peer:
        assert root.peer == world.peer
    for wait, behind in zip(root.waits, root.waits[1:], strict=False):
        assert behind.worker == wait.peer or wait.state is S.WAITS_FOR_CREDIT, "each waits for the one behind it"
    assert len({wait.device for wait in root.waits}) == len(root.waits)
    if root.waits and root.waits[-1].state is S.WAITS_FOR_TASK:
        assert root.waits[-1].peer == world.worker


def worlds(draw: random.Random, plant: HangState, **options: bool) -> World:
    """One that has come to stand still, if one of some does."""
    for _ in range(ATTEMPTS):
        world = World(draw, plant, **options)
        if world.run():
            break
    return world


@settings(max_examples=90)
@given(st.integers(0, MANY), st.sampled_from(PLANTS))
def test_the_root_that_is_found_is_the_planted_one(seed: int, plant: HangState) -> None:
    world = worlds(random.Random(seed), plant)
    roots = hang_roots(STEP, world.graph, world.seen())
    event(f"{plant.value} {world.is_still}")
    if world.is_still:
        check(world, roots)
    elif not world.stopped:
        assert roots == [], "a step at its end waits for nothing"


def test_the_most_telling_root_comes_first_however_long_others_have_taken() -> None:
    graph = lower(find_schedule("gpipe"), Shape(2, 2, 2), devices=["a", "b"])
    begun = PartReport(frozenset(), {"a": 0}, frozenset())
    computes = WorkerReport(1, [RunningReport("a", STEP, 0, "F(0,0)", 100.0)], begun)
    workers = [SeenWorker("left", ("a",), computes), SeenWorker("right", ("b",), None, silent=3.0)]
    roots = hang_roots(STEP, graph, workers)
    assert [root.state for root in roots] == [S.SILENT, S.COMPUTING]


def test_a_device_that_hangs_in_taking_a_message_does_not_begin_what_it_has() -> None:
    """It waits for nothing that its head needs: the message is for a later task."""
    graph = lower(find_schedule("gpipe"), Shape(2, 2, 2), devices=["a", "b"], checkpoint=CheckpointMode.NEVER)
    numbers = {task.id: task.number for task in graph.tasks}
    ended = frozenset(numbers[name] for name in ("F(0,0)", "F(1,0)"))
    came = frozenset({(numbers["C(0,0>1)"], numbers["F(0,0)"])})
    sends = {"right": SenderReport(2, 9)}
    left = WorkerReport(0, part=PartReport(ended, {"a": numbers["C(0,1>0)"]}, frozenset()), sends=sends)
    part_of_b = PartReport(frozenset(), {"b": numbers["C(0,0>1)"]}, came)
    for is_stuck, state in ((True, S.NOT_TAKING), (False, S.NOT_BEGINNING)):
        receives = {"left": ReceiverReport(2, 9, is_stuck=is_stuck, taker="device")}
        right = WorkerReport(0, part=part_of_b, receives=receives)
        workers = [SeenWorker("left", ("a",), left), SeenWorker("right", ("b",), right)]
        root = hang_roots(STEP, graph, workers)[0]
        assert (root.state, root.worker, root.peer) == (state, "right", "left" if is_stuck else "")
        assert root.task == "C(0,0>1)"


@pytest.mark.parametrize(
    ("lost", "found"),
    [
        ({("b", "c"), ("b", "a")}, "b"),
        ({("a", "b")}, "a"),
        ({("d", "c")}, "d"),
        ({("b", "c"), ("c", "b")}, None),
        ({("a", "b"), ("c", "d")}, None),
        (set(), None),
    ],
    ids=["in the middle", "first", "last", "only one connection", "two hosts", "nothing"],
)
def test_the_worker_that_nothing_gets_through_to_is_known_by_what_the_others_have(lost, found) -> None:
    """Of four in a row, each of which has sent its neighbours two messages."""
    row = "abcd"
    pairs = [(x, y) for x in row for y in row if abs(ord(x) - ord(y)) == 1]
    reports = {
        name: WorkerReport(
            0,
            sends={receiver: SenderReport(2, 9) for sender, receiver in pairs if sender == name},
            receives={
                sender: ReceiverReport(2 - ((sender, name) in lost), 9)
                for sender, receiver in pairs
                if receiver == name
            },
        )
        for name in row
    }
    assert cut_off(SeenWorker(name, (name,), report) for name, report in reports.items()) == found
