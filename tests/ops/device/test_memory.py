"""What a device's memory is, read from the process and from torch's allocator."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from asyncpipe.ops.device import memory
from asyncpipe.ops.device.memory import device_memory

CPU = torch.device("cpu")
STATUS = Path("/proc/self/status")


def status(key: str) -> int:
    """Bytes, as Linux tells them."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize(("text", "limit"), [("1048576\n", 1 << 20), ("max\n", None), (None, None)])
def test_a_containers_limit_counts(
    text: str | None, limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "memory.max"
    if text is not None:
        path.write_text(text)
    machine = device_memory(CPU).limit
    monkeypatch.setattr(memory, "_LIMITS", (path,))
    memory.host_limit.cache_clear()
    found = device_memory(CPU).limit
    memory.host_limit.cache_clear()
    assert found == limit if limit is not None else found >= machine
