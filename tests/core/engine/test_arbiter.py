"""The scheduler of devices that several processes use, on virtual time: whose turn it is, and who has gone."""

from __future__ import annotations

import pickle
from heapq import heappop, heappush
from itertools import count

import pytest
from sharing_helpers import graph_of

from asyncpipe.core.engine.arbiter import MOST_GRAPHS, Arbiter, Sharing, StepOver, StepRequest, TurnsGiven
from asyncpipe.core.engine.events import TaskCompleted, TaskFailed
from asyncpipe.core.graph.task import Queue
from asyncpipe.core.policies.share import Share
from asyncpipe.core.predict.costs import Costs
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import InvalidTransition

COSTS = Costs(0.01, 0.02, copy=0.0005)


class Processes:
    """Parties that do step after step; what they say and hear takes ``delay`` seconds."""

    def __init__(self, order="strict", delay=0.0002, **shares):
        self.arbiter, self.delay, self.now = Arbiter(), delay, 0.0
        self.shares = shares
        self.graph = pickle.loads(pickle.dumps(graph_of(find_schedule("1f1b", order=order), 2, 8)))
        self.spans = {name: [] for name in shares}
        self.steps = dict.fromkeys(shares, 0)
        self.on = {}
        self._heap, self._order, self._free = [], count(), {}
        for name in shares:
            self.arbiter.join(name, self.graph.devices)
            self.request(name)

    def at(self, when, function, *arguments):
        heappush(self._heap, (when, next(self._order), function, arguments))

    def request(self, name):
        number = self.steps[name] = self.steps[name] + 1
        graph = self.graph if number == 1 else None
        self.at(self.now + self.delay, self.hear, name, StepRequest(number, 0, graph, self.shares[name]))

    def hear(self, name, said):
        if name in self.shares:
            self.arbiter.handle(name, [said], self.now)

    def run(self, until):
        while self._heap and self._heap[0][0] <= until:
            self.now, _, function, arguments = heappop(self._heap)
            function(*arguments)
            for name, answers in self.arbiter.decide(self.now).items():
                for answer in answers:
                    self.at(self.now + self.delay, self.take, name, answer)
            if (at := self.arbiter.wake_at(self.now)) is not None:
                self.at(at, lambda: None)

    def take(self, name, answer):
        if isinstance(answer, StepOver) and name in self.shares:
            self.request(name)
        elif isinstance(answer, TurnsGiven):
            for task in answer.tasks:
                device = self.graph.tasks[task].lane.device
                begin = self._free[name, device] = max(self.now, self._free.get((name, device), 0.0))
                self._free[name, device] += COSTS(self.graph.tasks[task])
                self.at(begin, self.begin, name, answer.step, task, begin)

    def begin(self, name, step, task, begin):
        device, end = self.graph.tasks[task].lane.device, begin + COSTS(self.graph.tasks[task])
        if name not in self.shares:
            return
        assert self.on.setdefault(device, name) == name or self.on[device] not in self.shares, "one has the device"
        self.on[device] = name
        self.at(end, self.end, name, step, task, begin, end)

    def end(self, name, step, task, begin, end):
        if self.graph.tasks[task].lane.queue is Queue.COMPUTE:
            self.spans[name].append((begin, end))
        self.on.pop(self.graph.tasks[task].lane.device, None)
        self.hear(name, TaskCompleted(step, task, begin, end))

    def seconds(self, name, since=0.0):
        return sum(end - begin for begin, end in self.spans[name] if begin >= since)


@pytest.mark.promise("The service", "Jobs that share a device have it one at a time, and device time by their weights.")
@pytest.mark.parametrize("order", ["strict", "hint"])
def test_weights_divide_device_time_and_nobody_has_a_device_with_another(order):
    both = Processes(order, light=Share("light"), heavy=Share("heavy", weight=3.0))
    both.run(25.0)
    light, heavy = both.seconds("light", 5.0), both.seconds("heavy", 5.0)
    assert heavy / light == pytest.approx(3.0, rel=0.05)
    assert light + heavy > 0.9 * 2 * 20.0


def test_a_background_job_fills_bubbles_and_delays_the_other_a_little():
    alone = Processes(front=Share("front"))
    alone.run(8.0)
    both = Processes(front=Share("front"), back=Share("back", background=True))
    both.run(8.0)
    assert both.steps["front"] > 0.97 * alone.steps["front"]
    assert both.seconds("back") > 0


def test_who_goes_leaves_nothing_behind_and_the_other_has_the_devices():
    both = Processes(stays=Share("stays"), goes=Share("goes"))
    both.run(3.003)
    del both.shares["goes"]
    both.arbiter.leave("goes", both.now)
    before = both.steps["stays"]
    both.run(6.0)
    alone = Processes(stays=Share("stays"))
    alone.run(3.0)
    assert both.steps["stays"] - before >= alone.steps["stays"] - 2
    both.arbiter.leave("stays", both.now)
    assert not both.arbiter._scheduler._steps
    assert not both.arbiter._scheduler._jobs._jobs
    assert not both.arbiter._steps


def test_each_is_told_whether_others_use_its_devices():
    arbiter = Arbiter()
    for name, devices in (("a", ["cuda:0"]), ("b", ["cuda:1"]), ("c", ["cuda:1", "cuda:2"])):
        arbiter.join(name, devices)
    assert arbiter.decide(0.0) == {"b": [Sharing(True)], "c": [Sharing(True)]}
    arbiter.leave("b", 0.0)
    assert arbiter.decide(0.0) == {"c": [Sharing(False)]}


def test_what_nobody_can_have_said_is_refused_and_what_comes_late_ignored():
    arbiter, graph = Arbiter(), graph_of("gpipe", 2, 1)
    arbiter.join("a", graph.devices)
    with pytest.raises(InvalidTransition, match="no graph"):
        arbiter.handle("a", [StepRequest(0, 5, None, Share("a"))], 0.0)
    arbiter.handle("a", [TaskFailed(7, 0, ValueError())], 0.0)
    for number in range(MOST_GRAPHS + 1):
        arbiter.handle("a", [StepRequest(number, number % MOST_GRAPHS, graph, Share("a"))], 0.0)
    with pytest.raises(InvalidTransition, match="no graph"):
        arbiter.handle("a", [StepRequest(99, 1, None, Share("a"))], 0.0)
