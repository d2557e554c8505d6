"""The live page in a real browser: values change while a pipeline trains, at any width, without an error."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import pytest
import torch
from browser_helpers import NEEDS_A_BROWSER, driven
from torch import nn

from asyncpipe import Pipeline
from asyncpipe.core.engine.events import Outcome
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.records.step_notes import StepNotes
from asyncpipe.core.records.worker_notes import EdgeTraffic, WorkerChange, WorkerNotes, WorkerState, WorkerUse
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.observe.live import LiveView, serve_live

pytestmark = [*NEEDS_A_BROWSER, pytest.mark.long]


@asynccontextmanager
async def training(view: LiveView) -> AsyncIterator[None]:
    """Trains a small pipeline of four stages on two devices during the block."""
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(128, 128), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(128, 4))
    x, target = torch.randn(64, 128), torch.randint(4, (64,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    async def steps() -> None:
        while True:
            start = perf_counter()
            result = await pipe.step(x, target, return_outputs=False)
            optimizer.step()
            optimizer.zero_grad()
            await result.completed()
            assert result.loss is not None
            view.training_step(result.loss.item(), 64, 64 * 128, perf_counter() - start)

    async with Pipeline(
        model,
        ["cpu:0", "cpu:1"],
        microbatches=8,
        schedule="interleaved",
        stages=4,
        loss_fn=nn.functional.cross_entropy,
        observers=[view],
    ) as pipe:
        trainer = asyncio.create_task(steps())
        try:
            yield
        finally:
            trainer.cancel()
            await asyncio.wait([trainer])
    assert trainer.cancelled(), trainer.exception()


def show_workers(view: LiveView) -> None:
    """Let the page show two workers, one of which is lost, by a step that is no other's; later ones tell of none."""
    use = WorkerUse(5_000_000, {"right": EdgeTraffic(7, 2048, 0.25)})
    notes = StepNotes(workers={"left": WorkerNotes(WorkerState.UP, 71, ("cpu:0",), 0.001, 0.0, use)})
    graph = lower(find_schedule("gpipe"), Shape(2, 2, 2), devices=["cpu:0", "cpu:1"])
    view.step_completed(replace(simulate(graph), notes=notes, outcome=Outcome.CANCELLED))
    view.worker_changed(WorkerChange("right", WorkerState.LOST, 72, ("cpu:1",), how="was killed by SIGKILL"))


async def test_the_page_in_a_browser(tmp_path: Path) -> None:
    view = LiveView("demo", steps=100_000)
    show_workers(view)
    async with training(view), AsyncExitStack() as servers:
        server = await servers.enter_async_context(serve_live(view, 0))

        async def reopen() -> None:
            await servers.enter_async_context(serve_live(view, server.port))

        answers = {"close": servers.aclose, "open": reopen}
        facts = await driven("live.mjs", server.url, tmp_path / "profile", answers)
    assert facts["wrong"] == []
    first, second = facts["first"], facts["second"]
    assert (first["connection"], first["job"]) == ("live", "demo")
    assert "interleaved · 4 stages · 2 devices · 8 micro-batches · step " in first["about"]
    assert "of 100,000" in first["about"]
    assert first["ideal"].startswith("ideal ")
    assert "Stage" in first["finding"]
    for name in ("loss", "rate", "seconds", "about", "starts"):
        assert first[name] != second[name], name
    assert second["curve"] == 1
    # 4 stages and 8 micro-batches: a forward and a backward each, recomputes, and copies both ways over 3 borders.
    assert second["tasks"] >= 2 * 4 * 8 + 2 * 3 * 8
    assert {"F", "B", "C"} <= set(second["kinds"])
    assert [row.split(" cpu:")[0] for row in second["stages"]] == ["Stage 0", "Stage 1", "Stage 2", "Stage 3"]
    assert all(width > 1 for width in second["bars"])
    assert second["workers"] == [
        "left up 71 cpu:0 4.77 MiB 1.00 ms → right: 2 KiB in 7 messages, 250 ms without credit",
        "right lost: was killed by SIGKILL 72 cpu:1 – –",
    ]
    assert second["reasons"][2] == "waits for data on its way"
    for size, seen in facts["sizes"].items():
        assert seen["scroll"] <= seen["width"] == int(size.split()[0]), size
        assert seen["widest"] <= seen["width"], size
    hovered, keyed, after = (facts["pointed"][name] for name in ("hovered", "keyed", "after"))
    assert "micro-batch" in hovered
    assert "on cpu:" in hovered
    assert keyed.startswith("forward, micro-batch 0: stage 0 on cpu:0")
    assert after == ""
    assert re.fullmatch(r"step \d+, loss [\d.]+", facts["pointed"]["read"])
    assert facts["ended"]["connection"] == "run ended"
    assert facts["ended"]["tasks"] > 0
    assert facts["again"]["connection"] == "live"
