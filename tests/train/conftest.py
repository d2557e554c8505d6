"""Fixtures of the tests of runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from asyncpipe.train.snapshots.writer import SnapshotWriter


@pytest.fixture
def snapshot_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs wait for each snapshot, so that none is delayed by the one before."""

    class WaitingWriter(SnapshotWriter):
        async def after_step(self, step: int, states: Mapping[str, Any]) -> None:
            await super().after_step(step, states)
            await self.finish()

    monkeypatch.setattr("asyncpipe.train.training_run.SnapshotWriter", WaitingWriter)
