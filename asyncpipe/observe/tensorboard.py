"""TensorBoard: figures of each step as scalars, in event files that ``tensorboard --logdir FOLDER`` shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from asyncpipe.errors import missing_package
from asyncpipe.observe.scalars import Row, RunEnd, ScalarObserver

__all__ = ["TensorBoardObserver"]

FLUSH_SECONDS = 5
"""The files lack the figures of at most this many seconds."""


class TensorBoardObserver(ScalarObserver):
    """Writes to event files in ``folder``, which is made; see ``ScalarObserver``.

    TensorBoard hides the steps from ``first`` on that an earlier run wrote there, because this run does them again.
    Requires tensorboard; raises ``OptionError`` without.
    """

    store = "TensorBoard"

    def __init__(
        self, folder: str | Path, *, first: int | None = None, failed: Callable[[str], object] = lambda reason: None
    ) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing_package("TensorBoardObserver needs tensorboard", "tensorboard") from error
        self._make_writer: Callable[[], Any] = lambda: SummaryWriter(
            str(folder), purge_step=first, flush_secs=FLUSH_SECONDS
        )
        self._writer: Any = None
        super().__init__(failed)

    def _write(self, rows: Sequence[Row]) -> None:
        self._writer = self._writer or self._make_writer()
        for row in rows:
            for name, value in row.values.items():
                self._writer.add_scalar(name, value, row.step, walltime=row.at)

    def _finish(self, end: RunEnd) -> None:
        if self._writer is not None:
            self._writer.close()
