"""What the tests of dashboards and rules share: how to import them, and programs that may be missing."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# ``dashboards`` and the helpers beside these tests are no installed packages.
for folder in (ROOT, Path(__file__).parent):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


@pytest.fixture(scope="session")
def promtool() -> str:
    """The path of promtool; skips the test where it is missing."""
    return _program("promtool")


@pytest.fixture(scope="session")
def prometheus_program() -> str:
    """The path of Prometheus's server; skips the test where it is missing."""
    return _program("prometheus")


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not on PATH; install it with `apt-get install prometheus`")
    return found
