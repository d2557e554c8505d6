"""Jobs that cannot be stopped from inside: each is cancelled, and is gone within the deadline with its place free."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from killing import poll, serving

from asyncpipe.service.client import JobClient
from tests.campaigns.service import Row
from tests.campaigns.service._processes import ODD, job, make_odd_folder, wait_for

__all__ = ["run"]

CANCEL_SECONDS = 5.0
SLACK_SECONDS = 3.0
"""Behind it, for a process to be terminated, and then killed."""


def run(folder: Path) -> list[Row]:
    """A row for each way to be stuck."""
    with serving(make_odd_folder(folder / "stuck"), "--isolation", "process") as served:
        client = served.client()
        return [
            _stuck(folder / "stuck", client, "four loaders that wait for ever", ["stuck_loader"] * 4),
            _stuck(folder / "stuck", client, "a regular expression that holds the GIL for ever", ["holds_the_gil"]),
            _stuck(folder / "stuck", client, "a stage that never returns from C", ["never_returns"]),
            _stuck(
                folder / "stuck",
                client,
                "one of each, beside a job that trains",
                ["holds_the_gil", "never_returns"],
                True,
            ),
        ]


def _stuck(folder: Path, client: JobClient, what: str, entries: list[str], beside: bool = False) -> Row:
    good = client.submit(job("charlm:build", 400)) if beside else None
    places = [Path(tempfile.mkdtemp(dir=folder)) for _ in entries]
    stuck = [
        client.submit(job(f"{ODD}:{entry}", 10, folder=Path(place.name)))["id"]
        for entry, place in zip(entries, places, strict=True)
    ]
    poll("all are stuck", lambda: all(any(place.iterdir()) for place in places))
    step = client.show(good["id"])["step"] if good else 0
    behind = client.submit(job("charlm:build", 3))["id"]
    began = time.monotonic()
    for each in stuck:
        client.cancel(each)
    states = {wait_for(client, each)["state"] for each in stuck}
    seconds = time.monotonic() - began
    after = wait_for(client, behind)["state"]
    trained = client.show(good["id"])["step"] - step if good else 1
    if good:
        client.cancel(good["id"])
    figure = f"{' and '.join(states)} after {seconds:.1f} s; a job behind them: {after}"
    figure += f"; the other did {trained} steps meanwhile" if good else ""
    held = states == {"cancelled"} and seconds < CANCEL_SECONDS + SLACK_SECONDS and after == "finished" and trained > 0
    return Row(f"{what}, cancelled", figure, held)
