"""A process that may open 1,024 files: it says what they are for, and a flood takes none from a job's snapshots."""

from __future__ import annotations

import threading
from pathlib import Path

from tests.campaigns.service import Row
from tests.campaigns.service._flooded import JOB, answered, held, serve

FILES = 1024
SOCKETS = 2000
ASKED = 40


def run(folder: Path) -> list[Row]:
    """A job that takes snapshots during a flood."""
    with serve(folder, files=FILES) as service:
        budget = next(line for line in service.lines if "descriptors" in line)
        most, ended = 0, threading.Event()

        def count() -> None:
            nonlocal most
            while not ended.wait(0.005):
                most = max(most, service.open_files())

        counting = threading.Thread(target=count)
        with held(service.place, SOCKETS):
            counting.start()
            job = service.client.submit(JOB)
            good, _ = answered(service.place, "/livez", ASKED)
            done = service.client.wait(job["id"], timeout=90)
        ended.set()
        counting.join()
        events = list(service.client.events(job["id"]))
    taken = sum(event.kind == "snapshot" for event in events)
    wanted = JOB["training"]["steps"] // JOB["snapshots"]["every"]
    troubles = [event.data for event in events if event.kind == "note" and event.data.get("level", 0) >= 30]
    errors = (folder / "stderr").read_text()
    held_up = done["state"] == "finished" and taken == wanted and not troubles and "Too many open" not in errors
    return [
        Row(f"a limit of {FILES:,} files", budget, budget.startswith(f"{FILES} descriptors")),
        Row(
            f"{SOCKETS:,} sockets without a token there, while a job trains",
            f"{done['state']}, {taken} of {wanted} snapshots, {good} of {ASKED} /livez, at most {most} files open",
            held_up and good == ASKED and most < FILES,
        ),
    ]
