"""What all tests of workers share."""

from __future__ import annotations

import sys

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Processes are watched by way of ``/proc``."""
    if sys.platform != "linux":
        for item in items:
            item.add_marker(pytest.mark.skip(reason="these tests look at processes in /proc"))


@pytest.fixture(autouse=True)
def _nothing_is_left(own_temporary_files: None, no_leaks: None) -> None:
    """Each test shows that no thread and no coroutine is left, and sees no other test's sockets."""
