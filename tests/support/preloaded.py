"""Runs scripts in processes that have already imported torch and the package, which takes two seconds of CPU otherwise.

A fork server (of ``multiprocessing``) imports them once per test process and forks a child for each script.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import ModuleType

__all__ = ["preloaded_context", "run_script"]

SECONDS = 50.0
PRELOADED = [
    "torch._dynamo",
    "fastapi",
    "uvicorn.protocols.http.h11_impl",
    "asyncpipe.compat",
    "asyncpipe.ops.edges.connect",
    "asyncpipe.service.training_service",
]


def preloaded_context() -> ForkServerContext:
    """Starts processes by the fork server, of which a test process has one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def run_script(code: str, folder: Path) -> tuple[int | None, str, str]:
    """Exit status, stdout and stderr of ``code``, run as ``__main__`` with warnings as errors; needs a ``folder``."""
    out, err = folder / "stdout", folder / "stderr"
    process = preloaded_context().Process(target=_main, args=(code, str(out), str(err)))
    process.start()
    process.join(SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode, out.read_text(encoding="utf-8"), err.read_text(encoding="utf-8")


def _main(code: str, out: str, err: str) -> None:
    for path, number in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdin, sys.stdout, sys.stderr = open(os.devnull), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    sys.argv = ["-c"]
    warnings.resetwarnings()
    warnings.simplefilter("error")
    module = sys.modules["__main__"] = ModuleType("__main__")
    try:
        exec(compile(code, "<string>", "exec"), vars(module))
    finally:
        sys.stdout.flush()
