"""TensorBoard: figures of each step as scalars, in event files that ``tensorboard --logdir FOLDER`` shows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread

from asyncpipe.errors import missing_package
from asyncpipe.observe.scalars import CLOSE_SECONDS, RunEnd, ScalarObserver

__all__ = ["TensorBoardObserver"]

FLUSH_SECONDS = 5
"""The files lack the figures of at most this many seconds."""
MOST_WAITING = 10_000
"""Figures that wait for the disk; with more of them, ``add`` blocks until the disk has taken one."""

_logger = logging.getLogger(__name__)


class TensorBoardObserver(ScalarObserver):
    """Writes to event files in ``folder``, which is made; see ``ScalarObserver``.

    Torch's ``SummaryWriter`` writes them on a thread of its own. If it fails, as on a full disk, that is logged,
    ``failed("raised")`` is called once, and this observer writes no more. TensorBoard hides the steps from ``first`` on
    that an earlier run wrote there, because this run does them again. Requires tensorboard; raises ``OptionError``
    without.
    """

    def __init__(
        self, folder: str | Path, *, first: int | None = None, failed: Callable[[str], object] = lambda reason: None
    ) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing_package("TensorBoardObserver needs tensorboard", "tensorboard") from error
        self._folder = folder
        self._failed = failed
        self._writer: SummaryWriter | None = None
        try:
            self._writer = SummaryWriter(
                str(folder), purge_step=first, max_queue=MOST_WAITING, flush_secs=FLUSH_SECONDS
            )
        except OSError as error:
            self._give_up(error)

    def add(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        """Write ``values`` by name, of ``step``, at a Unix time (default: now). Quick; raises nothing."""
        if self._writer is None:
            return
        try:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step, walltime=at)
        except Exception as error:  # noqa: BLE001 - whatever the writer's thread met
            self._give_up(error)

    def close(self, end: RunEnd = "finished") -> None:
        """Write what is left. Blocks, for ``CLOSE_SECONDS`` at most; may be called again."""
        writer, self._writer = self._writer, None
        if writer is None:
            return

        def close() -> None:
            try:
                writer.close()
            except Exception as error:  # noqa: BLE001 - whatever the writer's thread met
                self._give_up(error)

        closing = Thread(target=close, name="asyncpipe TensorBoard", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        if closing.is_alive():
            _logger.warning(
                "TensorBoard's folder %s does not take what is left; its last steps may be lost", self._folder
            )

    def _give_up(self, error: Exception) -> None:
        _logger.error("TensorBoard's folder %s cannot be written, and gets no more steps: %s", self._folder, error)
        self._writer = None
        self._failed("raised")
