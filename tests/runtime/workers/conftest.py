"""What all tests of workers share."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Processes are watched by way of ``/proc``."""
    if sys.platform != "linux":
        for item in items:
            item.add_marker(pytest.mark.skip(reason="these tests look at processes in /proc"))


@pytest.fixture(autouse=True)
def _own_temporary_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No other test's sockets are there. The path is short, as that of a Unix socket must be."""
    with tempfile.TemporaryDirectory(prefix="t-", ignore_cleanup_errors=True) as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(autouse=True)
def _nothing_is_left(no_leaks: None) -> None:
    """Each test shows that no thread and no coroutine is left."""
