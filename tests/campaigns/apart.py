"""Work in a forked process of its own, with a time limit: that it dies or is late is a result as well."""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

__all__ = ["Apart", "in_turns"]

_fork = multiprocessing.get_context("fork")


class Apart:
    """One process, which sends what ``work`` yields."""

    def __init__(self, work: Callable[[], Iterable[Any]], seconds: float) -> None:
        self.results: list[Any] = []
        self.outcome = ""
        """``crashed`` or ``hung``; empty if all was well."""
        self.told = ""
        """How, with the stacks of all threads."""
        self._stacks = tempfile.NamedTemporaryFile(suffix=".stacks")  # noqa: SIM115 - until the end
        self.connection, theirs = _fork.Pipe()
        self._process = _fork.Process(target=_serve, args=(theirs, self._stacks.name, work), daemon=True)
        self._process.start()
        theirs.close()
        self._seconds, self._until = seconds, time.monotonic() + seconds

    def finish(self) -> Apart:
        """Wait for the end."""
        while not self.is_over(self._until - time.monotonic()):
            pass
        return self

    def is_over(self, seconds: float = 0.0) -> bool:
        """Take what is there, or comes in so many seconds; whether nothing will come any more."""
        try:
            while self.connection.poll(max(0.0, seconds)):
                self.results.append(self.connection.recv())
        except (EOFError, ConnectionError):
            self._process.join()
            if code := self._process.exitcode:
                name = signal.Signals(-code).name if code < 0 else f"exit status {code}"
                self._end("crashed", f"the process ended with {name}")
            else:
                self._end()
            return True
        if time.monotonic() < self._until:
            return False
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGUSR1)
        self._process.join(0.5)
        self._end("hung", f"not done after {self._seconds:g} s")
        return True

    def _end(self, outcome: str = "", told: str = "") -> None:
        with open(self._stacks.name, encoding="utf-8") as file:
            self.outcome, self.told = outcome, f"{told}\n{file.read()}"
        self.stop()

    def stop(self) -> None:
        """Kill the process, if it runs."""
        self._process.kill()
        self._process.join()
        self.connection.close()
        self._stacks.close()


def in_turns(
    items: Iterable[Any], work: Callable[[Any], Callable[[], Iterable[Any]]], processes: int, seconds: float
) -> Iterator[tuple[Any, Apart]]:
    """Each of ``items`` with the end of its ``work``, in the order of their ends; so many ``processes`` at a time."""
    rest = iter(items)
    busy: list[tuple[Any, Apart]] = []
    try:
        while True:
            while len(busy) < processes and (item := next(rest, None)) is not None:
                busy.append((item, Apart(work(item), seconds)))
            if not busy:
                return
            wait([apart.connection for _, apart in busy], timeout=0.5)
            for entry in list(busy):
                if entry[1].is_over():
                    busy.remove(entry)
                    yield entry
    finally:
        for _, apart in busy:
            apart.stop()


def _serve(connection: Connection, stacks: str, work: Callable[[], Iterable[Any]]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(stacks, "w", encoding="utf-8") as file:
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        torch.set_num_threads(1)
        logging.disable(logging.CRITICAL)
        for result in work():
            connection.send(result)
    connection.close()
    os._exit(0)
