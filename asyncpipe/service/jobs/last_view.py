"""What the live page of a job shows when it does not run: its losses, and the last step of its last run.

A run that ends writes ``last_step.json.gz`` into its job's folder: the timeline and the key figures of its last step,
as the live page gets them. The losses are in the store, which is complete also after a kill.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncpipe.observe.live import LiveView
from asyncpipe.service.job_states import JobRecord
from asyncpipe.service.store.job_records import LossRow

__all__ = ["MOST", "RECENT", "PastView", "keep_view", "past_view", "steps_of_view"]

NAME = "last_step.json.gz"
KEPT = ("step", "timeline", "workers", "bubbles", "spoiled")
"""What is written of a view's snapshot."""
MOST = 300
"""Points of the loss curve before a run that goes on; it has room for as many more."""
RECENT = 20
"""Steps by which the last speed is told."""
MOST_BYTES = 8 * 2**20
"""A file that is larger, unpacked, is none of ours."""


class PastView(LiveView):
    """The view of a job that does not run."""

    def __init__(self, job: str, steps: int | None, kept: Mapping[str, Any]) -> None:
        """``kept`` is what ``keep_view`` wrote."""
        super().__init__(job, steps=steps)
        self._kept = kept
        self.end()

    def snapshot(self) -> dict[str, Any]:
        return super().snapshot() | dict(self._kept)


def keep_view(folder: Path, view: LiveView) -> None:
    """Write the last step of ``view`` into a job's ``folder``; nothing before the first step. Blocks.

    Raises ``OSError``.
    """
    state = view.snapshot()
    if state["step"] is None:
        return
    text = json.dumps({key: state[key] for key in KEPT}, allow_nan=False, separators=(",", ":"))
    new = folder / f"{NAME}.new"
    new.write_bytes(gzip.compress(text.encode(), compresslevel=5, mtime=0))
    new.replace(folder / NAME)


def steps_of_view(rows: Sequence[LossRow]) -> list[tuple[int, float, float, int, int]]:
    """The steps of a job's runs so far for ``LiveView.go_on``."""
    return [(row.step, row.loss, row.seconds, 0, row.tokens) for row in rows]


def past_view(record: JobRecord, folder: Path, rows: Sequence[LossRow], recent: Sequence[LossRow]) -> PastView:
    """The view of the job of ``record``, which does not run. Blocks.

    ``rows`` are up to ``MOST`` of its steps, evenly spread, and ``recent`` the last ``RECENT``.
    """
    view = PastView(record.name, record.steps, _kept(folder))
    if recent:
        view.go_on(recent[0].step - 1, steps_of_view(rows))
        for row in recent:
            view.training_step(row.loss, 0, row.tokens, row.seconds)
    return view


def _kept(folder: Path) -> dict[str, Any]:
    try:
        with gzip.open(folder / NAME) as file:
            table = json.loads(file.read(MOST_BYTES))
    except (OSError, EOFError, ValueError, zlib.error):  # None yet, or it was damaged: the losses are there.
        return {}
    return {key: table[key] for key in KEPT if key in table} if isinstance(table, dict) else {}
