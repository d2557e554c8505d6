"""Parts of steps, as a worker's loop runs them: it never waits for a device."""

import asyncio
import threading

import pytest
import torch
from torch import nn

from asyncpipe import DevicePool, Pipeline, Share
from asyncpipe.core.graph.part import part
from asyncpipe.core.policies.jobs import JobAccount
from asyncpipe.ops.device.devices import resolve_devices
from asyncpipe.ops.device.wire import from_buffers
from asyncpipe.ops.execute import crossings
from asyncpipe.ops.execute.crossings import Crossings
from asyncpipe.ops.execute.reductions import Reductions
from asyncpipe.ops.execute.step_tensors import StepTensors
from asyncpipe.pipeline.pool import Tenancy
from asyncpipe.pipeline.resident.part_step import PartStep
from asyncpipe.pipeline.step_inputs import StepInputs, StepOptions
from asyncpipe.runtime.step_driver import Tenant
from asyncpipe.runtime.waits import drive
from tests.emulated import device as emu
from tests.emulated.helpers import TARGET, Call, X, next_step_hangs, squares

ONE = ["emu:0"]


def begun(parts, tenancy, number, after=None):
    """A part that is a whole step, begun on this loop."""
    inputs = StepInputs.prepare(parts, X, TARGET, StepOptions())
    graph, resources = inputs.graph(parts), parts.resources
    own = part(graph, graph.devices)
    tensors = StepTensors.of(inputs.batch.takes, inputs.batch.targets)
    reductions = Reductions(graph, tensors, resources.sums, resources.guard)
    own_crossings = Crossings(graph, own, tensors, resources.ties, reductions, send=None)
    times = JobAccount("", True, Share())
    step = PartStep(
        *("here", number, parts, inputs, tenancy, own, times, tensors, own_crossings),
        overlaps=True,
        use=None,
        left=None,
    )
    step.begin(None if after is None else after.execution)
    return step


@pytest.mark.promise("GPUs", "Reading the loss of a step does not wait for tasks of the next step.")
async def test_the_loop_of_a_worker_waits_for_no_task_of_the_next_step():
    """Whose kernel hangs on the lane when the first step ends. The loss comes all the same, and is right."""
    pool = DevicePool()
    pool.open_here(None)
    tenancy = Tenancy(pool, resolve_devices(ONE), Tenant(Share()), own=False)
    await drive(tenancy.opened())
    with next_step_hangs() as (hang, kernel), kernel:
        model = nn.Sequential(Call(hang)).double().eval()
        parts = Pipeline(model, ONE, microbatches=1, checkpoint="never", loss_fn=squares)._parts
        emu.synchronized.clear()
        one = begun(parts, tenancy, 0)
        two = begun(parts, tenancy, 1, one)
        ended = await asyncio.wait_for(one.ended(), 20)
        one.settle(keep=True)
        found = from_buffers(ended.result)
        assert float(found.losses.tensors()[0]) == float(squares(X, TARGET))
        assert float((found.outputs[0] - X).abs().max()) == 0
        kernel.close()
        assert (await two.ended()).error is None
        two.settle(keep=True)
    assert threading.current_thread().name not in emu.synchronized
    await drive(tenancy.closed())
    await pool.aclose()


def test_parameters_are_sent_behind_who_still_writes_them_and_nobody_waits():
    """At the begin of a step, to another worker that has a replica."""
    parameter, edge = torch.ones(3, device="emu:0"), emu.Stream()
    with emu.hold(emu.current_stream()):
        parameter.mul_(2)
        ready = crossings._behind_all([None, parameter])
        assert not emu.synchronized
        edge.wait_event(ready)
        with emu.stream(edge):
            assert (parameter * 1).shape == (3,)
    assert crossings._behind_all([torch.ones(3)]) is None
