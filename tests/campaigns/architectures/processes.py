"""A process for each architecture, with a time limit: one that dies or is late is a result as well."""

from __future__ import annotations

import faulthandler
import importlib
import logging
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import torch

from tests.campaigns.architectures.architecture import Architecture
from tests.campaigns.architectures.judge import CELLS, Cell, Header, judge

__all__ = ["judged"]

_fork = multiprocessing.get_context("fork")

Line = Header | Cell


def judged(
    architecture: Architecture,
    seconds: float,
    cells: list[tuple[str, str]] = CELLS,
    work: Callable[..., Iterator[Line]] = judge,
) -> list[Line]:
    """The header and the cells of ``architecture``, judged in a process of its own.

    Cells that it did not come to, after ``seconds`` or since it died, are told as ``hung`` or ``crashed``, the first of
    them with the stacks of all threads.
    """
    importlib.import_module(architecture.library)  # once, before processes are forked
    ours, theirs = _fork.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile(suffix=".stacks") as stacks:
        process = _fork.Process(target=_serve, args=(theirs, stacks.name, architecture, cells, work), daemon=True)
        process.start()
        theirs.close()
        until = time.monotonic() + seconds
        found = list(_received(ours, until))
        outcome = "hung" if time.monotonic() >= until else "crashed"
        if outcome == "hung" and process.pid is not None:
            os.kill(process.pid, signal.SIGUSR1)
            process.join(0.5)
            process.kill()
        process.join()
        with open(stacks.name, encoding="utf-8") as file:
            told = f"after {seconds:.0f} s" if outcome == "hung" else f"exit status {process.exitcode}"
            told += "\n" + file.read()
    ours.close()
    if not any(isinstance(line, Header) for line in found):
        found.insert(0, Header(architecture.name, architecture.library, 0, "-", 0.0, "-"))
    done = {line[:2] for line in found if isinstance(line, Cell)}
    for cell in cells:
        if cell not in done:
            found.append(Cell(*cell, outcome, told))
            told = "as above"
    return found


def _received(connection: Connection, until: float) -> Iterator[Line]:
    while connection.poll(max(0.0, until - time.monotonic())):
        try:
            yield connection.recv()
        except (EOFError, ConnectionError):
            return


def _serve(
    connection: Connection,
    stacks: str,
    architecture: Architecture,
    cells: list[tuple[str, str]],
    work: Callable[..., Iterator[Line]],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(stacks, "w", encoding="utf-8") as file:
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        torch.set_num_threads(1)
        logging.disable(logging.CRITICAL)
        for line in work(architecture, cells):
            connection.send(line)
    connection.close()
    os._exit(0)
