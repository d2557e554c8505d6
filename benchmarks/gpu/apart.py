"""A check in a process of its own, with a time limit: a hang, or an error that spoils the GPU, costs that check alone.

The processes are forked from one that has imported everything and has never touched a GPU, so a check begins at once::

    command ── server (imports torch, asyncpipe and the checks) ──┬── check    a group of processes, which is
                                                                  ├── check    killed as a whole when it is over
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.gpu.outcome import Outcome

__all__ = ["OUTPUT", "Ending", "Server"]

OUTPUT = 6000
"""Characters that are kept of the end of a check's output."""
KILLED_WITHIN = 5.0
"""Seconds in which a process that was killed is gone, unless the driver holds it; then it is left behind."""


class Ending:
    """How a check ended."""

    def __init__(self, outcome: Outcome | None, told: str, output: str, seconds: float, was_late: bool) -> None:
        self.outcome = outcome
        """``None`` if it did not come to its end."""
        self.told = told
        """How it ended, in one line."""
        self.output = output
        self.seconds = seconds
        self.was_late = was_late


class Server:
    """Starts the processes; ``modules`` register the checks."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self._modules = modules
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["asyncpipe.pipeline.pipeline", *modules])

    def run(self, name: str, gpus: int, limit: float) -> Ending:
        """Run the check ``name``, and kill it after ``limit`` seconds."""
        began = time.monotonic()
        with TemporaryDirectory(prefix="gpu-check-") as folder:
            answer, log = Path(folder, "answer"), Path(folder, "log")
            log.touch()
            arguments = (self._modules, name, gpus, limit, str(answer), str(log))
            process = self._context.Process(target=_life, args=arguments, name=name)
            process.start()
            late = False
            try:
                process.join(limit)
                late = process.is_alive()
            finally:
                _kill_group(process.pid)
                process.join(KILLED_WITHIN)
            output = log.read_text(errors="replace").strip()
            outcome: Outcome | None = None
            told = f"killed after {limit:.0f} s" if late else _ending_of(process.exitcode)
            with suppress(OSError, EOFError, pickle.UnpicklingError):
                outcome = pickle.loads(answer.read_bytes())  # noqa: S301 - this program's own
        last = output.rpartition("\n")[2][:300]
        told = "" if outcome is not None else f"{told}; its last line: {last}" if last else told
        return Ending(outcome, told, output[-OUTPUT:], time.monotonic() - began, late and outcome is None)


def _ending_of(code: int | None) -> str:
    if code is not None and code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"exit status {code}"


def _kill_group(pid: int | None) -> None:
    with suppress(ProcessLookupError, PermissionError):
        if pid is not None:
            os.killpg(pid, signal.SIGKILL)


def _life(modules: tuple[str, ...], name: str, gpus: int, limit: float, answer: str, log: str) -> None:
    """The life of a check's process, which leads a group: its workers end with it."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - until the end
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - until the end
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(0.5, limit * 0.8))
    try:
        outcome = _answer(modules, name, gpus)
    except BaseException:  # noqa: BLE001 - whatever it is, it is told
        traceback.print_exc()
        os._exit(1)
    part = f"{answer}.part"
    Path(part).write_bytes(pickle.dumps(outcome))
    os.replace(part, answer)
    os._exit(0)  # Neither threads that hang nor a GPU that is spoiled may keep it.


def _answer(modules: tuple[str, ...], name: str, gpus: int) -> Outcome:
    import torch

    from benchmarks.gpu.machine import Machine
    from benchmarks.gpu.outcome import CHECKS

    for module in modules:
        import_module(module)
    if not gpus:
        torch.set_num_threads(1)
    machine = Machine(gpus)
    if gpus:
        _ = machine.cycles_per_second  # Measured before a task needs it.
    return CHECKS[name].run(machine)
