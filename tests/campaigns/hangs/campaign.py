"""Runs cases: a pipeline trains, something is made to hang, and the error must say what.

Several lanes run side by side, since cases mostly wait for the watchdog. Each has a pool that its cases share: workers
that are killed are started anew by the next case, the others live through many.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor, nn

from asyncpipe import Batch, DevicePool, Pipeline
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.hangs.roots import HangState
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.errors import AsyncpipeError, HangError, WorkerLostError
from asyncpipe.pipeline import workers
from tests.campaigns.hangs.cases import KINDS, MAPPING, Expected, Layout, draw_layout, draw_plant
from tests.campaigns.hangs.planted import ENTRY, SHAPED_ENTRY, Plant
from tests.campaigns.harness import Campaign, Run, Verdict
from tests.campaigns.models.layers import TiedOut
from tests.support.shaped_edges import shape_edges

__all__ = ["CAMPAIGN", "Lane", "lane"]

FLOOR = 3.0
"""Seconds after which the watchdog may take something for hung."""
LONGEST = 90.0
"""Seconds for a case. A worker that is started beside much else takes some."""
GOOD_STEPS = 2
"""Before something hangs, so that it is known how long tasks take."""
MOST_STEPS = 4
"""In which something hangs: credits that are missing may be those of the next step."""
WIDTH = 6


class _Records:
    """An observer that knows the graph of the steps."""

    def __init__(self) -> None:
        self.graph: TaskGraph | None = None

    def step_completed(self, record: StepRecord) -> None:
        self.graph = record.graph


def _pipeline(layout: Layout, pool: DevicePool, records: _Records) -> Pipeline:
    torch.manual_seed(0)
    first = nn.Linear(WIDTH, WIDTH)
    stages: list[nn.Module] = [first, *(nn.Linear(WIDTH, WIDTH) for _ in range(layout.stages - 1))]
    if layout.has_tie:
        stages[-1] = TiedOut(first.weight)
    return Pipeline(
        nn.Sequential(*(nn.Sequential(stage, nn.Tanh()) for stage in stages)),
        list(layout.devices),
        pool=pool,
        microbatches=layout.microbatches,
        schedule=layout.schedule,
        order=layout.order,  # type: ignore[arg-type]
        checkpoint=layout.checkpoint,
        balance=[1] * layout.stages,
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        observers=[records],
    )


class Lane:
    """Runs cases one after the other. ``lane`` makes one."""

    def __init__(self, pool: DevicePool, folder: Path) -> None:
        self._pool = pool
        self._note = folder / "note"

    async def run(self, seed: int, kind: str, run: Run, workers: int | None = None) -> None:
        """One case, over so many workers."""
        chance = random.Random(seed)
        layout = draw_layout(chance, workers)
        try:
            async with asyncio.timeout(LONGEST):
                expected, said, seconds = await self._hang(kind, chance, layout)
        except Exception as error:  # noqa: BLE001 - the finding
            expected, said, seconds = None, error, 0.0
        about = f"{kind}, {layout}: expected {expected}"
        if isinstance(said, HangError) and expected is not None and _is_right(said, expected):
            run.report.seconds[f"from a hang by {kind} to its error"].append(seconds)
            run.add(seed, Verdict("right", label=f"{kind}: named rightly"))
        else:
            story = said.story if isinstance(said, HangError) else said
            run.add(seed, Verdict("wrong", f"{type(said).__name__}: {story}\n{about}"))

    async def _hang(
        self, kind: str, chance: random.Random, layout: Layout
    ) -> tuple[Expected, BaseException | None, float]:
        records, group = _Records(), self._pool.workers
        assert group is not None
        self._note.unlink(missing_ok=True)
        async with _pipeline(layout, self._pool, records) as pipe:
            for _ in range(GOOD_STEPS):
                await pipe.step(*_batch(layout))
            assert records.graph is not None
            plant, expected = draw_plant(kind, chance, records.graph, group.numbers, self._note)
            await self._plant(plant)
            try:
                await _train(pipe, layout)
            except AsyncpipeError as error:
                said: AsyncpipeError | None = error
                if isinstance(error, WorkerLostError):
                    said = error.hang
                    if expected.state is HangState.SILENT and f"{expected.task} on {expected.device}" in error.running:
                        # All that its devices ran was stopped, and the sentence names one of it.
                        expected = replace(expected, task="", device="")
                seconds = time.perf_counter() - float(self._note.read_text())
                return expected, said or error, seconds
            finally:
                await self._plant(Plant())
        return expected, None, 0.0

    async def _plant(self, plant: Plant) -> None:
        """Tell the workers that are there."""
        group = self._pool.workers
        assert group is not None
        await self._pool.run(_ask_all([worker for worker in group.up.values() if worker.lost is None], plant))


async def _ask_all(there: Iterable[object], plant: Plant) -> None:
    await asyncio.gather(*(worker.ask(plant) for worker in there), return_exceptions=True)  # type: ignore[attr-defined]


def _batch(layout: Layout) -> tuple[Tensor, Tensor]:
    return torch.randn(2 * layout.microbatches, WIDTH), torch.randn(2 * layout.microbatches, WIDTH)


async def _train(pipe: Pipeline, layout: Layout) -> None:
    if layout.overlaps:
        async for _ in pipe.steps([Batch(*_batch(layout)) for _ in range(MOST_STEPS)]):
            pass
    else:
        for _ in range(MOST_STEPS):
            await pipe.step(*_batch(layout))


def _is_right(said: HangError, expected: Expected) -> bool:
    if (said.state, said.worker) != (expected.state.value, expected.worker):
        return False
    if expected.task and (said.task_id, said.device) != (expected.task, expected.device):
        return False
    return not expected.peer or said.peer == expected.peer


@asynccontextmanager
async def lane(*, is_shaped: bool = False, floor: float = FLOOR) -> AsyncIterator[Lane]:
    """A lane with its pool. Where edges are shaped, devices take no messages themselves."""
    with patch.object(workers, "ENTRY", SHAPED_ENTRY if is_shaped else ENTRY), tempfile.TemporaryDirectory() as folder:
        pool = DevicePool(workers=MAPPING, hang_seconds=floor)
        if is_shaped:
            shape_edges(pool)
        async with pool:
            yield Lane(pool, Path(folder))


async def _run(run: Run) -> None:
    rest = run.seeds()

    async def work(number: int) -> None:
        async with lane(is_shaped=bool(number % 2)) as mine:
            for seed in rest:
                await mine.run(seed, KINDS[seed % len(KINDS)], run)

    await asyncio.gather(*(work(number) for number in range(run.options.lanes)))


CAMPAIGN = Campaign("hangs", _run, {"cases": 200, "case": -1, "lanes": (4, "how many cases run side by side")})
