"""What follows the training steps: the loss on held-out batches, and a text that the model generates."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

from asyncpipe.ops.device.copies import HostCopy
from asyncpipe.pipeline.pipeline import Pipeline
from asyncpipe.train.batches import data_errors
from asyncpipe.train.blocking_calls import DedicatedThread, in_thread
from asyncpipe.train.randomness import RunRandom
from asyncpipe.train.workload import Batch, Forward, sample_count

__all__ = ["evaluate", "sample_text"]


async def evaluate(
    pipe: Pipeline,
    held_out: Callable[[], Iterable[Batch]],
    thread: DedicatedThread,
    random: RunRandom,
    stopping: Callable[[], bool],
    weight: Callable[[Batch], float] | None = None,
) -> float | None:
    """The mean loss over the ``held_out`` batches, which ``thread`` makes, weighted by ``weight``, else by their sizes.

    ``None`` if there are none, or ``stopping`` has returned true. Raises ``TaskError``, and ``DataError`` for batches
    that cannot be made.
    """
    batches: Iterator[Batch] | None = None
    made = 0

    def next_batch() -> Batch | None:
        nonlocal batches
        with data_errors("the job's held-out data", made), random.drawing():
            if batches is None:
                batches = iter(held_out())
            return next(batches, None)

    total = weights = 0.0
    while (batch := await thread.run(next_batch)) is not None:
        made += 1
        x, target = batch
        result = await pipe.step(x, target, return_outputs=False)
        assert result.loss is not None
        counts = sample_count(x) if weight is None else weight(batch)
        total += (await in_thread(HostCopy(result.loss).wait)).item() * counts
        weights += counts
        if stopping():
            return None
    return total / weights if weights else None


class _SamplingStopped(Exception):
    """Ends a sampler from its forward call, because the run was stopped."""


async def sample_text(
    pipe: Pipeline, sample: Callable[[Forward], Awaitable[str]], stopping: Callable[[], bool]
) -> str | None:
    """The text that ``sample`` generates with the pipeline; ``None`` if ``stopping`` has returned true.

    Raises ``TaskError``, and what ``sample`` raises.
    """

    async def forward(x: Any) -> Any:
        if stopping():
            raise _SamplingStopped
        return (await pipe.step(x)).outputs

    try:
        return await sample(forward)
    except _SamplingStopped:
        return None
    except SystemExit as error:
        # The sampler runs on the event loop, which a SystemExit would end, together with all other runs.
        raise RuntimeError(f"{error!r} was raised by the sampler") from error
