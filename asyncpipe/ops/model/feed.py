"""Mini-batches that are made where they are used, from the number of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncpipe.core.splitmix import branch_seed
from asyncpipe.errors import ArgumentTypeError
from asyncpipe.ops.model.functions import SeededDraws, check_function, find_function, function_name
from asyncpipe.ops.model.microbatch import Arguments

__all__ = ["Feed", "FromFeed", "as_feed"]


@dataclass(frozen=True, slots=True)
class Feed:
    """Makes the mini-batches of a pipeline: ``Pipeline(..., feed=Feed("module:function"))``, then ``step()``.

    ``function(step, **arguments)`` returns what step number ``step`` (from 0) takes: x, or a pair ``(x, target)``. If
    the stages live in workers it is called in those of the first and of the last stage, once in each, on a thread of
    its own while the step before runs. So it must depend on nothing but the number: no iterator that goes on, no clock,
    no generator of Python's or numpy's that nobody seeds. What it draws by torch follows from ``seed`` and the number.
    """

    function: str | Callable[..., Any]
    """``module:function``, importable in every process, or a function."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of every call."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_function("feed", self.function)

    def batch(self, step: int) -> tuple[Any] | tuple[Any, Any]:
        """``(x,)`` or ``(x, target)`` of a step. Raises what the function raises."""
        function = find_function(str(self), self.function)
        with SeededDraws(branch_seed(self.seed, step)):
            made = function(step, **self.arguments)
        is_pair = type(made) in (tuple, list) and len(made) == 2 and not isinstance(made, Arguments)
        return (made[0], made[1]) if is_pair else (made,)

    def __call__(self, batch_size: int, generator: object) -> Iterator[tuple[Any, Any]]:
        """What stands for its mini-batches in a run of a job: ``Workload(model, loss_fn, batches=Feed(...))``.

        They must have ``batch_size`` samples.
        """
        while True:
            yield FromFeed(batch_size), FromFeed(batch_size)

    def __str__(self) -> str:
        return f"Feed({function_name(self.function)})"


class FromFeed:
    """Stands for x, and its target, that the pipeline's feed makes."""

    def __init__(self, samples: int = 0) -> None:
        """``samples``: how many it must have, if that is known."""
        self._samples = samples

    def __len__(self) -> int:
        return self._samples


def as_feed(feed: str | Feed | None) -> Feed | None:
    """The feed that an option names. Raises ``ArgumentTypeError`` for something else."""
    if feed is None or isinstance(feed, Feed):
        return feed
    if isinstance(feed, str):
        return Feed(feed)
    raise ArgumentTypeError(f"feed is 'module:function' or a Feed, got {type(feed).__name__}")
