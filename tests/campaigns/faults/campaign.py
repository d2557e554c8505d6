"""One case: a right step, one with trouble at its n-th task, and a right one again; nothing is left afterwards.

A case is drawn from its seed, but for what threads do meanwhile::

    step ──▶ right     trouble ──▶ told, gradients as they were     step ──▶ right     close ──▶ no thread is left
"""

from __future__ import annotations

import asyncio
import random
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from fault_helpers import Boom, Gradients
from invariants import check_scheduler
from thread_helpers import join_all, threads_of_asyncpipe
from torch import Tensor, nn

from asyncpipe import DevicePool, Pipeline
from asyncpipe.core.graph.task import Task
from asyncpipe.errors import AsyncpipeError, HungTaskError, TaskError
from asyncpipe.ops.execute.binder import Binder
from asyncpipe.runtime.watchdog import Watchdog
from tests.campaigns.harness import Campaign, Verdict

__all__ = ["CAMPAIGN", "Case", "run_case"]

SECONDS = 60.0
TOGETHER = 25
"""Cases of one process."""
_mse = nn.functional.mse_loss

TROUBLES = ("error", "exit", "interrupt", "two errors", "cancel", "late cancel", "close", "hang", "hook")
_ERRORS = {"error": Boom, "two errors": Boom, "exit": SystemExit, "interrupt": KeyboardInterrupt}


@dataclass(frozen=True)
class Case:
    """What is run, and the trouble that comes at the task that begins as ``point``-th."""

    seed: int
    face: str
    schedule: str
    checkpoint: str
    devices: int
    microbatches: int
    trouble: str
    point: int


def draw(seed: int) -> Case:
    """The case of ``seed``."""
    chance = random.Random(seed)
    face = chance.choice(["step", "step", "call"])
    schedule = chance.choice(["gpipe", "1f1b", "interleaved", *(["zb-h1", "zb-h2"] if face == "step" else [])])
    devices, microbatches = chance.choice([2, 3]), chance.randint(1, 3)
    if schedule == "interleaved":
        devices, microbatches = 2, microbatches * 2
    troubles = set(TROUBLES) - ({"hook"} if face == "step" else {"cancel", "late cancel", "close", "hang"})
    stages = devices * (2 if schedule == "interleaved" else 1)
    return Case(
        seed,
        face,
        schedule,
        chance.choice(["always", "except_last", "never"]),
        devices,
        microbatches,
        chance.choice(sorted(troubles)),
        chance.randrange(2 * stages * microbatches),
    )


class Trouble:
    """Counts the tasks that begin, and calls ``strike`` in the ``point``-th one, once, while it is armed."""

    def __init__(self, case: Case) -> None:
        self.strike: Callable[[], object] | None = None
        self.struck = False
        self._case = case
        self._begun = 0
        self._lock = threading.Lock()

    def before(self, task: Task) -> None:
        """Called on a device's thread."""
        with self._lock:
            if self.strike is None:
                return
            self._begun += 1
            last = self._case.point + (self._case.trouble == "two errors")
            if not self._case.point < self._begun <= last + 1:
                return
            self.struck, strike = True, self.strike
        strike()

    @contextmanager
    def armed(self, strike: Callable[[], object]) -> Iterator[None]:
        """Strike inside the context."""
        self.strike = strike
        try:
            yield
        finally:
            self.strike = None


def _raise(error: type[BaseException], *_: object) -> None:
    raise error("the campaign's")


class _Run:
    """A case under way."""

    def __init__(self, case: Case) -> None:
        self.case = case
        torch.manual_seed(case.seed)
        stages = case.devices * (2 if case.schedule == "interleaved" else 1)
        layers = [layer for _ in range(stages) for layer in (nn.Linear(4, 4), nn.Tanh())]
        self.model = nn.Sequential(*layers).double()
        self.x, self.target = torch.randn(2, 2 * case.microbatches, 4, dtype=torch.float64)
        _mse(self.model(self.x), self.target).backward()
        self.wanted = [parameter.grad for parameter in self.model.parameters()]
        self.model.zero_grad()
        self.trouble = Trouble(case)
        self.options: dict[str, Any] = {
            "schedule": case.schedule,
            "checkpoint": case.checkpoint,
            "microbatches": case.microbatches,
            "balance": [2] * stages,
        }
        self.devices = [f"cpu:{k}" for k in range(case.devices)]

    def judge(self) -> None:
        """The gradients are those of the unsplit model."""
        for parameter, wanted in zip(self.model.parameters(), self.wanted, strict=True):
            assert parameter.grad is not None
            assert wanted is not None
            assert (parameter.grad - wanted).abs().max() < 1e-10
        self.model.zero_grad()

    # step

    async def by_step(self) -> str:
        async with DevicePool() as pool:
            async with Pipeline(self.model, self.devices, loss_fn=_mse, pool=pool, **self.options) as pipe:
                await self._step(pipe)
                outcome = await self._with_trouble(pipe, pool)
                if pool.driver.is_closed:
                    return outcome
                if outcome != "hung":
                    await self._step(pipe)
            async with Pipeline(self.model, self.devices, loss_fn=_mse, pool=pool, **self.options) as pipe:
                await self._step(pipe)
            check_scheduler(pool.driver.scheduler)
            assert not pool.driver.scheduler._steps
        return outcome

    async def _step(self, pipe: Pipeline) -> None:
        result = await (await pipe.step(self.x, self.target)).completed()
        assert result.outputs is not None
        self.judge()

    async def _with_trouble(self, pipe: Pipeline, pool: DevicePool) -> str:
        loop, driver, kind = asyncio.get_running_loop(), pool.driver, self.case.trouble
        let_go = threading.Event()

        def hang() -> None:
            clock = iter([1e9, 2e9])
            loop.call_soon_threadsafe(Watchdog(driver, clock=lambda: next(clock)).check)
            assert let_go.wait(SECONDS)
            raise Boom("given up")

        def cancel() -> None:
            loop.call_soon_threadsafe(stepping.cancel)
            if kind == "cancel":
                while not stepping.done() and not any(e.abort.is_requested for e in tuple(driver._under_way.values())):
                    pass

        strikes = {"cancel": cancel, "late cancel": cancel, "close": driver.close, "hang": hang}
        strike = strikes.get(kind) or partial(_raise, _ERRORS.get(kind, Boom))
        before = Gradients(self.model)
        with self.trouble.armed(strike):
            stepping = asyncio.ensure_future(pipe.step(self.x, self.target))
            (outcome,) = await asyncio.gather(stepping, return_exceptions=True)
        let_go.set()
        if not isinstance(outcome, BaseException):
            assert not self.trouble.struck or kind in ("late cancel", "cancel", "close")
            await outcome.completed()
            self.judge()
            return "right"
        if isinstance(outcome, TaskError):
            assert type(outcome.__cause__) is (HungTaskError if kind == "hang" else _ERRORS[kind])
        elif isinstance(outcome, asyncio.CancelledError):
            assert kind in ("cancel", "late cancel")
        else:
            assert kind == "close"
            assert isinstance(outcome, AsyncpipeError)
        before.assert_kept()
        return "hung" if kind == "hang" else "cancelled" if kind in ("cancel", "late cancel", "close") else "failed"

    # pipe(x)

    def by_call(self) -> str:
        with Pipeline(self.model, self.devices, **self.options).sync() as pipe:
            self._call(pipe)
            before, outcome = Gradients(self.model), "failed"
            kind = self.case.trouble
            error = _ERRORS.get(kind, Boom)
            expected: type[Exception] = Boom if kind == "hook" else AsyncpipeError
            try:
                with self.trouble.armed((lambda: None) if kind == "hook" else partial(_raise, error)):
                    self._train(pipe, partial(_raise, Boom) if kind == "hook" else None)
            except expected:
                before.assert_kept()
            else:
                assert not self.trouble.struck
                self.judge()
                outcome = "right"
            self.model.zero_grad()
            self._call(pipe)
        return outcome

    def _call(self, pipe: Any) -> None:
        self._train(pipe, None)
        self.judge()

    def _train(self, pipe: Any, hook: Callable[[Tensor], None] | None) -> None:
        outputs = pipe(self.x).chunk(self.case.microbatches)
        if hook is not None:
            outputs[self.case.point % self.case.microbatches].register_hook(hook)
        _mse(torch.cat(outputs), self.target).backward()


def run_case(case: Case) -> str:
    """How the step with the trouble ended; raises if anything is wrong."""
    run, threads = _Run(case), threads_of_asyncpipe()
    real = Binder.bind

    def bind(self: Binder, task: Task) -> Callable[[], object]:
        work = real(self, task)

        def hooked() -> object:
            run.trouble.before(task)
            return work()

        return hooked

    with patch.object(Binder, "bind", bind):
        outcome = asyncio.run(run.by_step()) if case.face == "step" else run.by_call()
    join_all(threads_of_asyncpipe() - threads)
    return outcome


def _judged(seeds: Sequence[int]) -> Iterator[Verdict]:
    for seed in seeds:
        case = draw(seed)
        try:
            yield Verdict("right", label=f"{case.trouble}: {run_case(case)}")
        except BaseException:  # noqa: BLE001 - the finding
            yield Verdict("wrong", f"{case}\n{traceback.format_exc()}")


CAMPAIGN = Campaign(
    "faults",
    lambda run: run.judge(run.chunks(TOGETHER), _judged, SECONDS * 2),
    {"cases": 200, "case": -1, "here": False, "processes": 1},
    draw,
)
