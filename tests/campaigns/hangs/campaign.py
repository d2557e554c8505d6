"""Runs cases: a pipeline trains, something is made to hang, and the error must say what.

Several lanes run side by side, since cases mostly wait for the watchdog. Each has a pool that its cases share: workers
that are killed are started anew by the next case, the others live through many.
"""

from __future__ import annotations

import asyncio
import logging
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
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
from asyncpipe.runtime.watchdog import Watchdog
from asyncpipe.testing import shape_edges
from tests.campaigns.hangs.cases import KINDS, MAPPING, Expected, Layout, draw_layout, draw_plant
from tests.campaigns.hangs.planted import ENTRY, Plant

__all__ = ["Figures", "Lane", "lane", "run_campaign"]

FLOOR = 3.0
"""Seconds after which the watchdog may take something for hung."""
LONGEST = 90.0
"""Seconds for a case. A worker that is started beside much else takes some."""
GOOD_STEPS = 2
"""Before something hangs, so that it is known how long tasks take."""
MOST_STEPS = 4
"""In which something hangs: credits that are missing may be those of the next step."""
WIDTH = 6


@dataclass
class Figures:
    """What was seen."""

    right: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """By kind: from the hang to the error."""

    def __str__(self) -> str:
        lines = []
        for kind, seconds in sorted(self.seconds.items()):
            mean, most = sum(seconds) / len(seconds), max(seconds)
            lines.append(f"{self.right[kind]:4} {kind}: named rightly, {mean:.1f} s to the error, {most:.1f} s at most")
        return "\n".join([*lines, f"{sum(self.right.values())} named rightly, {len(self.wrong)} not", *self.wrong])


class _Records:
    """An observer that knows the graph of the steps."""

    def __init__(self) -> None:
        self.graph: TaskGraph | None = None

    def step_completed(self, record: StepRecord) -> None:
        self.graph = record.graph


class _Last(nn.Module):
    """The first layer's weight once more."""

    def __init__(self, first: nn.Linear) -> None:
        super().__init__()
        self.weight = first.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def _pipeline(layout: Layout, pool: DevicePool, records: _Records) -> Pipeline:
    torch.manual_seed(0)
    first = nn.Linear(WIDTH, WIDTH)
    stages: list[nn.Module] = [first, *(nn.Linear(WIDTH, WIDTH) for _ in range(layout.stages - 1))]
    if layout.has_tie:
        stages[-1] = _Last(first)
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

    def __init__(self, pool: DevicePool, folder: Path, tell: Callable[[str], object]) -> None:
        self._pool = pool
        self._note = folder / "note"
        self._tell = tell

    async def run(self, kind: str, seed: int, figures: Figures, workers: int | None = None) -> None:
        """One case, over so many workers."""
        chance = random.Random(seed)
        layout = draw_layout(chance, workers)
        try:
            async with asyncio.timeout(LONGEST):
                expected, said, seconds = await self._hang(kind, chance, layout)
        except Exception as error:  # noqa: BLE001 - the finding
            expected, said, seconds = None, error, 0.0
        about = f"{kind} {seed}, {layout}: expected {expected}"
        if isinstance(said, HangError) and expected is not None and _is_right(said, expected):
            figures.right[kind] += 1
            figures.seconds.setdefault(kind, []).append(seconds)
            self._tell(f"{kind} {seed} on {layout.schedule}, after {seconds:.1f} s: {said.story}")
        else:
            figures.wrong.append(f"{about}: {type(said).__name__}: {said}")
            self._tell(f"WRONG {about}: {type(said).__name__}: {said.story if isinstance(said, HangError) else said}")

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
async def lane(tell: Callable[[str], object], *, is_shaped: bool = False, floor: float = FLOOR) -> AsyncIterator[Lane]:
    """A lane with its pool. Where edges are shaped, devices take no messages themselves."""
    with patch.object(workers, "ENTRY", ENTRY), tempfile.TemporaryDirectory() as folder:
        pool = DevicePool(workers=MAPPING)
        if is_shaped:
            shape_edges(pool)
        async with pool, Watchdog(pool.driver, floor=floor):
            yield Lane(pool, Path(folder), tell)


async def run_campaign(seed: int, cases: Iterable[int], lanes: int, tell: Callable[[str], object]) -> Figures:
    """What comes of these cases of the campaign of ``seed``, as many at a time as there are lanes."""
    torch.set_num_threads(1)
    logging.getLogger("asyncpipe").setLevel(logging.CRITICAL)
    figures, rest = Figures(), iter(cases)

    async def work(number: int) -> None:
        async with lane(tell, is_shaped=bool(number % 2)) as mine:
            for case in rest:
                await mine.run(KINDS[case % len(KINDS)], seed * 1_000_000 + case, figures)

    await asyncio.gather(*(work(number) for number in range(lanes)))
    return figures
