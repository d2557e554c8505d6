"""Checks of errors and of jobs side by side: what one job does must not reach another one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from asyncpipe import DevicePool, Pipeline, Share, SyncPipeline, TaskError
from asyncpipe.ops.device.streams import Fence
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.models import batch, busy_stages, by_parts, delay, mean_square, piped, stage
from benchmarks.gpu.outcome import Outcome, at_least, at_most, check, seen

__all__: list[str] = []


@check("After an error that spoils the GPU: a TaskError, the gradients as they were, and a close that ends?")
def sticky_error(machine: Machine) -> Outcome:
    """An index out of range in a kernel; afterwards each call of CUDA raises."""
    index = 0

    def look_up(x: Tensor) -> Tensor:
        table = torch.zeros(4, dtype=x.dtype, device=x.device)
        return x + table[torch.full((1,), index, device=x.device)]

    def spoiled(fence: Fence, *given: object) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered (emulated)")

    x, raised, result = batch(8).to(machine.device), None, None
    model = nn.Sequential(stage(torch.tanh), stage(look_up))
    pipe = piped(model, machine.two).__enter__()
    pipe.step(x).wait()
    before = [parameter.grad for parameter in model.parameters()]
    index = 10**6
    if not machine.cuda:  # Where a GPU is spoiled, recording an event raises as well.
        setattr(Fence, "end", spoiled)  # noqa: B010 - mypy knows the method's own type
    try:
        result = pipe.step(x)
        result.wait()
    except BaseException as error:  # noqa: BLE001 - which it is, is the question
        raised = error
    same = all(p.grad is then for p, then in zip(model.parameters(), before, strict=True))
    closing = threading.Thread(target=pipe.close, daemon=True)
    closing.start()
    closing.join(15)
    good = isinstance(raised, TaskError) or not machine.cuda
    return Outcome(
        [
            at_least("raises a TaskError", good, 1, promised=True),
            at_least("gradients are kept, or wait() raises", same or result is not None, 1, promised=True),
            at_most("close still runs after 15 s", closing.is_alive(), 0, promised=True),
        ],
        f"{'wait()' if result else 'step()'} raised {type(raised).__name__}: {str(raised)[:80]}",
    )


@check("Does a job go on while another job's kernel does not end?", needs_gpu="a CPU device runs one task at a time")
def hung_kernel(machine: Machine) -> Outcome:
    """One job's kernels take 4 s; another job's step, and a plain kernel, begin beside them."""
    x, hang, seconds = batch(1).to(machine.device), 4.0, 0.001
    usual: dict[str, Any] = {"microbatches": 1, "checkpoint": "never", "loss_fn": mean_square}

    def slow(x: Tensor) -> Tensor:
        return delay(machine, seconds)(x)

    async def run() -> list[float]:
        nonlocal seconds
        hanging, quick = nn.Sequential(stage(slow)), nn.Sequential(stage(delay(machine, 0.001)))
        async with (
            DevicePool() as pool,
            Pipeline(hanging, machine.one, pool=pool, share=Share("hung"), **usual) as hung,
            Pipeline(quick, machine.one, pool=pool, share=Share("beside"), **usual) as beside,
        ):
            for pipe in (hung, beside):
                await (await pipe.step(x)).completed()
            seconds, stream, began = hang / 2, machine.new_stream(), time.perf_counter()
            stuck = await hung.step(x)
            with machine.on(stream):
                machine.busy(0.001)
                stream.record_event().synchronize()
            ended = [time.perf_counter() - began]
            for result in (await beside.step(x), stuck):
                await result.completed()
                ended.append(time.perf_counter() - began)
            return ended

    kernel, step, whole = asyncio.run(run())
    return Outcome(
        [
            seen("a plain kernel beside them ended after", kernel, "s"),
            at_most("another job's step ended after", step, hang / 2, "s", promised=True),
            seen("the job's own kernels took", whole, "s"),
        ]
    )


@check("Do two jobs run at once where each leaves most of the GPU free, and what has each of a full one?", limit=120)
def two_jobs(machine: Machine) -> Outcome:
    """Steps a second of jobs side by side: in one pool, in a pool each, on one stream and on two, by weights."""
    seconds, width, samples = (1.0, 4096, 16384) if machine.cuda else (0.2, 64, 256)
    dtype = torch.bfloat16 if machine.cuda else torch.float32

    def full_stages() -> nn.Sequential:
        made = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2)))
        return made.to(machine.device, dtype)

    def rate(
        ready: threading.Barrier, model: nn.Module, x: Tensor, stream: Any, pool: DevicePool | None, share: Share | None
    ) -> float:
        """Steps a second, each counted once the one before it is completed; without a share, of a plain loop."""

        def step(pipe: SyncPipeline | None) -> Any:
            model.zero_grad()
            if pipe is not None:
                return pipe.step(x, return_outputs=False)
            by_parts(model, x)
            return SimpleNamespace(wait=stream.record_event().synchronize)

        opened = piped(model, machine.two, pool=pool, share=share) if share else nullcontext()
        if share is None:
            model.to(machine.device)
        with machine.on(stream), opened as pipe:
            step(pipe).wait()
            ready.wait(30)
            began, steps, before = time.perf_counter(), 0, step(pipe)
            while time.perf_counter() - began < seconds:
                after = step(pipe)
                before.wait()
                before, steps = after, steps + 1
            return steps / (time.perf_counter() - began)

    async def rates(
        make: Callable[[], nn.Module],
        x: Tensor,
        shares: Sequence[Share | None],
        pool_each: bool = False,
        stream_each: bool = False,
    ) -> list[float]:
        ready, works = threading.Barrier(len(shares)), []
        async with DevicePool() as pool:
            for share in shares:
                stream = machine.new_stream() if stream_each else machine.default_stream()
                own = None if pool_each else pool
                works.append(asyncio.to_thread(rate, ready, make(), x, stream, own, share))
            return await asyncio.gather(*works)

    a, b = Share("a"), Share("b")
    ways: dict[str, tuple[Any, ...]] = {"alone": ([a],), "two": ([a, b],), "a pool each": ([a, b], True)}
    ways |= {"a stream each": ([a, b], False, True), "weights 1, 3": ([a, Share("b", weight=3)],)}
    ways |= {"one in the background": ([a, Share("b", background=True)],)}
    ways |= {"plain loop": ([None], True, True), "two plain loops": ([None, None], True, True)}
    full = torch.randn(samples, width, device=machine.device, dtype=dtype)
    found: dict[str, dict[str, list[float]]] = {}
    idle: Callable[[], nn.Module] = partial(busy_stages, machine, 0.005 if machine.cuda else 0.001)
    for kind, make, x in (("idle", idle, batch(4).to(machine.device)), ("full", full_stages, full)):
        machine.synchronize()
        found[kind] = {way: asyncio.run(rates(make, x, *options)) for way, options in ways.items()}
    slowest = {way: min(each) for way, each in found["idle"].items()}
    ratio = slowest["two"] / slowest["alone"] / (slowest["two plain loops"] / slowest["plain loop"])
    told = {
        kind: ", ".join(f"{way} {' + '.join(f'{each:.1f}' for each in rates)}" for way, rates in by_way.items())
        for kind, by_way in found.items()
    }
    return Outcome(
        [at_least("of an idle GPU two jobs have each, over what two plain loops have", ratio, 0.67)],
        f"steps a second on an idle GPU: {told['idle']}. On a full one: {told['full']}",
    )
