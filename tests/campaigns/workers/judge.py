"""Judges cases: each is run in workers and on threads, on pools that many cases share."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import warnings
from collections.abc import AsyncIterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from asyncpipe import DevicePool
from asyncpipe.errors import AsyncpipeError
from asyncpipe.ops.device.devices import resolve_devices
from asyncpipe.pipeline import workers
from asyncpipe.runtime.workers.connection import WorkerConnection
from tests.campaigns.harness import Verdict
from tests.campaigns.workers.cases import MAPPING, WORKERS, Case, Plan
from tests.campaigns.workers.disturbance import ENTRY, Disturb
from tests.campaigns.workers.runs import Trace, run_plan

__all__ = ["Judge", "judging"]

CLOSE = 1e-9
"""How far numbers may be apart, relative to 1, where threads themselves do not give the same bits again."""
EXAMPLES = str(Path(__file__).parents[3] / "examples" / "custom_schedule")


class Judge:
    """Runs cases one after the other. ``judging`` makes one."""

    def __init__(self, threads: DevicePool, remote: DevicePool) -> None:
        self._threads = threads
        self._remote = remote
        self._connections: list[WorkerConnection] = []

    @property
    def pids(self) -> list[int]:
        """The workers' processes."""
        return [connection.pid for connection in self._connections]

    async def start(self, workers: str) -> None:
        """Start these workers."""
        group = self._remote.workers
        assert group is not None
        devices = [device for device, worker in MAPPING.items() if worker in workers]
        await self._remote.run(self._remote.admit(resolve_devices(devices)))
        self._connections = [group.connection(name) for name in workers]

    async def judge(self, case: Case, breaks: str = "") -> Verdict:
        """How the two ways compare; ``breaks`` is a rule that workers are to break."""
        for connection in self._connections:
            connection.send(Disturb(case.microseconds, breaks, case.inline_bytes, case.direct_bytes))
        remote = await self._both(case, self._remote, [None] * len(case.plans))
        cancelled = [each.cancelled if isinstance(each, Trace) else set() for each in remote]
        here = await self._both(case, self._threads, cancelled)
        found = [_compared(*each) for each in zip(case.plans, here, remote, strict=True)]
        worst = next((each for each in found if each.is_finding), max(found))
        if worst.is_finding and not breaks:
            again = await self._both(case, self._threads, cancelled)
            if any(_compared(*each).is_finding for each in zip(case.plans, here, again, strict=True)):
                return Verdict("different", f"threads differ from themselves, and {worst.text}")
        return worst

    async def _both(
        self, case: Case, pool: DevicePool, cancelled: Sequence[set[int] | None]
    ) -> list[Trace | BaseException]:
        runs = [run_plan(plan, pool, each) for plan, each in zip(case.plans, cancelled, strict=True)]
        return await asyncio.gather(*runs, return_exceptions=True)


@contextlib.asynccontextmanager
async def judging(names: str = WORKERS, transport: Any = "shared_memory") -> AsyncIterator[Judge]:
    """A judge with its pools, of which these workers are up: for cases that have no others."""
    if EXAMPLES not in sys.path:
        sys.path.insert(0, EXAMPLES)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    with patch.object(workers, "ENTRY", ENTRY):
        async with DevicePool() as threads, DevicePool(workers=MAPPING, transport=transport) as remote:
            judge = Judge(threads, remote)
            await judge.start(names)
            yield judge


def _compared(plan: Plan, here: Trace | BaseException, remote: Trace | BaseException) -> Verdict:
    if isinstance(here, BaseException) or isinstance(remote, BaseException):
        texts = [
            f"{type(each).__name__}: {each}" if isinstance(each, BaseException) else "ran" for each in (here, remote)
        ]
        if texts[0] == texts[1] and isinstance(here, AsyncpipeError):
            return Verdict("refused", texts[0])
        return Verdict("different", f"on threads: {texts[0]}; in workers: {texts[1]}")
    errors = [value for _, value in here.seen + remote.seen if isinstance(value, str)]
    for (name, value), (other_name, other) in zip_longest(here.seen, remote.seen, fillvalue=("nothing", None)):
        if name != other_name:
            return Verdict("different", f"{name} on threads, {other_name} in workers: {errors[:2]}")
        is_error = "error" in name
        if is_error and plan.changes_buffers:
            return Verdict("refused", str(value))  # A step that fails may leave buffers changed, as it happens.
        if is_error and not plan.is_exact:
            value, other = (re.sub(r"\d+", "N", text) for text in (value, other))  # Any micro-batch may be the first.
        if (difference := _difference(value, other, exact=plan.is_exact)) is not None:
            return Verdict("different", f"{name}: {difference}")
        if is_error and "fail" not in name:
            return Verdict("refused", str(value))  # Stages that were updated before stay updated, as it happens.
    return Verdict("equal" if plan.is_exact else "close")


def _difference(value: Any, other: Any, *, exact: bool) -> str | None:
    if not isinstance(value, Tensor) or not isinstance(other, Tensor):
        return None if value == other else f"{value!r} on threads, {other!r} in workers"
    if value.shape != other.shape or value.dtype != other.dtype:
        return f"{value.shape} {value.dtype} on threads, {other.shape} {other.dtype} in workers"
    if _bits(value) == _bits(other):
        return None
    apart = (value.double() - other.double()).abs().max().item()
    if not exact and apart <= CLOSE * max(1.0, value.double().abs().max().item()):
        return None
    return f"apart by {apart:.3g} of {value.double().abs().max().item():.3g}"


def _bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
