"""Fixtures of the tests of dashboards and rules: programs that may be missing."""

from __future__ import annotations

import shutil

import pytest


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
