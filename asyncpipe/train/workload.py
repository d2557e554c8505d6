"""What a job's entry returns: the model, where its batches come from, and how it shows what it has learned.

Who calls what, where: the entry, ``batches``, each batch and ``held_out`` run one after the other in a thread of the
run's own, so they may take their time and hold up nobody else; ``sample`` is a coroutine on the run's loop, which it
must not block; model and loss function run on the devices' threads. All that they draw through torch follows from the
job's seed, alone or among other jobs. Python's ``random`` and numpy are the process's: they are seeded by nobody.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Generator, Tensor, nn

__all__ = ["Batch", "Forward", "Resumable", "Workload"]

Batch = tuple[Tensor, Tensor]
"""A mini-batch and its target, both with the batch as their first dimension."""

Forward = Callable[[Tensor], Awaitable[Tensor]]
"""Maps an input to the model's output, through the pipeline in eval mode and without gradients."""


class Resumable(Protocol):
    """Anything whose state is saved with a run and put back when it goes on, as PyTorch's own parts have it."""

    def state_dict(self) -> dict[str, Any]:
        """Nested dicts, lists and tuples of tensors and plain values."""

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Go on from ``state``, whose tensors are on the CPU."""


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """What to train, on what. The entry named by a job file returns one, or raises ``OptionError`` for a
    parameter that it cannot use.

    ``model`` is whatever ``asyncpipe.Pipeline`` takes. ``loss_fn(output, target)`` gives a scalar that is a
    mean over the samples. A step that fails is tried again, as far as the job's ``[faults]`` allow; batch, random
    numbers and buffers are then what they were, but not what a module keeps elsewhere, or a batch changed in place.
    """

    model: nn.Module
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    batches: Callable[[int, Generator], Iterable[Batch]]
    """``batches(batch_size, generator)`` yields mini-batches; training takes one a step, and ends where they end.

    Each is made while the step of the one before it runs, so making one may take as long as a step at no cost. All
    randomness comes from the generator, so the same seed gives the same batches. Whatever this raises ends the run
    with a ``DataError``.

    A run that goes on from the snapshot of step N finds its place by the first of these that applies:

    1. What it returns has ``state_dict`` and ``load_state_dict`` (as torchdata's ``StatefulDataLoader``): its state
       is saved and put back before ``iter()`` of it, and the generator's state behind that (so what making an
       iterator takes from the generator, it takes at once). It is asked for and copied before every batch, so it is
       small.
    2. ``memoryless`` is true: the generator's state is put back.
    3. Else N batches are made from the seed on and dropped, which is right for all of them, and takes as long as
       making them does. Where the generator's state then is not the one that was saved, a line in the log says so.
    """
    tokens_per_sample: int = 1
    """How many tokens (characters, words, pixels …) a sample counts for in tokens per second."""
    held_out: Callable[[int], Iterable[Batch]] | None = None
    """``held_out(batch_size)`` yields the same few mini-batches each time, which training never sees."""
    sample: Callable[[Forward], Awaitable[str]] | None = None
    """Generates a text with the model, for people to read at the end of a run."""
    memoryless: bool = False
    """Whether the generator's state is all that a batch depends on, as in ``while True: yield draw(generator)``.

    False where something is remembered from batch to batch: a permutation for each epoch, a place in a file.
    """
    states: Mapping[str, Resumable] = field(default_factory=dict)
    """What else joins in a snapshot, each as ``NAME.pt``: an average of the weights, a gradient scaler, a schedule.

    A name is letters, digits and underscores, and none of ``model``, ``optimizer`` and ``run``.
    """
