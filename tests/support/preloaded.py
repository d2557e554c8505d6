"""Processes that have already imported torch and the package, which takes two seconds of CPU otherwise.

A fork server (of ``multiprocessing``) imports them once per test process and forks a child for each of:

- a script (``run_script``);
- a program with arguments, such as ``asyncpipe serve`` (``Program``), which is used like a ``subprocess.Popen``;
- the fork servers of the package's own worker processes (``spawn``), in tests that look at what workers compute and not
  at how their processes begin.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, process, reduction
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from asyncpipe.runtime.workers import child_process, fork_server, process_title

__all__ = ["Program", "preloaded_context", "run_script", "spawn", "start"]

SECONDS = 50.0
PRELOADED = [
    "pytest",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "uvloop",
    "fastapi",
    "uvicorn.protocols.http.h11_impl",
    "asyncpipe.cli.bench",
    "asyncpipe.cli.serve",
    "asyncpipe.cli.train",
    "asyncpipe.compat",
    "asyncpipe.ops.edges.connect",
    "asyncpipe.pipeline.resident.serve",
    "asyncpipe.service.http",
    "asyncpipe.service.training_service",
    "asyncpipe.train.lasting_run",
]


def preloaded_context() -> ForkServerContext:
    """Starts processes by the fork server, of which a test process has one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def start() -> None:
    """Start the fork server now, for who looks at what processes and descriptors there are more afterwards."""
    preloaded_context()
    forkserver.ensure_running()


def run_script(code: str, folder: Path, *arguments: str) -> tuple[int | None, str, str]:
    """Exit status, stdout and stderr of ``code``, run as ``__main__`` with warnings as errors; needs a ``folder``."""
    out, err = folder / "stdout", folder / "stderr"
    with out.open("w") as stdout, err.open("w") as stderr:
        program = Program(code, *arguments, stdout=stdout, stderr=stderr, with_warnings=True)
    try:
        program.wait(SECONDS)
    except subprocess.TimeoutExpired:
        program.kill()
        program.wait()
    return program.returncode, out.read_text(encoding="utf-8"), err.read_text(encoding="utf-8")


class _Descriptor:
    """A descriptor of this process, which the child gets a duplicate of."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return _received, (reduction.DupFd(self.number),)


def _received(duplicate: Any) -> int:
    number: int = duplicate.detach()
    return number


class Program:
    """``code``, run as ``python -c`` would, in a preloaded process; to be used like a ``Popen``."""

    def __init__(
        self,
        code: str,
        *arguments: str,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdout: IO[str] | int = subprocess.PIPE,
        stderr: IO[str] | int = subprocess.PIPE,
        own_session: bool = False,
        with_warnings: bool = False,
        stdin: int | None = None,
    ) -> None:
        """Its output and errors go to files, or are read here. ``own_session`` makes a process group for it; it reads
        from the descriptor ``stdin``, which this process keeps.
        """
        self.args = arguments
        self.stdout, out = self._stream(stdout)
        self.stderr, err = self._stream(stderr)
        start = {
            "code": code,
            "arguments": arguments,
            "folder": str(cwd or Path.cwd()),
            "environment": dict(os.environ if env is None else env),
            "own_session": own_session,
            "with_warnings": with_warnings,
        }
        numbers = [_Descriptor(out), _Descriptor(err), None if stdin is None else _Descriptor(stdin)]
        self._process = preloaded_context().Process(target=_run, args=(start, *numbers))
        self._process.start()
        self.pid: int = self._process.pid or 0
        for own, number in ((self.stdout, out), (self.stderr, err)):
            if own is not None:
                os.close(number)

    @staticmethod
    def _stream(wanted: IO[str] | int) -> tuple[IO[str] | None, int]:
        if not isinstance(wanted, int):
            return None, wanted.fileno()
        reader, writer = os.pipe()
        return open(reader, encoding="utf-8"), writer

    @property
    def returncode(self) -> int | None:
        """As ``Popen``'s."""
        return self._process.exitcode

    poll = returncode.fget

    def wait(self, timeout: float | None = None) -> int:
        """Its status, once it has ended."""
        self._process.join(timeout)
        if (status := self.returncode) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return status

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it prints until its end."""
        errors: list[str] = []
        assert self.stdout is not None
        assert self.stderr is not None
        reader = threading.Thread(target=lambda: errors.append(self.stderr.read()), daemon=True)
        reader.start()
        out = self.stdout.read()
        reader.join(timeout)
        self.wait(timeout)
        return out, errors[0]

    def send_signal(self, number: int) -> None:
        """Unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()


def spawn(
    title: str,
    pipes: child_process.Pipes,
    descriptors: Sequence[int],
    environment: Mapping[str, str],
    *,
    own_stderr: bool = True,
) -> Any:
    """In the place of the package's: what comes back has the ``pid`` and the ``wait`` of a ``Popen``."""
    given = {0: pipes.stdin, 1: 1, 2: pipes.stderr if own_stderr else 2} | {number: number for number in descriptors}
    numbers = {target: _Descriptor(number) for target, number in given.items()}
    arguments = (title, numbers, dict(environment), os.getcwd())
    process = preloaded_context().Process(target=_become_worker, args=arguments, daemon=True)
    process.start()
    return _Worker(process)


class _Worker:
    """A process whose descriptors are closed when somebody has waited for it."""

    def __init__(self, process: Any) -> None:
        self.pid: int = process.pid
        self._process = process

    def wait(self) -> None:
        self._process.join()
        self._process.close()


# In the child


def _run(start: dict[str, Any], out: int, err: int, given: int | None) -> None:
    process.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    fork_server.spawn = spawn
    # The one that has forked this process forks its workers' fork servers, too; it would start another one.
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined, method-assign]
    _place({1: out, 2: err} if given is None else {0: given, 1: out, 2: err})
    _open_standard_files(os.open(os.devnull, os.O_RDONLY) if given is None else 0)
    os.environ.clear()
    os.environ.update(start["environment"])
    if start["own_session"]:
        os.setsid()
    os.chdir(start["folder"])
    sys.path.insert(0, "")
    sys.argv = ["-c", *start["arguments"]]
    warnings.resetwarnings()
    if start["with_warnings"]:
        warnings.simplefilter("error")
    module = sys.modules["__main__"] = ModuleType("__main__")
    try:
        exec(compile(start["code"], "<string>", "exec"), vars(module))
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()


def _become_worker(title: str, numbers: dict[int, int], environment: dict[str, str], folder: str) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    _make_room_for_title()
    process_title.set_title(title)
    _place(numbers)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    _open_standard_files(0)
    sys.argv = [str(child_process.PROGRAM), title]
    runpy.run_path(str(child_process.PROGRAM), run_name="__main__")


def _open_standard_files(stdin: int) -> None:
    sys.stdin = open(stdin)  # noqa: SIM115 - until the end
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115


def _place(numbers: Mapping[int, int]) -> None:
    """Make duplicates of descriptors be at these numbers."""
    above = {target: fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 500) for target, number in numbers.items()}
    for number in numbers.values():
        os.close(number)
    for target, number in above.items():
        os.dup2(number, target)
        os.close(number)


def _make_room_for_title() -> None:
    """The last argument of a process may be listed under another name: begin it ``ROOM`` bytes before its end."""
    values = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    ctypes.memset(int(values[46]) - 2 - process_title.ROOM, 0, 1)
