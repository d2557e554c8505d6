"""What a job's entry returns: the model, where its batches come from, and how it shows what it has learned."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import Generator, Tensor, nn

__all__ = ["Batch", "Forward", "Workload"]

Batch = tuple[Tensor, Tensor]
"""A mini-batch and its target, both with the batch as their first dimension."""

Forward = Callable[[Tensor], Awaitable[Tensor]]
"""Maps an input to the model's output, through the pipeline in eval mode and without gradients."""


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """What to train, on what. The entry named by a job file returns one, or raises ``OptionError`` for a
    parameter that it cannot use.

    ``model`` is whatever ``asyncpipe.Pipeline`` takes. ``loss_fn(output, target)`` gives a scalar that is a
    mean over the samples.
    """

    model: nn.Module
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    batches: Callable[[int, Generator], Iterator[Batch]]
    """``batches(batch_size, generator)`` yields mini-batches; training takes one a step, and ends where they end.

    They are made on the event loop, so one takes well under a millisecond; all randomness comes from the
    generator, so the same seed gives the same batches.
    """
    tokens_per_sample: int = 1
    """How many tokens (characters, words, pixels …) a sample counts for in tokens per second."""
    held_out: Callable[[int], Iterable[Batch]] | None = None
    """``held_out(batch_size)`` yields the same few mini-batches each time, which training never sees."""
    sample: Callable[[Forward], Awaitable[str]] | None = None
    """Generates a text with the model, for people to read at the end of a run."""
