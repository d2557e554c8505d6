"""The asynchronous path without a GPU: streams that only note what is ordered behind what.

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

import asyncpipe.build
import asyncpipe.call
import asyncpipe.step
from asyncpipe import Pipeline, TaskError
from asyncpipe.core.task import Lane, Queue
from asyncpipe.errors import AsyncpipeError
from asyncpipe.ops.stream import CudaStream

mse = nn.functional.mse_loss


class NotingStream(CudaStream):
    """A stream that notes waits and ends; its tasks are done when ``released``."""

    device = torch.device("cpu")

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

    def end(self, stream):
        assert stream is self.stream
        self.stream.events.append(self)
        return self

    def wait(self):
        assert self.stream.released.wait(30)
        if self.error is not None:
            raise self.error
        return 0.0, 0.0


class NoFence:
    """Stands in for the fence, which asks CUDA for the caller's streams."""

    def __init__(self, streams):
        pass

    def begin(self):
        pass

    def end(self, results=()):
        list(results)


@pytest.fixture
def noting(monkeypatch):
    released = threading.Event()
    streams = {}

    def make_streams(devices):
        streams.update({Lane(d.name, q): NotingStream(Lane(d.name, q), released) for d in devices for q in Queue})
        return streams

    monkeypatch.setattr(asyncpipe.build, "make_streams", make_streams)
    for module in (asyncpipe.step, asyncpipe.call):
        monkeypatch.setattr(module, "Fence", NoFence)
    yield streams, released
    released.set()


def pipeline(model, schedule="1f1b", checkpoint="always"):
    devices = ["cpu:0", "cpu:1", "cpu:2"]
    return Pipeline(model, devices, microbatches=4, schedule=schedule, checkpoint=checkpoint, loss_fn=mse, in_flight=64)


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
async def test_every_dependency_is_waited_for(workload, noting, before_task, schedule, checkpoint):
    streams, released = noting
    issued = {}
    async with pipeline(workload.model(), schedule, checkpoint) as pipe:
        result = await pipe.step(workload.x, workload.target)
        with pytest.raises(AsyncpipeError, match=r"await result\.completed\(\)"):
            _ = result.report
        # Per lane, tasks are issued in the order of their dispatch; so are their events.
        dispatched = [event.task for _, event in pipe._driver._state._steps[0].journal if hasattr(event, "task")]
        graph = result._execution.graph
        for lane, stream in streams.items():
            tasks = list(dict.fromkeys(t for t in dispatched if graph.tasks[t].lane == lane))
            issued.update(zip(tasks, stream.events, strict=True))
        released.set()
        assert len((await result.completed()).report.tasks) == len(graph.tasks)
    for edge in graph.edges():
        assert issued[edge.dependency] in issued[edge.task].waited, f"{edge} is not ordered by an event"
    assert (result.outputs - workload.outputs).abs().max() < 1e-10


async def test_tensors_that_cross_streams_are_kept(workload, noting):
    streams, released = noting
    released.set()
    model = workload.model()
    async with pipeline(model) as pipe:
        await (await pipe.step(workload.x, workload.target)).completed()
    kept = {str(lane): stream.kept for lane, stream in streams.items() if stream.kept}
    # On compute streams: 4 activations and 4 gradients a border, and from the caller 4 inputs (with what they were
    # moved to) and 4 targets (likewise).
    assert kept == {"cpu:0/compute": 8 + 4, "cpu:1/compute": 4 + 4, "cpu:2/compute": 4 + 8}
    assert workload.worst(model) < 1e-10


async def test_gradients_may_be_used_before_completion(workload, noting):
    model = workload.model()
    async with pipeline(model) as pipe:
        result = await pipe.step(workload.x, workload.target)
        assert workload.worst(model) < 1e-10
        noting[1].set()
        await result.completed()


async def test_a_device_error_after_the_issue_comes_with_completion(workload, noting):
    streams, released = noting
    async with pipeline(workload.model()) as pipe:
        result = await pipe.step(workload.x, workload.target)
        streams[Lane("cpu:1", Queue.COMPUTE)].events[2].error = RuntimeError("device-side assert")
        released.set()
        with pytest.raises(TaskError, match="device-side assert"):
            await result.completed()
