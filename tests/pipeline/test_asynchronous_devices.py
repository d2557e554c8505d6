"""The asynchronous path without a GPU: streams that only record the order of events.

The tasks compute on the CPU as they are issued, so results are real; their completion is held back until the
test lets go of it. What is checked is what a GPU would rely on: every dependency's event is waited for before a
task computes, tensors that cross streams are kept, and a step returns before anything has completed.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import asyncpipe.pipeline.build
import asyncpipe.pipeline.call_backward
import asyncpipe.pipeline.step
from asyncpipe import Pipeline
from asyncpipe.core.engine.events import Dispatch, TaskCompleted, TaskIssued
from asyncpipe.core.graph.task import Lane, Queue
from asyncpipe.core.schedules.backward_first import BackwardFirst
from asyncpipe.core.schedules.one_f_one_b import OneFOneB
from asyncpipe.core.schedules.protocol import HintedSchedule
from asyncpipe.errors import AsyncpipeError
from asyncpipe.ops.device.streams import AcceleratorStream

mse = nn.functional.mse_loss


class NotingStream(AcceleratorStream):
    """A stream that notes waits and ends; its tasks are done when ``released``."""

    device = torch.device("cpu")
    readers = frozenset()

    def __init__(self, lane, released):
        self.lane, self.released = lane, released
        self.stream = self
        self.events, self.waited, self.kept = [], [], 0

    def use(self):
        return nullcontext()

    def wait(self, event):
        self.waited.append(event)

    def keep(self, tensors):
        self.kept += len(list(tensors))

    def begin(self):
        return NotingTiming(self)

    def tick(self):
        pass


class NotingTiming:
    """A task between begin and end: what its stream had been told to wait for, and the event of its end."""

    def __init__(self, stream):
        self.stream, self.waited = stream, set(stream.waited)
        self.error = None

    def end(self):
        self.stream.events.append(self)
        return self

    def wait(self):
        assert self.stream.released.wait(30)
        if self.error is not None:
            raise self.error
        return 0.0, 0.0


class NoFence:
    """Stands in for the fence, which asks CUDA for the caller's streams."""

    def __init__(self, streams, inputs=()):
        pass

    def begin(self):
        return {}

    def end(self, results=()):
        list(results)

    def hand_over(self, tensors):
        list(tensors)


@pytest.fixture
def noting(monkeypatch):
    released = threading.Event()
    streams = {}

    def make_streams(devices, lanes):
        streams.update({Lane(d.name, q): NotingStream(Lane(d.name, q), released) for d in devices for q in Queue})
        return streams

    monkeypatch.setattr(asyncpipe.pipeline.build, "make_streams", make_streams)
    for module in (asyncpipe.pipeline.step, asyncpipe.pipeline.call_backward):
        monkeypatch.setattr(module, "Fence", NoFence)
    yield streams, released
    released.set()


def pipeline(model, schedule="1f1b", checkpoint="always"):
    devices = ["cpu:0", "cpu:1", "cpu:2"]
    return Pipeline(model, devices, microbatches=4, schedule=schedule, checkpoint=checkpoint, loss_fn=mse, in_flight=64)


def order_of_tasks(graph, journal, streams):
    """The event of each task: tasks are reported in the order in which they make events."""
    reported = [event.task for _, event in journal if isinstance(event, TaskIssued)]
    issued = {}
    for lane, stream in streams.items():
        tasks = [task for task in reported if graph.tasks[task].lane == lane]
        issued.update(zip(tasks, stream.events, strict=True))
    return issued


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("schedule", ["backward-first", "1f1b as hint", "split"])
async def test_a_rule_waits_for_completion_and_its_streams_for_events(workload, noting, schedule, checkpoint):
    """Tasks are dispatched after their dependencies completed, and their streams still wait for the events."""
    streams, released = noting
    released.set()
    rule = {"backward-first": BackwardFirst(), "1f1b as hint": HintedSchedule(OneFOneB()), "split": Split()}[schedule]
    model = workload.model()
    async with pipeline(model, rule, checkpoint) as pipe:
        record = (await (await pipe.step(workload.x, workload.target)).completed()).record
    issued = order_of_tasks(record.graph, record.journal, streams)
    at = {(type(event), event.task): k for k, (_, event) in enumerate(record.journal) if hasattr(event, "task")}
    for edge in record.graph.edges():
        assert at[TaskCompleted, edge.dependency] < at[Dispatch, edge.task]
        assert issued[edge.dependency] in issued[edge.task].waited, f"{edge} is not ordered by an event"
    assert workload.worst(model) < 1e-10


class Split(BackwardFirst):
    """Backward first, in halves."""

    splits_backward = True


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
async def test_every_dependency_is_waited_for(workload, noting, before_task, schedule, checkpoint):
    streams, released = noting
    async with pipeline(workload.model(), schedule, checkpoint) as pipe:
        result = await pipe.step(workload.x, workload.target)
        with pytest.raises(AsyncpipeError, match=r"await result\.completed\(\)"):
            _ = result.report
        released.set()
        record = (await result.completed()).record
        assert len(result.report.tasks) == len(record.graph.tasks)
    issued = order_of_tasks(record.graph, record.journal, streams)
    for edge in record.graph.edges():
        assert issued[edge.dependency] in issued[edge.task].waited, f"{edge} is not ordered by an event"
    assert (result.outputs - workload.outputs).abs().max() < 1e-10


async def test_tensors_that_cross_streams_are_kept(workload, noting):
    streams, released = noting
    released.set()
    model = workload.model()
    async with pipeline(model) as pipe:
        await (await pipe.step(workload.x, workload.target)).completed()
    kept = {str(lane): stream.kept for lane, stream in streams.items() if stream.kept}
    # On compute streams: 4 activations and 4 gradients a border, and from the caller 4 inputs and 4 targets.
    assert kept == {"cpu:0/compute": 4 + 4, "cpu:1/compute": 4 + 4, "cpu:2/compute": 4 + 4}
    assert workload.worst(model) < 1e-10
