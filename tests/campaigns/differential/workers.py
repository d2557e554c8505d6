"""Processes that judge cases, each case with a deadline. A worker that dies or is late is replaced."""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait

import torch

from tests.campaigns.differential.cases import Case
from tests.campaigns.differential.judge import Verdict, judge

CASES_PER_WORKER = 150
_fork = multiprocessing.get_context("fork")


class _Worker:
    """One process, forked from this one, which has loaded everything."""

    def __init__(self) -> None:
        self.stacks = tempfile.NamedTemporaryFile(suffix=".stacks")  # noqa: SIM115 - until end()
        self.connection, theirs = _fork.Pipe()
        self.process = _fork.Process(target=_serve, args=(theirs, self.stacks.name), daemon=True)
        self.process.start()
        theirs.close()
        self.case: Case | None = None
        self.since = 0.0
        self.done = 0

    def give(self, case: Case) -> None:
        self.case, self.since = case, time.monotonic()
        self.connection.send(case)

    def take(self) -> tuple[Case, Verdict]:
        """The verdict that is there; a crash if the process has died."""
        case, self.case = self.case, None
        assert case is not None
        self.done += 1
        try:
            return case, self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            stacks = self._stacks()
            code = self.process.exitcode
            assert code is not None
            name = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            return case, Verdict("crash", f"the process ended with {name}\n{stacks}")

    def give_up(self) -> tuple[Case, Verdict]:
        """The case is late: its verdict, with the stacks of all threads."""
        case, self.case = self.case, None
        assert case is not None
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        late = time.monotonic() - self.since
        return case, Verdict("hang", f"not done after {late:.0f} s\n{self._stacks()}")

    def _stacks(self) -> str:
        with open(self.stacks.name, encoding="utf-8") as file:
            return file.read()

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()
        self.stacks.close()


def _serve(connection: Connection, stacks: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    file = open(stacks, "w", encoding="utf-8")  # noqa: SIM115 - as long as the process lives
    faulthandler.enable(file)
    faulthandler.register(signal.SIGUSR1, file, all_threads=True)
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    while True:
        try:
            case = connection.recv()
        except EOFError:
            return
        connection.send(judge(case))


def judged(cases: Iterable[Case], processes: int, deadline: float) -> Iterator[tuple[Case, Verdict]]:
    """The verdicts of ``cases``, in the order in which they are found; ``deadline`` is in seconds for each case."""
    rest = iter(cases)
    workers = [_Worker() for _ in range(processes)]
    try:
        busy = [worker for worker in workers if _feed(worker, rest)]
        while busy:
            ready = wait([worker.connection for worker in busy], timeout=0.5)
            for worker in list(busy):
                late = time.monotonic() - worker.since > deadline
                if worker.connection not in ready and not late:
                    continue
                verdict = worker.take() if worker.connection in ready else worker.give_up()
                yield verdict
                if verdict[1].outcome in ("crash", "hang") or worker.done >= CASES_PER_WORKER:
                    place = workers.index(worker)
                    worker.end()
                    busy.remove(worker)
                    worker = workers[place] = _Worker()
                    busy.append(worker)
                if not _feed(worker, rest):
                    busy.remove(worker)
    finally:
        for worker in workers:
            worker.end()


def _feed(worker: _Worker, rest: Iterator[Case]) -> bool:
    case = next(rest, None)
    if case is not None:
        worker.give(case)
    return case is not None
