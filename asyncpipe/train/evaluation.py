"""What follows the training steps: the loss on held-out batches, and a text that the model generates."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple, TypeVar

from torch import Tensor

from asyncpipe.pipeline.pipeline import Pipeline
from asyncpipe.train.batches import DataError
from asyncpipe.train.blocking_calls import DedicatedThread, in_thread
from asyncpipe.train.progress import ProgressSink
from asyncpipe.train.randomness import RunRandom
from asyncpipe.train.workload import Batch, Forward, Workload

__all__ = ["EvaluationResult", "evaluate_and_sample"]

_T = TypeVar("_T")


class EvaluationResult(NamedTuple):
    """Held-out loss and generated text; ``None`` if the workload has no way to make it, or the run was stopped."""

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
    """Evaluate and sample with ``pipe``, which stays in evaluation mode; ``thread`` makes the batches.

    Raises ``TaskError``, ``DataError`` for batches that cannot be made, and what the workload's sampler raises.
    """
    pipe.eval()
    evaluation = sample = None
    if workload.held_out is not None and not stopping():
        progress.entered("evaluating")
        held_out = workload.held_out
        evaluation = await _evaluate(pipe, lambda: held_out(batch_size), thread, random, stopping)
    if workload.sample is not None and not stopping():
        progress.entered("sampling")
        sample = await random.drawn_by(_sample(pipe, workload.sample, stopping))
    return EvaluationResult(evaluation, sample)


async def _evaluate(
    pipe: Pipeline,
    make_batches: Callable[[], Iterable[Batch]],
    thread: DedicatedThread,
    random: RunRandom,
    stopping: Callable[[], bool],
) -> float | None:
    """Mean loss over the held-out batches, weighted by their sizes."""
    made = 0

    def guarded(function: Callable[[], _T]) -> _T:
        try:
            with random.drawing():
                return function()
        except Exception as error:
            raise DataError.of("the job's held-out data", made, error) from error

    total = samples = 0.0
    batches = await thread.run(lambda: guarded(lambda: iter(make_batches())))
    while (batch := await thread.run(lambda: guarded(lambda: next(batches, None)))) is not None:
        made += 1
        x, target = batch
        result = await pipe.step(x, target, return_outputs=False)
        assert result.loss is not None
        total += await in_thread(result.loss.item) * len(x)
        samples += len(x)
        if stopping():
            return None
    return total / samples if samples else None


class _SamplingStopped(Exception):
    """Ends a sampler from its forward call, because the run was stopped."""


async def _sample(
    pipe: Pipeline, sample: Callable[[Forward], Awaitable[str]], stopping: Callable[[], bool]
) -> str | None:
    async def forward(x: Tensor) -> Tensor:
        if stopping():
            raise _SamplingStopped
        outputs: Tensor = (await pipe.step(x)).outputs
        return outputs

    try:
        return await sample(forward)
    except _SamplingStopped:
        return None
    except SystemExit as error:
        # The sampler runs on the event loop, which a SystemExit would end, together with all other runs.
        raise RuntimeError(f"{error!r} was raised by the sampler") from error
