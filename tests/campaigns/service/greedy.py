"""A job that takes more and more memory, beside one that does not, where there are 2.5 GB for all.

What a container does when its memory is over is done here by a thread: it kills the largest process. A supervisor
starts the service again whenever it is gone.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

from killing import Served, curve, poll, same, serving

from asyncpipe.service.client import JobClient, UnreachableError
from tests.campaigns.service import Row
from tests.campaigns.service._processes import ODD, SECONDS, held_by, job, make_odd_folder, tree

__all__ = ["run"]

LIMIT = 2_500_000_000
ENDED = ("finished", "failed", "cancelled", "quarantined")


class _Container:
    """A service in ``folder`` that is started again whenever it is gone, with ``LIMIT`` bytes for all its processes."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.deaths = 0
        self.most = 0
        self.served: Served | None = None
        self._options = options
        self._is_over = Event()
        self._threads = [Thread(target=target, daemon=True) for target in (self._supervise, self._watch)]

    def __enter__(self) -> _Container:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _supervise(self) -> None:
        while not self._is_over.is_set():
            with serving(self.folder, *self._options, is_fresh=True) as served:
                self.served = served
                while served.process.poll() is None and not self._is_over.wait(0.02):
                    pass
                if not self._is_over.is_set():
                    self.deaths += 1

    def _watch(self) -> None:
        while not self._is_over.wait(0.02):
            served = self.served
            if served is None or served.process.poll() is not None:
                continue
            held = {pid: held_by(pid) for pid in tree(served.process.pid)}
            self.most = max(self.most, sum(held.values()))
            if sum(held.values()) > LIMIT:
                with suppress(ProcessLookupError):
                    os.kill(max(held, key=lambda pid: held[pid]), signal.SIGKILL)

    def ask(self, what: Any) -> Any:
        """What ``what`` returns of a client, as soon as the service is there."""
        deadline = time.monotonic() + SECONDS
        while True:
            assert time.monotonic() < deadline
            with suppress(UnreachableError, AssertionError):
                if (served := self.served) is not None and served.url is not None:
                    return what(JobClient(served.url))
            time.sleep(0.05)

    def end_of(self, job: str) -> dict[str, Any]:
        """The job when it has ended."""
        found: dict[str, Any] = poll(
            f"the end of {job}",
            lambda: (each := self.ask(lambda client: client.show(job)))["state"] in ENDED and each,
            0.1,
            SECONDS,
        )
        return found


def run(folder: Path) -> list[Row]:
    """A row for threads, for processes, and for a limit of the process itself."""
    steps = 150
    with serving(make_odd_folder(folder / "reference")) as served:
        client = served.client()
        right = client.submit(job("charlm:build", steps))["id"]
        assert client.wait(right, SECONDS)["state"] == "finished"
    reference = (folder / "reference" / "state", right)
    return [
        _beside("a greedy job on threads", folder / "threads", reference, steps, "--isolation", "thread"),
        _beside("a greedy job in a process", folder / "processes", reference, steps, "--isolation", "process"),
        _limited(folder / "limited"),
    ]


def _beside(what: str, folder: Path, reference: tuple[Path, str], steps: int, *options: str) -> Row:
    with _Container(make_odd_folder(folder), *options) as container:
        innocent = container.ask(lambda client: client.submit(job("charlm:build", steps), "innocent"))["id"]
        greedy = container.ask(lambda client: client.submit(job(f"{ODD}:greedy", 10**6, every=10**6), "greedy"))["id"]
        bad, good = container.end_of(greedy), container.end_of(innocent)
    bits = good["state"] == "finished" and curve(folder / "state", innocent) == curve(*reference)
    if bits:
        same((folder / "state", innocent), reference)
    figure = (
        f"{bad['attempts']} attempts, then {bad['state']}; the other job: {good['state']}, "
        f"{'bit-equal' if bits else 'with other bits'}, {good['attempts']} starts; the service died "
        f"{container.deaths} times; at most {container.most / 1e9:.2f} GB"
    )
    return Row(f"{what}, 2.5 GB for all", figure, bad["state"] == "quarantined" and bad["attempts"] == 3 and bits)


def _limited(folder: Path) -> Row:
    with _serving_limited(folder) as client:
        # Without a snapshot: one that gets on between two failures is tried again as long as it does.
        greedy = client.submit(job(f"{ODD}:greedy", 10**6, every=10**6))["id"]
        innocent = client.submit(job("charlm:build", 30))["id"]
        bad, good = client.wait(greedy, SECONDS), client.wait(innocent, SECONDS)
    held = bad["state"] in ("failed", "quarantined") and "memory" in bad["cause"] and good["state"] == "finished"
    return Row(
        "a greedy job, job_memory 1.2 GB", f"{bad['state']}: {bad['cause'][:120]}; the other job: {good['state']}", held
    )


@contextmanager
def _serving_limited(folder: Path) -> Iterator[JobClient]:
    options = ("--isolation", "process", "--job-memory", "1.2GB")
    with serving(make_odd_folder(folder), *options, is_fresh=True) as served:
        yield served.client()
