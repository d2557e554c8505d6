"""Rounds of one job on 4 workers, which stand for 4 hosts: one is lost, the job goes on, the host comes back.

::

    4 hosts ──▶ strike ──▶ on 3 hosts (split anew, stages moved), ──▶ some steps ──▶ the host is back ──▶ 4 hosts
                             or on the 2 of the other replica
                  └──────▶ the worker is started again at once ───────────────────────────────────────────▶ 4 hosts

The job is one ``LastingRun`` from the first round to the last. The losses of its steps, also of those that are done
again, and its last snapshot have the bits of a run on threads to which nothing happened.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import tempfile
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
import torch
from host_helpers import Hosts
from run_helpers import assert_same_end
from torch import Generator, nn

from asyncpipe.train import lasting_run, next_move
from asyncpipe.train.job_file import Job
from asyncpipe.train.lasting_run import LastingRun
from asyncpipe.train.progress import ProgressSink, RunStarted, StepProgress
from asyncpipe.train.training_run import TrainingRun
from asyncpipe.train.workload import Batch, Workload
from tests.campaigns.crashes.strikes import HELD, Armed, Strike, Struck
from tests.campaigns.harness import Campaign, Run
from tests.support.shaped_edges import EdgeShape, EdgeState, reshape, shape_edges

__all__ = ["CAMPAIGN", "HOSTS", "Round", "Rounds"]

HOSTS = ("cpu:0", "cpu:1", "cpu:2", "cpu:3")
KINDS = "FRBWCU"
DEEDS = ("kill", "cut", "hole", "stop")
"""``kill -9``; all edges of the worker are cut, or carry nothing any more, while its process lives; SIGSTOP. A watchdog
notices the last two."""
CUTS = {"cut": EdgeState.CUT, "hole": EdgeState.BLACK_HOLE}
FLOOR = 2.0
"""Seconds after which the watchdog takes a task, or a silence in a step, for hung."""
SILENT = 20.0
"""Seconds after which a worker that is silent is killed while no step is under way."""
LATEST = 5.0
"""Seconds from a loss (of one that is stopped, from when it is known) to the end of the first step behind it."""
START = 20.0
"""Seconds more where a process is started; on a loaded machine."""
REPLICAS = "replicas"
MODELS = ("split", "moved", REPLICAS)
ROUNDED = 1e-6
"""How far losses may be from those of a run whose sums were never made in another order, relative to one."""
ALONE = 2
"""Steps that are done without the host, before it is back."""


@dataclass(frozen=True)
class Round:
    """``deed`` to ``host``: in a task of ``kind``, or without one after so many ``seconds`` of the run."""

    deed: str
    host: str
    kind: str = ""
    count: int = 0
    seconds: float = 0.0
    is_off: bool = True
    """Whether the host stays away for some steps, or its worker can be started again at once."""

    @property
    def name(self) -> str:
        """For the figures."""
        where = f"in {self.kind}" if self.kind else "at any instant"
        return f"{self.deed} {where}, {'host away' if self.is_off else 'replaced'}"


def all_rounds(chance: random.Random, deeds: Sequence[str], instants: int, schedule: str, model: str) -> list[Round]:
    """Each of ``deeds`` to each host in each kind of task that ``schedule`` has, and at so many random instants."""
    kinds = KINDS.replace("B", "") if schedule == "zb-h1" else KINDS.replace("W", "")
    if model == REPLICAS:
        kinds += "AG"
    rounds = [
        Round(deed, host, kind, 0 if kind in "UAG" else chance.randrange(2 if model == REPLICAS else 3))
        for deed, kind, host in product(deeds, kinds, HOSTS)
    ]
    for _ in range(instants):
        deed, seconds = chance.choice(deeds), chance.uniform(0.0, 1.0)
        is_off = deed in CUTS or chance.random() < 0.6
        rounds.append(Round(deed, chance.choice(HOSTS), seconds=seconds, is_off=is_off))
    chance.shuffle(rounds)
    # In the last ones no run ends that could be made anew with the next strike in its model.
    return sorted(rounds, key=lambda each: not each.is_off)


class Rounds(ProgressSink):
    """One job and its rounds. It hears what the job does, and strikes."""

    def __init__(
        self,
        run: Run,
        rounds: Sequence[Round],
        folder: Path,
        *,
        hosts: Sequence[str] = HOSTS,
        schedule: str = "1f1b",
        model: str = "split",
        latest: float = LATEST,
    ) -> None:
        """``model`` is one of ``MODELS``."""
        self._under = run
        self._rounds = list(rounds)
        self._folder = folder
        self._names = tuple(hosts)
        self._model = model
        self._schedule = schedule
        self._latest = latest
        self._hosts = Hosts()
        self._note = folder / "note"
        self._round: Round | None = None
        """That is under way, until its host is back."""
        self._struck: Struck | None = None
        self._is_anew = False
        """Whether the run has begun anew since the strike."""
        self._steps_behind = 0
        """Steps behind the strike."""
        self._way = ""
        self._doing: asyncio.Task[None] | None = None
        self._losses: dict[int, float] = {}
        self._has_shrunk = False
        """Whether steps were done with other sums, by fewer replicas."""

    async def run(self) -> None:
        """All rounds. Raises ``AssertionError`` unless all is as it should be."""
        with pytest.MonkeyPatch.context() as patched, self._hosts.pool() as pool:
            for module in (lasting_run, next_move):
                patched.setattr(module, "LONGEST_PAUSE", 0.1)
            self._pool = shape_edges(pool)
            async with pool:
                self._run = LastingRun(self._job("struck"), self._workload, progress=self, pool=pool)
                try:
                    summary = await self._run.run()
                finally:
                    await self._end_doing()
        assert self._round is None, f"nothing came of {self._round}"
        assert not self._rounds or not self._under.has_time, f"{len(self._rounds)} rounds were not done"
        self._under.tell(f"{summary.steps} steps; the same on threads …")
        alone = _Heard()
        made = TrainingRun(self._job("alone"), lambda: self._workload(summary.steps), progress=alone)
        there = await made.run()
        # Steps behind the last snapshot of a lost run are not done again if that was the last round.
        done = {step: loss for step, loss in self._losses.items() if step <= summary.steps}
        assert summary.snapshot is not None
        assert there.snapshot is not None
        if not self._has_shrunk:
            assert alone.losses == done, "the losses differ"
            assert_same_end(there.snapshot, summary.snapshot)
            return
        apart = max(abs(alone.losses[step] - loss) / alone.losses[step] for step, loss in done.items())
        self._under.report.counts["the losses differ by"][f"{apart:.0e} of one at most, in {len(done)} steps"] += 1
        assert apart < ROUNDED, f"the losses differ by {apart:.2g} of one"

    def _job(self, name: str) -> Job:
        every = 1 if name == "struck" and self._model != REPLICAS else 10**6
        lost_host = "shrink" if self._model == REPLICAS else "split"
        return Job.model_validate(
            {
                "name": "hosts",
                "job": {"entry": "tests:hosts"},
                "pipeline": {
                    "devices": list(self._names), "microbatches": 4, "schedule": self._schedule, "checkpoint": "always",
                    **({"replicas": 2, "microbatches": 2} if self._model == REPLICAS else {}),
                },
                "training": {"steps": 10**6, "batch_size": 12, "learning_rate": 0.01, "overlap": True, "seed": 5},
                "snapshots": {"folder": str(self._folder / name), "every": every, "keep": 3},
                "faults": {"step_retries": 0, "lost_host": lost_host, "wait_seconds": 0, "snapshot_retries": 4},
            }
        )  # fmt: skip

    def _workload(self, steps: int | None = None) -> Workload:
        """In a thread of the run: a model that has what is to strike, if the run is to be struck."""
        strike = None
        if steps is None:
            if self._round is None:
                self._next_round()
            strike = self._strike_in_model()
        layers: list[nn.Module] = [Armed(strike), nn.Linear(6, 24), nn.Tanh()]
        for _ in range(4):
            layers += [nn.Linear(24, 24), nn.Tanh() if self._model == "split" else nn.Dropout(0.2)]
            layers.append(nn.LayerNorm(24) if self._model == REPLICAS else nn.BatchNorm1d(24))
        layers.append(nn.Linear(24, 6))

        def batches(size: int, generator: Generator) -> Iterator[Batch]:
            def endless() -> Iterator[Batch]:
                while True:
                    x = torch.randn(size, 6, generator=generator, dtype=torch.float64)
                    yield x, x.flip(1)

            return islice(endless(), steps)

        return Workload(nn.Sequential(*layers).double(), nn.functional.mse_loss, batches, memoryless=steps is None)

    def _next_round(self) -> None:
        self._round = self._rounds.pop(0) if self._rounds and self._under.has_time else None
        self._struck, self._is_anew, self._steps_behind, self._way = None, False, 0, "started again"
        self._note.unlink(missing_ok=True)

    def _strike_in_model(self) -> Strike | None:
        what = self._round
        if what is None or not what.kind or self._struck is not None:
            return None
        return Strike(HELD if what.deed in CUTS else what.deed, what.kind, what.host, 1, what.count, self._note)

    # What the run tells

    def entered(self, phase: str) -> None:
        if "goes on without" in phase:
            self._way = "split anew" if "split anew" in phase else "stages moved"
            if "replicas" in phase:
                self._way, self._has_shrunk = "a replica less", True

    def started(self, run: RunStarted) -> None:
        if self._round is None:
            self._run.orders.stop()
        elif self._struck is None:
            self._begin(self._round)
        else:
            self._is_anew = True
            if self._round.deed == "cut":
                # An edge that is cut takes a connection, which breaks again.
                self._do(reshape(self._pool, _edges_of(self._round.host, self._names, EdgeState.CUT)))

    def stepped(self, progress: StepProgress) -> None:
        assert self._model != REPLICAS or progress.step not in self._losses, f"step {progress.step} was lost"
        before = self._losses.setdefault(progress.step, progress.loss)
        assert before == progress.loss, f"step {progress.step} has another loss than before"
        if (what := self._round) is None or self._struck is None or not self._is_anew:
            return
        self._steps_behind += 1
        if self._steps_behind == 1:
            self._judge(what, time.perf_counter() - self._struck.at)
        if self._steps_behind == ALONE:
            self._end(what)

    def _begin(self, what: Round) -> None:
        if what.is_off and what.deed not in CUTS:
            self._hosts.off.add(what.host)
        self._do(self._strike(what))

    async def _strike(self, what: Round) -> None:
        """Do it, or see it done by a task."""
        if what.kind:
            while not self._note.exists() or not self._note.read_text():  # noqa: ASYNC110 - a worker writes it
                await asyncio.sleep(0.001)
            self._struck = Struck.read(self._note)
        else:
            await asyncio.sleep(what.seconds)
            self._struck = Struck(time.perf_counter())
        if what.deed in CUTS:
            await reshape(self._pool, _edges_of(what.host, self._names, CUTS[what.deed]))
            self._note.unlink(missing_ok=True)
        elif not what.kind:
            workers = self._pool.workers
            assert workers is not None
            os.kill(workers.up[what.host].pid, signal.SIGKILL if what.deed == "kill" else signal.SIGSTOP)

    def _judge(self, what: Round, seconds: float) -> None:
        self._under.report.seconds[f"{what.name}: to the end of the first step behind it"].append(seconds)
        self._under.report.counts["way to go on"][self._way] += 1
        self._under.tell(f"{what.deed} {what.kind or 'from outside'} of {what.host}: {self._way} after {seconds:.2f} s")
        # A worker that is stopped between two steps is known to be gone only after its silence.
        latest = self._latest + (START if not what.is_off else 0.0) + (SILENT if what.deed in ("stop", "hole") else 0.0)
        assert seconds < latest, f"{what}: the next step was done after {seconds:.1f} s"

    def _end(self, what: Round) -> None:
        """The host is back, and so is soon the run; or it is there already."""
        self._hosts.off.clear()
        if what.deed in CUTS:
            self._do(reshape(self._pool, _edges_of(what.host, self._names, EdgeState.OPEN)))
        if what.is_off:
            self._round = None
            return
        self._next_round()
        if self._round is None:
            self._run.orders.stop()
        else:
            assert not self._round.kind
            self._begin(self._round)

    def _do(self, what: Coroutine[Any, Any, None]) -> None:
        assert self._doing is None or self._doing.done()
        if self._doing is not None:
            self._doing.result()
        self._doing = asyncio.ensure_future(what)

    async def _end_doing(self) -> None:
        if self._doing is not None:
            self._doing.cancel()
            with suppress(asyncio.CancelledError):
                await self._doing


class _Heard(ProgressSink):
    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def stepped(self, progress: StepProgress) -> None:
        self.losses[progress.step] = progress.loss


def _edges_of(host: str, hosts: Sequence[str], state: EdgeState) -> dict[tuple[str, str], EdgeShape]:
    others = [other for other in hosts if other != host]
    return {pair: EdgeShape(state=state) for other in others for pair in ((host, other), (other, host))}


async def _run(run: Run) -> None:
    """Models that are split anew, that are moved, and with replicas; backwards whole and split in two halves."""
    options, deeds = run.options, run.options.deeds.split(",")
    for model, schedule in product(MODELS, ("1f1b", "zb-h1")):
        rounds = all_rounds(random.Random(run.options.seed), deeds, options.instants // 4, schedule, model)
        if schedule in options.schedules.split(",") and model in options.models.split(",") and run.has_time:
            (own := Path(tempfile.mkdtemp(), f"{schedule}-{model}")).mkdir()
            await Rounds(run, rounds, own, schedule=schedule, model=model, latest=options.latest).run()


CAMPAIGN = Campaign(
    "hosts",
    _run,
    {
        "minutes": 60.0,
        "instants": (100, "losses at random instants"),
        "deeds": (",".join(DEEDS), "how hosts are lost"),
        "models": (",".join(MODELS), "that is split anew, that draws, and with two replicas"),
        "schedules": ("1f1b,zb-h1", "which schedules"),
        "latest": (LATEST, "seconds to the first step behind a loss"),
    },
)
