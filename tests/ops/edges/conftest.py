"""Tests of edges send little, also by what is meant for large messages. Where there is no NCCL, they imitate it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_nccl import replace_nccl


@pytest.fixture(autouse=True, scope="package")
def transports_for_tests() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        replace_nccl(patch)
        yield
