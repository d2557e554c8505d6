"""What the model has learned: its loss on batches that training never saw, and a text that it makes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import NamedTuple

from torch import Tensor

from asyncpipe.pipeline.pipeline import Pipeline
from asyncpipe.train.batches import DataError
from asyncpipe.train.blocking_calls import DedicatedThread, in_thread
from asyncpipe.train.progress import ProgressSink
from asyncpipe.train.randomness import RunRandom
from asyncpipe.train.workload import Batch, Forward, Workload

__all__ = ["EvaluationResult", "evaluate_and_sample"]


class EvaluationResult(NamedTuple):
    """What the model shows when it is trained; ``None`` where the workload has no way to, or the run was stopped."""

    evaluation: float | None = None
    sample: str | None = None


async def evaluate_and_sample(
    pipe: Pipeline,
    workload: Workload,
    batch_size: int,
    *,
    thread: DedicatedThread,
    random: RunRandom,
    progress: ProgressSink,
    stopping: Callable[[], bool],
) -> EvaluationResult:
    """Through ``pipe``, which is in evaluation mode from then on; ``thread`` makes the batches.

    Raises ``TaskError``, ``DataError`` for batches that cannot be made, and what the workload's sampler raises.
    """
    pipe.eval()
    evaluation = sample = None
    if workload.held_out is not None and not stopping():
        progress.entered("evaluating")
        held_out = workload.held_out
        batches = _HeldOut(thread, random, lambda: held_out(batch_size))
        evaluation = await _evaluate(pipe, batches, stopping)
    if workload.sample is not None and not stopping():
        progress.entered("sampling")
        sample = await random.drawn_by(_sample(pipe, workload.sample, stopping))
    return EvaluationResult(evaluation, sample)


class _HeldOut:
    """Batches, one after the other, that the run's thread makes."""

    def __init__(self, thread: DedicatedThread, random: RunRandom, make: Callable[[], Iterable[Batch]]) -> None:
        self._thread = thread
        self._random = random
        self._make = make
        self._iterator: Iterator[Batch] | None = None
        self._made = 0

    async def next(self) -> Batch | None:
        """The next one; ``None`` behind the last."""
        return await self._thread.run(self._next)

    def _next(self) -> Batch | None:
        try:
            with self._random.drawing():
                if self._iterator is None:
                    self._iterator = iter(self._make())
                batch = next(self._iterator, None)
        except Exception as error:
            raise DataError.of("the job's held-out data", self._made, error) from error
        self._made += 1
        return batch


async def _evaluate(pipe: Pipeline, batches: _HeldOut, stopping: Callable[[], bool]) -> float | None:
    """Mean loss over the held-out batches, weighted by their sizes."""
    total = samples = 0.0
    while (batch := await batches.next()) is not None:
        x, target = batch
        result = await pipe.step(x, target, return_outputs=False)
        assert result.loss is not None
        total += await in_thread(result.loss.item) * len(x)
        samples += len(x)
        if stopping():
            return None
    return total / samples if samples else None


class _Stopped(Exception):
    """Ends a sampler, which nobody else can ask to."""


async def _sample(
    pipe: Pipeline, sample: Callable[[Forward], Awaitable[str]], stopping: Callable[[], bool]
) -> str | None:
    async def forward(x: Tensor) -> Tensor:
        if stopping():
            raise _Stopped
        outputs: Tensor = (await pipe.step(x)).outputs
        return outputs

    try:
        return await sample(forward)
    except _Stopped:
        return None
    except SystemExit as error:
        # It is on the loop, which would end, and with it all other runs.
        raise RuntimeError(f"{error!r} was raised by the sampler") from error
