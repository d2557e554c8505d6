"""Training steps that overlap: each stage is updated in the step, and begins the next one when it is.

::

    batches   1 ─▶ 2 ─▶ 3 ────────▶ 4 ────────▶ … ─▶ none, while something is wanted between two steps
    devices   [ step 1 ···· ][ step 2 ···· ][ step 3 ···· ]     snapshot, another schedule
    figures                   of 1           of 2          of 3

The random numbers are those of steps one by one: a step draws its number when it is cut, and only then is the next
batch begun. A snapshot waits for the steps that have begun and for their figures, so it is never behind a step whose
loss or gradients are not finite.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

from asyncpipe.errors import TaskError
from asyncpipe.pipeline.result import StepResult
from asyncpipe.pipeline.steps import Batch
from asyncpipe.train.adamw import StagedAdamW, learning_rate
from asyncpipe.train.batches import Mark
from asyncpipe.train.snapshots.run_state import RunState
from asyncpipe.train.training_loop import StepUnderWay, TrainingLoop
from asyncpipe.train.workload import Resumable, sample_count

__all__ = ["OverlappingSteps"]


class _Taken(NamedTuple):
    """A batch that ``Pipeline.steps`` has taken, of a step without a result yet."""

    began: float
    samples: int
    rate: float
    mark: Mark | None
    """Where the data was before it."""


@dataclass(kw_only=True, eq=False)
class OverlappingSteps(TrainingLoop):
    """Each step begins behind the one before, while that one computes. A failed step ends the run."""

    optimizer: StagedAdamW
    _taken: deque[_Taken] = field(default_factory=deque, init=False)
    _advanced: int = field(default=0, init=False)
    _at_end: bool = field(default=False, init=False)

    async def _go_on(self) -> bool:
        await self._follow_orders()
        async with (
            aclosing(self._batches()) as batches,
            aclosing(self.pipe.steps(batches, return_outputs=False)) as results,
        ):
            while (result := await self._next(results)) is not None:
                began, samples, rate, _ = self._taken.popleft()
                update = self.optimizer.take(result, rate)
                self.under_way.append(
                    StepUnderWay(result=result, update=update, rate=rate, began=began, samples=samples)
                )
                await self.settle(self.ahead)
        return not self._at_end

    async def _next(self, results: AsyncGenerator[StepResult, None]) -> StepResult | None:
        try:
            return await anext(results, None)
        except TaskError as error:
            number = self.begun + 1
            await self.settle()  # An error of a step before this one comes first.
            await self.retries.give_up(error, number)

    async def _batches(self) -> AsyncGenerator[Batch, None]:
        """Batches, until none is left or something is wanted between two steps."""
        while (number := self.begun + len(self._taken)) < self.job.training.steps:
            if await self.snapshots.is_due(number):
                return
            start = perf_counter()
            batch = await self.batches.next()
            if batch is None or self.stopping():
                self._at_end = True
                return
            if self.orders.wants_schedule:
                return  # The same batch comes again.
            rate = learning_rate(number, self.job.training)
            self._taken.append(_Taken(start, sample_count(batch[0]), rate, self.batches.mark))
            # In the loop's next turn, when the step has drawn its number; at the latest when the next batch is wanted.
            asyncio.get_running_loop().call_soon(self._advance, number + 1)
            yield Batch(*batch, learning_rate=rate)
            self._advance(number + 1)

    def states_after_last_step(self) -> Mapping[str, Resumable]:
        if not self._taken:
            return self.states
        return {**self.states, "run": RunState(self.meter, self.batches, self._taken[0].mark)}

    def _advance(self, taken: int) -> None:
        """Begin to make the next batch, if that is not done already after this one."""
        if self._advanced < taken:
            self._advanced = taken
            self.batches.advance(more=taken < self.job.training.steps)
