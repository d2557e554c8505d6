"""What tools show of a pipeline's tasks: names in torch's profiler, copied bytes, memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from asyncpipe import Pipeline
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.errors import OptionError
from asyncpipe.ops.torch_internals import record_function

WIDTH, BATCH = 6, 8


class Keeper:
    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def step_completed(self, record: StepRecord) -> None:
        self.records.append(record)


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(BATCH, WIDTH), torch.randn(BATCH, 3)


def pipeline(observers: Sequence[Keeper] = (), **options: object) -> Pipeline:
    return Pipeline(
        layers(),
        ["cpu:0", "cpu:1"],
        balance=[2, 1],
        microbatches=2,
        loss_fn=nn.functional.mse_loss,
        checkpoint="except_last",
        observers=observers,
        **options,  # type: ignore[arg-type]
    )


def outermost(event: Any) -> str:
    """The name of the outermost event around a profiler's event."""
    while event.cpu_parent is not None:
        event = event.cpu_parent
    return str(event.name)


async def test_the_profiler_sees_every_task_by_name() -> None:
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    async with pipeline() as pipe:
        with profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere, acc_events=True) as profiler:
            result = await pipe.step(*batch())
    seen = {event.name for event in profiler.events()}
    assert seen >= {task.id for task in result.record.graph.tasks}
    computed = {outermost(event) for event in profiler.events() if event.name == "aten::linear"}
    forwards = {task.id for task in result.record.graph.tasks if task.kind.value in "FR"}
    assert {f"F({i},{j})" for i in range(2) for j in range(2)} <= computed <= forwards


async def test_copies_tell_their_bytes_and_devices_their_memory() -> None:
    keeper = Keeper()
    async with pipeline([keeper]) as pipe:
        await pipe.step(*batch())
    (record,) = keeper.records
    copies = [task.number for task in record.graph.tasks if task.kind is TaskKind.COPY]
    # Half of the batch each, activations and their gradients, in float32.
    assert record.notes.copied == dict.fromkeys(copies, BATCH // 2 * WIDTH * 4)
    memory = record.notes.memory
    assert memory.keys() == {"cpu"}
    assert 0 < memory["cpu"].allocated <= memory["cpu"].peak < memory["cpu"].limit


async def test_a_forward_and_its_backward_have_notes_of_their_own() -> None:
    keeper = Keeper()
    with pipeline([keeper]).sync() as pipe:
        x, target = batch()
        nn.functional.mse_loss(pipe(x.requires_grad_()), target).backward()
        pipe.step(x.detach(), target)
    forward, backward, _ = keeper.records
    for record in (forward, backward):
        copies = {task.number for task in record.graph.tasks if task.kind is TaskKind.COPY}
        assert record.notes.copied.keys() == copies
        assert "cpu" in record.notes.memory


@pytest.mark.parametrize("wanted", [True, False])
async def test_memory_is_sampled_after_each_task_where_asked_for(wanted: bool) -> None:
    keeper = Keeper()
    async with pipeline([keeper], sample_memory=wanted) as pipe:
        await pipe.step(*batch())
    (record,) = keeper.records
    assert len(record.notes.samples) == (len(record.graph.tasks) if wanted else 0)
    times = [at for at, _ in record.journal]
    assert all(times[0] <= at <= times[-1] and device == "cpu" for at, device, _ in record.notes.samples)


def test_nvtx_without_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(message: str) -> None:
        raise RuntimeError("NVTX functions not installed")

    monkeypatch.setattr(torch.cuda.nvtx, "mark", missing)
    with pytest.raises(OptionError, match="nvtx=True needs a torch that was built with CUDA"):
        pipeline(nvtx=True)


async def test_nvtx_has_a_range_for_each_task(monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[str] = []
    popped: list[None] = []
    monkeypatch.setattr(torch.cuda.nvtx, "mark", lambda message: None)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", pushed.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: popped.append(None))
    async with pipeline(nvtx=True) as pipe:
        result = await pipe.step(*batch())
    assert sorted(pushed) == sorted(task.id for task in result.record.graph.tasks)
    assert len(popped) == len(pushed)


async def test_a_task_that_fails_ends_its_range(monkeypatch: pytest.MonkeyPatch) -> None:
    depth: list[int] = []
    monkeypatch.setattr(torch.cuda.nvtx, "mark", lambda message: None)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: depth.append(1))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: depth.append(-1))
    async with pipeline(nvtx=True) as pipe:
        with pytest.raises(Exception, match="F\\(0,0\\)"):
            await pipe.step(torch.randn(BATCH, WIDTH + 1), torch.randn(BATCH, 3))
    assert depth
    assert sum(depth) == 0


def test_names_cost_little_in_any_torch() -> None:
    assert record_function is getattr(torch._C._profiler, "_RecordFunctionFast", torch.profiler.record_function)


@pytest.mark.cuda
async def test_memory_of_a_cuda_device_is_its_allocator() -> None:
    keeper = Keeper()
    pipe = Pipeline(
        layers(),
        ["cuda:0", "cuda:0"],
        balance=[2, 1],
        microbatches=2,
        loss_fn=nn.functional.mse_loss,
        observers=[keeper],
        sample_memory=True,
        nvtx=True,
    )
    async with pipe:
        x, target = batch()
        await (await pipe.step(x.cuda(), target.cuda())).completed()
    (record,) = keeper.records
    assert record.notes.memory.keys() == {"cuda:0"}
    assert 0 < record.notes.memory["cuda:0"].allocated <= record.notes.memory["cuda:0"].peak
    assert len(record.notes.samples) == len(record.graph.tasks)
