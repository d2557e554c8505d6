"""TensorBoard: figures of each step as scalars, in event files that ``tensorboard --logdir FOLDER`` shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from asyncpipe.errors import missing_package
from asyncpipe.observe.scalars import RunEnd, ScalarObserver, ScalarRow

__all__ = ["TensorBoardObserver"]

FLUSH_SECONDS = 5
"""How old what the files lack may be."""


class TensorBoardObserver(ScalarObserver):
    """Writes to event files in ``folder``, which is made; see ``ScalarObserver``.

    Steps from ``first`` on that an earlier run wrote there are not shown any more, since this one does them again.
    Requires tensorboard; raises ``OptionError`` without.
    """

    def __init__(
        self, folder: str | Path, *, first: int | None = None, failed: Callable[[str], object] = lambda reason: None
    ) -> None:
        try:
            import tensorboard  # noqa: F401
        except ImportError as error:
            raise missing_package("TensorBoardObserver needs tensorboard", "tensorboard") from error
        super().__init__(f"TensorBoard's folder {folder}", failed)
        self._folder = Path(folder)
        self._first = first
        self._writer: Any = None

    def _write(self, rows: Sequence[ScalarRow]) -> None:
        if self._writer is None:
            # Torch's, which is the interface that people know; it is imported when there is something to write.
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=self._first, flush_secs=FLUSH_SECONDS)
        for row in rows:
            for name, value in row.values.items():
                self._writer.add_scalar(name, value, row.step, walltime=row.at)

    def _finish(self, _: RunEnd) -> None:
        if self._writer is not None:
            self._writer.close()
