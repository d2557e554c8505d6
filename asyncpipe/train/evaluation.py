"""What follows the training steps: the loss on held-out batches, and a text that the model generates."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator

from torch import Tensor

from asyncpipe.ops.device.copies import HostCopy
from asyncpipe.pipeline.pipeline import Pipeline
from asyncpipe.train.batches import data_errors
from asyncpipe.train.blocking_calls import DedicatedThread, in_thread
from asyncpipe.train.randomness import RunRandom
from asyncpipe.train.training_loop import AHEAD
from asyncpipe.train.workload import Batch, Forward

__all__ = ["evaluate", "sample_text"]


async def evaluate(
    pipe: Pipeline,
    held_out: Callable[[], Iterable[Batch]],
    thread: DedicatedThread,
    random: RunRandom,
    stopping: Callable[[], bool],
) -> float | None:
    """The mean loss over the ``held_out`` batches, which ``thread`` makes, weighted by their sizes.

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

    total = samples = 0.0
    under_way: deque[tuple[HostCopy, int]] = deque()

    async def read_oldest() -> None:
        nonlocal total, samples
        loss, size = under_way.popleft()
        total += (await in_thread(loss.wait)).item() * size
        samples += size

    while (batch := await thread.run(next_batch)) is not None:
        made += 1
        x, target = batch
        result = await pipe.step(x, target, return_outputs=False)
        assert result.loss is not None
        under_way.append((HostCopy(result.loss), len(x)))
        if len(under_way) > AHEAD:
            await read_oldest()
        if stopping():
            return None
    while under_way:
        await read_oldest()
    return total / samples if samples else None


class _SamplingStopped(Exception):
    """Ends a sampler from its forward call, because the run was stopped."""


async def sample_text(
    pipe: Pipeline, sample: Callable[[Forward], Awaitable[str]], stopping: Callable[[], bool]
) -> str | None:
    """The text that ``sample`` generates with the pipeline; ``None`` if ``stopping`` has returned true.

    Raises ``TaskError``, and what ``sample`` raises.
    """

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
