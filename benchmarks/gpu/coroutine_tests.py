"""A plugin of pytest that runs tests which are coroutines, where pytest-asyncio is not installed."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

OPTIONS = ("asyncio_mode", "asyncio_default_fixture_loop_scope", "asyncio_default_test_loop_scope")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Know the settings of pytest-asyncio that the project has."""
    for name in OPTIONS:
        parser.addini(name, "pytest-asyncio's, which is not installed")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: Any) -> bool | None:
    """Run a coroutine on a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
