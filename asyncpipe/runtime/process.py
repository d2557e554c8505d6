"""The process that threads live in. A forked child has a copy of what they work on, and none of the threads."""

from __future__ import annotations

import os

from asyncpipe.errors import PipelineClosedError

__all__ = ["Process"]


class Process:
    """The process that made this object: what it waits for in any other would never come.

    A forked child shares the file descriptors by which its parent's loop is woken, too. So it must not post to it.
    """

    def __init__(self) -> None:
        self._number = os.getpid()

    @property
    def is_this(self) -> bool:
        """Whether the caller is in that process. Costs 0.1 µs."""
        return os.getpid() == self._number

    def check(self) -> None:
        """Raise ``PipelineClosedError`` in a forked child."""
        if not self.is_this:
            raise PipelineClosedError(
                f"the pipeline was opened by process {self._number}, and this forked child of it has none of its "
                "threads; open one of its own here (copy.deepcopy(pipeline), or a new Pipeline), or start the child "
                "with the method 'spawn'"
            )
