"""The executor of one device, without a driver."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from driver_helpers import executor_alone

from asyncpipe.runtime.thread_executor import ThreadExecutor


@pytest.fixture
def executor(no_leaks: None) -> Iterator[ThreadExecutor]:
    """What it reports is in ``executor.events``."""
    with executor_alone() as (made, made.events):  # type: ignore[attr-defined]
        yield made
