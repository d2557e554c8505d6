"""What rows share that look at the processes of a service, or at jobs that misbehave."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from kill_campaign import children
from killing import make_folder

from asyncpipe.service.client import JobClient

__all__ = ["ODD", "held_by", "job", "make_odd_folder", "tree", "wait_for"]

SECONDS = 300.0
ODD = "isolation_entries"
SHAPE = {"width": 16, "blocks": 4, "heads": 2, "context": 16, "dropout": 0.1, "sample_length": 2}


def make_odd_folder(folder: Path) -> Path:
    """``folder``, with a service that has the example's entry and the odd ones, and three attempts for each job."""
    make_folder(folder)
    for name in ("isolation_entries", "resume_helpers"):
        shutil.copy(Path(__file__).parents[2] / "support" / f"{name}.py", folder / "code")
    settings = folder / "service.toml"
    names = ("greedy", "plain", "segfaults", "stuck_loader", "holds_the_gil", "never_returns", "ties")
    odd = "".join(f'[entries."{ODD}:{name}"]\n' for name in names)
    text = settings.read_text(encoding="utf-8").replace("max_attempts = 1000000\n", "")
    settings.write_text(text + odd, encoding="utf-8")
    return folder


def job(entry: str, steps: int, *, every: int = 10, folder: Path | None = None) -> dict[str, Any]:
    """A submission of ``entry``, which says in ``folder``, one in the service's, that it is at it."""
    pipeline = {"devices": ["cpu:0", "cpu:1"], "microbatches": 4, "schedule": "1f1b"}
    training = {"steps": steps, "batch_size": 8, "learning_rate": 3e-3, "seed": 0}
    parameters = SHAPE if entry == "charlm:build" else {} if folder is None else {"folder": str(folder)}
    tables = {"pipeline": pipeline, "training": training, "snapshots": {"every": every}, "parameters": parameters}
    return {"name": entry.partition(":")[2], "entry": entry, **tables}


def wait_for(client: JobClient, job: str, *states: str, seconds: float = SECONDS) -> dict[str, Any]:
    """The job when it is in one of ``states``, or has ended."""
    deadline = time.monotonic() + seconds
    while (found := client.show(job))["state"] not in (*states, "finished", "failed", "cancelled", "quarantined"):
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found


def tree(pid: int) -> Iterator[int]:
    """A process with all that it has started."""
    yield pid
    for child in children(pid):
        yield from tree(child)


def held_by(pid: int) -> int:
    """Bytes of a process, its part of what it shares with others."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
