"""kill -9 of a service, and of the processes of its jobs, at random instants: ``ASYNCPIPE_KILLS`` times (12)."""

from __future__ import annotations

import os
from pathlib import Path

from kill_campaign import PROCESS_KILLED, kill_again_and_again

from tests.campaigns.service import Row

__all__ = ["run"]

SEED = 6


def run(folder: Path) -> list[Row]:
    """One row."""
    kills, seed = int(os.environ.get("ASYNCPIPE_KILLS", "12")), int(os.environ.get("ASYNCPIPE_KILL_SEED", str(SEED)))
    done = kill_again_and_again(folder, kills, seed)
    processes = done.moments[PROCESS_KILLED]
    killed = f"{done.moments.total() - processes} of the service, {processes} of processes; {done.jobs} jobs"
    figure = f"{killed}: {done.tensors} tensors and all losses bit-equal; "
    figure += f"{done.events} events and {done.snapshots} snapshots are there"
    return [Row(f"{done.moments.total()} x kill -9", figure, held=True)]
