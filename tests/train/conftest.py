"""Fixtures of the tests of runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
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


@pytest.fixture(autouse=True)
def _batch_norms_are_known() -> Iterator[None]:
    """The model of these tests has batch norms, which each pipeline of it would tell of."""
    logger = logging.getLogger("asyncpipe.ops.model.batchnorm")
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(logging.NOTSET)
