"""What several tests of the service need."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

FULL = Path("/dev/full")


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """A file on a full disk: every write to it fails with ENOSPC.

    Where this process may replace the system's own, it is another node of the same device: a test that finds a
    mistake shall not leave a regular file in its place.
    """
    if not FULL.is_char_device():
        pytest.skip("this system has no /dev/full")
    if not os.access(FULL.parent, os.W_OK):
        return FULL
    made = tmp_path / "full"
    try:
        os.mknod(made, stat.S_IFCHR | 0o666, FULL.stat().st_rdev)
        made.open("w").close()
    except OSError as error:
        pytest.skip(f"as this user, /dev/full could be replaced, and no other node can be made: {error}")
    return made
