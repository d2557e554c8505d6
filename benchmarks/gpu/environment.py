"""What the figures were measured on: machine, versions, and what this Python lacks."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.machine import Machine, cuda
from benchmarks.gpu.outcome import Outcome, check, seen

__all__ = ["environment"]

ROOT = Path(__file__).resolve().parents[2]
VARIABLES = re.compile("^(CUDA|NCCL|PYTORCH|TORCH|OMP|ASYNCPIPE)_")


@check("What is measured, and on what?", limit=60)
def environment(machine: Machine) -> Outcome:
    """Lines of the form ``name: value``; the one figure is the number of GPUs that torch finds."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    found = {
        "commit": _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"),
        "Python": f"{platform.python_version()}{'' if gil else ', without the interpreter lock'}",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'not built in'}",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "processor": f"{_processor()}, {len(os.sched_getaffinity(0))} cores",
        "triton, transformers, pytest-asyncio": ", ".join(map(_version, ("triton", "transformers", "pytest-asyncio"))),
    }
    found |= {name: value for name, value in sorted(os.environ.items()) if VARIABLES.match(name)}
    if count:
        cudnn: Any = torch.backends.cudnn
        found["cuDNN, NCCL"] = f"{cudnn.version()}, {'.'.join(map(str, cuda.nccl.version()))}"
        found["driver"] = _output(
            "nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"
        )
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        found[f"GPU {index}"] = (
            f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} "
            f"multiprocessors, compute capability {properties.major}.{properties.minor}"
        )
    return Outcome([seen("GPUs", count)], "\n".join(f"{name}: {value}" for name, value in found.items()))


def _output(*command: str) -> str:
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"
    return "; ".join(run.stdout.split("\n")).strip("; ")


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"no {package}"
