"""What a device's memory is, read from the process and from torch's allocator."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from asyncpipe.ops.device import memory
from asyncpipe.ops.device.memory import allocated_bytes, device_memory

CPU = torch.device("cpu")
STATUS = Path("/proc/self/status")


def status(key: str) -> int:
    """Bytes, as Linux tells them."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not STATUS.exists(), reason="only Linux tells a process's memory in /proc")
def test_a_cpu_has_the_memory_of_the_process() -> None:
    assert device_memory(CPU).peak == pytest.approx(status("VmHWM"), rel=0.2)
    assert allocated_bytes(CPU) == pytest.approx(status("VmRSS"), rel=0.2)


def test_more_is_allocated_after_an_allocation() -> None:
    before = device_memory(CPU)
    kept = torch.ones(64 << 20, dtype=torch.uint8)
    after = device_memory(CPU)
    assert after.allocated - before.allocated > 32 << 20
    assert after.peak >= after.allocated
    assert after.limit == before.limit > after.allocated
    del kept


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


def test_without_proc_the_peak_stands_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "_STATM", tmp_path / "missing")
    assert allocated_bytes(CPU) == device_memory(CPU).peak


@pytest.mark.cuda
def test_a_cuda_device_has_its_allocators() -> None:
    device = torch.device("cuda", 0)
    before = device_memory(device)
    kept = torch.ones(64 << 20, dtype=torch.uint8, device=device)
    after = device_memory(device)
    assert after.allocated - before.allocated == 64 << 20
    assert before.allocated < after.peak <= after.limit
    del kept
