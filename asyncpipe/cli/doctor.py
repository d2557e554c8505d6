"""Say what works on this machine, and what to do about the rest.

It looks at Python, torch, devices, access between GPUs, shared memory, open files, ports and optional packages. Then it
starts two worker processes, which make a step together. The status is 1 if something does not work.
"""

from __future__ import annotations

import argparse
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, NamedTuple

from asyncpipe import __version__
from asyncpipe.cli.arguments import add_command

if TYPE_CHECKING:
    from asyncpipe.cli.arguments import Subparsers

__all__ = ["add_parser"]

OPTIONAL = {
    "cli": "rich",
    "service": "fastapi",
    "client": "httpx",
    "transformers": "transformers",
    "datasets": "datasets",
    "safetensors": "safetensors",
    "ray": "ray",
    "tensorboard": "tensorboard",
    "mlflow": "mlflow-skinny",
    "otel": "opentelemetry-api",
}
"""A package of each extra."""
PORTS = {8080: "API", 9400: "metrics"}
SHARED = "/dev/shm"  # noqa: S108 - its size is asked for
LEAST_SHARED = 1 << 29
"""Bytes. A container has 64 MiB unless it is told otherwise."""
FEWEST_FILES = 1024
"""Descriptors: each worker and each of its edges takes some."""


class _Finding(NamedTuple):
    what: str
    text: str
    advice: str = ""
    """What to do; empty where nothing is wrong."""
    fails: bool = False


def add_parser(subparsers: Subparsers) -> None:
    """Add the command ``doctor``."""
    parser = add_command(subparsers, "doctor", __doc__)
    parser.add_argument("--quick", action="store_true", help="start no worker processes")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    failed = False
    for look in (_versions, _devices, _shared_memory, _files, _ports, _packages, *(() if args.quick else (_workers,))):
        for finding in _of(look):
            mark = "FAILS" if finding.fails else "note" if finding.advice else "ok"
            print(f"{mark:5}  {finding.what:13}  {finding.text}", flush=True)
            if finding.advice:
                print(f"{'':22}{finding.advice}")
            failed |= finding.fails
    return int(failed)


def _of(look: Callable[[], Iterator[_Finding]]) -> Iterator[_Finding]:
    try:
        yield from look()
    except Exception as error:  # noqa: BLE001 - what fails here is what was looked for
        what = look.__name__.strip("_").replace("_", " ")
        yield _Finding(
            what, f"{type(error).__name__}: {error}", "read the error; the others do not need it", fails=True
        )


def _versions() -> Iterator[_Finding]:
    import torch

    gil = "" if getattr(sys, "_is_gil_enabled", lambda: True)() else ", free-threaded"
    yield _Finding(
        "versions", f"asyncpipe {__version__}, Python {platform.python_version()}{gil}, {platform.machine()}"
    )
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    yield _Finding("torch", f"{torch.__version__}, {cuda}")


def _devices() -> Iterator[_Finding]:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield _Finding("CPU", f"{cores} cores: devices cpu:0, cpu:1 … are threads or processes on them")
    if not torch.cuda.is_available():
        advice = "nothing to do on a machine without GPUs; else install torch for its CUDA, and look at nvidia-smi"
        yield _Finding("GPUs", "none that torch can use", advice)
        return
    count = torch.cuda.device_count()
    for number in range(count):
        free, total = torch.cuda.mem_get_info(number)
        name = torch.cuda.get_device_name(number)
        yield _Finding(f"cuda:{number}", f"{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    if closed := [f"{a}>{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]:
        yield _Finding("peer access", f"not {', '.join(closed)}", "copies between these pass the host's memory, slower")
    elif pairs:
        yield _Finding("peer access", f"between all {count}")


def _shared_memory() -> Iterator[_Finding]:
    from asyncpipe.shared_memory import new_memory

    descriptor = new_memory("asyncpipe doctor")
    try:
        os.ftruncate(descriptor, 1 << 26)
        yield _Finding("shared memory", "can be made, for tensors between processes")
    finally:
        os.close(descriptor)
    try:
        found = os.statvfs(SHARED)
    except OSError:
        return
    size = found.f_blocks * found.f_frsize
    advice = "NCCL and loaders with workers need more: docker run --shm-size=1g" if size < LEAST_SHARED else ""
    yield _Finding(SHARED, f"{size / 2**30:.2f} GiB", advice)


def _files() -> Iterator[_Finding]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    advice = f"ulimit -n {hard}" if soft < FEWEST_FILES else ""
    yield _Finding("open files", f"at most {soft}", advice)


def _ports() -> Iterator[_Finding]:
    for port, use in PORTS.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                advice = f"`asyncpipe serve` needs another port for its {use}: --port, --metrics-port"
                yield _Finding(f"port {port}", str(error.strerror), advice)
            else:
                yield _Finding(f"port {port}", f"free, for the {use} of `asyncpipe serve`")


def _packages() -> Iterator[_Finding]:
    there, missing = [], []
    for extra, package in OPTIONAL.items():
        try:
            there.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            missing.append(extra)
    yield _Finding("packages", ", ".join(there) or "none of the optional ones")
    if missing:
        advice = f"if you need them, in a checkout: pip install -e '.[{','.join(missing)}]'"
        yield _Finding("extras", f"not installed: {', '.join(missing)}", advice)


def _workers() -> Iterator[_Finding]:
    import torch
    from torch import nn

    from asyncpipe import Pipeline

    began = time.perf_counter()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    loss, devices = nn.functional.mse_loss, ["cpu:0", "cpu:1"]
    with Pipeline(
        model, devices, microbatches=2, loss_fn=loss, optimizer=torch.optim.SGD, workers="processes"
    ).sync() as pipe:
        pipe.step(torch.randn(4, 8), torch.randn(4, 8))
    yield _Finding("workers", f"two processes made a step within {time.perf_counter() - began:.1f} s")
