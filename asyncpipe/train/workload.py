"""What a job's entry returns: the model, the source of its batches, and how to evaluate and sample it.

Threads: the entry, ``batches``, each batch and ``held_out`` run one after the other in the run's dedicated thread, so
they may block. ``sample`` is a coroutine on the run's loop and must not block it. Model and loss function run on the
threads of the devices. All random numbers that they draw through torch follow from the job's seed, whether the run is
alone or not. Python's ``random`` and numpy have generators of the whole process, which are not seeded.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Generator, Tensor, nn

from asyncpipe.ops.model.feed import FromFeed
from asyncpipe.ops.model.flops import FlopCount
from asyncpipe.ops.model.nested import tensors_of
from asyncpipe.ops.model.stage import StagedModel
from asyncpipe.pipeline.pipeline import Pipeline
from asyncpipe.pipeline.saving import Resumable

__all__ = ["Batch", "Forward", "Resumable", "Workload", "sample_count"]

Batch = tuple[Any, Any]
"""A mini-batch, as ``Pipeline.step`` takes it (a tensor, or tensors by name), and its target; the first dimension of
all tensors is the batch."""

Forward = Callable[[Any], Awaitable[Any]]
"""Maps an input to the model's output, through the pipeline in evaluation mode and without gradients."""


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """A model and its data. The entry that a job file names returns one, or raises ``OptionError`` for a parameter
    value that it rejects.

    ``model`` is anything that ``asyncpipe.Pipeline`` takes. ``loss_fn(output, target)`` returns a scalar, the mean over
    the samples. A failed step may be retried, as the job's ``[faults]`` allow. The retry gets the same batch, random
    numbers and buffers, but other state that a module keeps is not reset, nor is a batch that was changed in place.
    """

    model: nn.Module | StagedModel
    loss_fn: Callable[[Any, Any], Tensor | tuple[Tensor, Tensor]]
    batches: Callable[[int, Generator], Iterable[Batch]]
    """``batches(batch_size, generator)`` yields mini-batches; training takes one for each step and ends with them.

    A ``Feed`` in its place makes the batch of a step from the step's number where it is used: in the workers, if the
    stages live there. A run that resumes goes on at its step.

    The next batch is made while a step runs, so making one costs no time if it takes no longer than a step. All
    randomness must come from the generator, so that the same seed gives the same batches. An exception ends the run
    with a ``DataError``.

    A run that resumes after step N finds its position in the data by the first of these ways that applies:

    1. The returned object has ``state_dict`` and ``load_state_dict`` (like torchdata's ``StatefulDataLoader``). Its
       state is restored before ``iter()`` is called, and the generator's state after that, so ``iter()`` must take what
       it draws from the generator at once. The state is read and copied before each batch, so it should be small.
    2. ``memoryless`` is true: the generator's state is restored.
    3. Otherwise N batches are made from the seed and dropped. This is always right, but takes as long as making them.
       If the generator's state then differs from the saved one, a warning is logged.
    """
    tokens_per_sample: int = 0
    """How many tokens (characters, words …) a sample counts for in tokens per second; 0 if it is made of none."""
    held_out: Callable[[int], Iterable[Batch]] | None = None
    """``held_out(batch_size)`` yields the same few mini-batches each time; training does not use them."""
    weight: Callable[[Batch], float] | None = None
    """What the loss of a held-out batch counts in their mean: what its ``loss_fn`` counts. By default its samples."""
    sample: Callable[[Forward], Awaitable[str]] | None = None
    """Generates a text with the model, which is shown at the end of a run."""
    memoryless: bool = False
    """Whether a batch depends on the generator's state only, as in ``while True: yield draw(generator)``.

    False if something is remembered from batch to batch: a permutation for each epoch, a position in a file.
    """
    flops: FlopCount | None = None
    """How much the model computes (``asyncpipe.count_flops``): then a run shows its MFU."""
    states: Mapping[str, Resumable] = field(default_factory=dict)
    """Further states to save in snapshots, each as ``NAME.pt``: an average of the weights, a gradient scaler.

    A name is letters, digits and underscores, and none of ``model``, ``optimizer`` and ``run``.
    """
    finish: Callable[[Pipeline], Path] | None = None
    """Called in the run's thread when all steps are done, with the pipeline that is still open: it may write the model,
    and returns where. A run that is stopped early does not call it."""


def sample_count(x: Any) -> int:
    """How many samples a mini-batch has: a tensor, tensors by name, or what stands for those of a feed."""
    return len(x) if isinstance(x, Tensor | FromFeed) else max(tensor.size(0) for tensor in tensors_of(x))
