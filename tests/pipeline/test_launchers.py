"""Workers that a launcher of the caller's own starts, which are reached by TCP alone."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys

import pytest
import torch
from preloaded import Program
from torch import nn
from worker_helpers import SECONDS, is_there, until

from asyncpipe import DevicePool, Invitation, Pipeline, PlannedWorker
from asyncpipe.errors import DeviceError, OptionError, WorkerLostError
from asyncpipe.ops.device.devices import Device, resolve_devices
from asyncpipe.pipeline.workers import assign_workers, check_transport

pytestmark = pytest.mark.timeout(120)
PROGRAM = "import runpy; runpy.run_module('asyncpipe.worker', run_name='__main__', alter_sys=True)"


class Worker:
    """``python -m asyncpipe.worker``, which reads ``line``."""

    def __init__(self, line):
        reader, self.writer = os.pipe()
        self.program = Program(PROGRAM, stdout=sys.stdout, stderr=sys.stderr, stdin=reader)
        self.pid, self.kill = self.program.pid, self.program.kill
        os.close(reader)
        os.write(self.writer, line)

    async def wait(self):
        return await asyncio.to_thread(self.program.wait)


class OverTcp:
    """A launcher as a user writes one, of processes that share nothing with the controller but the network."""

    def __init__(self):
        self.planned: list[PlannedWorker] = []
        self.invited: list[Invitation] = []
        self.processes: list[Worker] = []
        self.closed = 0

    async def prepare(self, workers):
        self.planned += workers
        if any("nowhere" in worker.hosts for worker in workers):
            raise OptionError("nowhere is no host")
        return "127.0.0.1", 0

    async def start(self, invitation):
        process = Worker(invitation.line())
        self.invited.append(invitation)
        self.processes.append(process)
        return process

    async def close(self):
        self.closed += 1
        for process in self.processes:
            os.close(process.writer)


async def train(devices, **options):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3)).double()
    batches = [(torch.randn(10, 6).double(), torch.randint(3, (10,))) for _ in range(3)]
    async with Pipeline(
        model,
        devices,
        microbatches=4,
        balance=[2, 2],
        loss_fn=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.05),
        **options,
    ) as pipe:
        losses = [result.loss.item() async for result in pipe.steps(batches)]
        return losses, {name: value.clone() for name, value in pipe.state_dict().items()}


async def test_it_is_asked_for_the_workers_of_hosts_and_they_train_to_the_same_bits():
    launcher = OverTcp()
    devices = ["host-a/cpu:0", "host-b/cpu:0"]
    async with DevicePool(workers=launcher) as pool:
        losses, state = await train(devices, pool=pool)
        workers = dict(pool.workers.up)
        assert launcher.planned == [PlannedWorker(name, (name,)) for name in devices]
        assert {worker.pid for worker in workers.values()} == {process.pid for process in launcher.processes}
        assert all(worker.batches is None and worker.running() == () for worker in workers.values())
        # One that is lost is started again.
        launcher.processes[0].kill()
        await until("it is lost", lambda: len(pool.workers.up) == 1)
        (lost,) = [worker.lost for worker in workers.values() if worker.lost is not None]
        assert isinstance(lost, WorkerLostError)
        assert (lost.worker, lost.exit_status) == (launcher.invited[0].name, -signal.SIGKILL)
        assert (await train(devices, pool=pool))[0] == losses
        assert [worker.name for worker in launcher.planned[2:]] == [lost.worker]
        assert not launcher.closed
    assert launcher.closed == 1
    assert not any(is_there(process.pid) for process in launcher.processes)
    threads, expected = await train(["cpu:0", "cpu:1"])
    assert losses == threads
    assert all(torch.equal(state[name], value) for name, value in expected.items())


async def test_what_keeps_it_from_starting_is_raised_and_it_is_closed():
    launcher = OverTcp()
    with pytest.raises(OptionError, match="nowhere is no host"):
        await asyncio.wait_for(train(["nowhere/cpu:0", "host-b/cpu:0"], workers=launcher), SECONDS)
    assert (launcher.closed, launcher.processes) == (1, [])


def test_devices_have_hosts_where_workers_may_be_on_some():
    found = resolve_devices(["a/cuda:1", "b/cuda:1", "b/cuda:1", "b/cpu", "cuda:1"], on_hosts=True)
    assert [(device.name, device.host, str(device.physical)) for device in found] == [
        ("a/cuda:1", "a", "cuda:1"),
        ("b/cuda:1", "b", "cuda:1"),
        ("b/cuda:1#1", "b", "cuda:1"),
        ("b/cpu", "b", "cpu"),
        ("cuda:1", "", "cuda:1"),
    ]
    assert list(assign_workers(found, OverTcp()).values()) == ["a/cuda:1", "b/cuda:1", "b/cuda:1", "b/cpu", "cuda:1"]
    for wrong in ("/cpu:0", "a/", "a/tpu:0"):
        with pytest.raises(DeviceError, match=re.escape(repr(wrong))):
            resolve_devices([wrong], on_hosts=True)
    with pytest.raises(DeviceError, match="'a/cpu:0' names a host"):
        resolve_devices(["a/cpu:0"])
    with pytest.raises(OptionError, match="prepare, start and close"):
        DevicePool(workers=object())


def test_one_gpu_is_one_of_its_host(monkeypatch):
    devices = [Device(name, torch.device("cuda:0")) for name in ("a/cuda:0", "b/cuda:0")]
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    check_transport("nccl", devices, {"a/cuda:0": "a", "b/cuda:0": "b"})
    with pytest.raises(OptionError, match=r"'x' has a/cuda:0, b/cuda:0"):
        check_transport("nccl", devices, {"a/cuda:0": "x", "b/cuda:0": "x"})


def test_an_accelerator_is_counted_once_in_what_is_planned():
    worker = PlannedWorker("w", ("a/cuda:1", "a/cuda:10", "a/cuda:1#1", "a/cuda:2", "a/cpu:0"))
    assert worker.accelerators == ("cuda:1", "cuda:2", "cuda:10")
    assert worker.hosts == ("a",)
