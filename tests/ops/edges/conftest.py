"""Tests of edges send little, also by what is meant for large messages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from asyncpipe.ops.edges.gloo import GlooOut


@pytest.fixture(autouse=True, scope="package")
def small_messages_by_gloo() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GlooOut, "inline_bytes", 1 << 12)
        yield
