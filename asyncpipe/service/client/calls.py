"""Everything that can be asked of the service, each as a dialogue, for all clients.

Pure, but for the clock of ``wait``. A new call is a method here and one in each client.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from secrets import token_urlsafe
from typing import Any
from urllib.parse import quote

from asyncpipe.errors import OptionError
from asyncpipe.service.client.asking import Asking, read_refusal
from asyncpipe.service.client.dialogue import BrokenExchange, Dialogue, Found, Pause, more_bytes, open_response
from asyncpipe.service.client.downloads import Download, Representation
from asyncpipe.service.client.errors import ApiError, WaitTimeoutError
from asyncpipe.service.client.events import EventParser
from asyncpipe.service.job_states import FINAL_STATES, IDEMPOTENCY_KEY, is_idempotency_key

__all__ = ["JobCalls"]

POLL_FIRST, POLL_MOST = 0.05, 2.0
"""Seconds between two requests while waiting for a job, at first and at most."""
STREAM_SECONDS = 60.0
"""A stream without any bytes for so long, not even a keep-alive comment, counts as broken."""


class JobCalls:
    """The calls to one service; the clients' methods of the same names say what each is."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking

    # Changing

    def submit(self, submission: Mapping[str, Any], idempotency_key: str | None) -> Dialogue[dict[str, Any]]:
        """The new job."""
        key = token_urlsafe(24) if idempotency_key is None else idempotency_key
        if not is_idempotency_key(key):
            raise OptionError(f"an idempotency key is {IDEMPOTENCY_KEY}")
        return self._asking.ask("POST", "/v1/jobs", dict(submission), {"Idempotency-Key": key}, repeatable=True)

    def change(self, job: str, what: str) -> Dialogue[dict[str, Any]]:
        """The job, after ``what``: pause, resume or cancel."""
        return self._asking.ask("POST", f"{_path(job)}/{what}", {})

    def again(
        self, job: str, what: str, from_step: int | None, changes: Mapping[str, Any] | None
    ) -> Dialogue[dict[str, Any]]:
        """The job, after ``what``: retry or fork."""
        return self._asking.ask("POST", f"{_path(job)}/{what}", {"from_step": from_step, "set": dict(changes or {})})

    def delete(self, job: str, dry_run: bool) -> Dialogue[dict[str, Any]]:
        """What was deleted, or would be."""
        return self._asking.ask("DELETE", _path(job) + ("?dry_run=true" if dry_run else ""), None, repeatable=dry_run)

    def amend(self, job: str, changes: Mapping[str, Any]) -> Dialogue[dict[str, Any]]:
        """The job, with what ``changes`` has."""
        given = {name: value for name, value in changes.items() if value is not None}
        # Changing it twice is changing it once.
        return self._asking.ask("PATCH", _path(job), given, repeatable=True)

    def change_schedule(self, job: str, schedule: str) -> Dialogue[dict[str, Any]]:
        """The job."""
        return self._asking.ask("PUT", f"{_path(job)}/schedule", {"schedule": schedule})

    def change_host(self, host: str, what: str) -> Dialogue[tuple[dict[str, Any], ...]]:
        """The workers of ``host``, after ``what``: drain or undrain."""
        if not host:
            raise OptionError("a host's name must not be empty")
        # Draining twice is draining.
        path = f"/v1/workers/{quote(host, safe='')}/{what}"
        answer = yield from self._asking.ask("POST", path, {}, repeatable=True)
        return tuple(answer.get("workers", ()))

    # Reading

    def show(self, job: str) -> Dialogue[dict[str, Any]]:
        """The job."""
        return self._asking.get(_path(job))

    def list(
        self, states: Collection[str] | None, limit: int | None, after: str | None, more: Mapping[str, Any]
    ) -> Dialogue[None]:
        """Finds jobs, page by page."""
        chosen = [("state", state) for state in states or ()] + _chosen(**more)
        left = limit
        while left is None or left > 0:
            page = 1000 if left is None else min(left, 1000)
            query: list[tuple[str, str]] = [("limit", str(page)), *chosen]
            answer = yield from self._asking.get("/v1/jobs", [*query, ("after", after)] if after is not None else query)
            jobs = answer.get("jobs") or []
            for job in jobs:
                yield Found(job)
            left = None if left is None else left - len(jobs)
            after = answer.get("next")
            if after is None or not jobs:
                return

    def history(self, job: str) -> Dialogue[tuple[dict[str, Any], ...]]:
        """The job's transitions."""
        answer = yield from self._asking.get(f"{_path(job)}/history")
        return tuple(answer.get("transitions", ()))

    def losses(self, job: str, after: int) -> Dialogue[None]:
        """Finds the job's steps, page by page."""
        following: int | None = after
        while following is not None:
            query = [("after", str(following)), ("limit", "1000")]
            answer = yield from self._asking.get(f"{_path(job)}/losses", query)
            for row in answer.get("losses", ()):
                yield Found(row)
            following = answer.get("next")

    def named(self, what: str) -> Dialogue[tuple[Any, ...]]:
        """What the service lists as ``what``: entries, schedules or workers."""
        answer = yield from self._asking.get(f"/v1/{what}")
        return tuple(answer.get(what, ()))

    def artifacts(self, job: str) -> Dialogue[tuple[dict[str, Any], ...]]:
        """What can be downloaded."""
        answer = yield from self._asking.get(f"{_path(job)}/artifacts")
        return tuple(answer.get("artifacts", ()))

    def download(self, job: str, artifact: str, step: int | None, begun: Representation | None) -> Dialogue[None]:
        """Finds what ``PartFile`` takes."""
        if not artifact:
            raise OptionError("an artifact's name must not be empty")
        path = f"{_path(job)}/artifacts/{quote(artifact, safe='')}"
        return Download(self._asking, path, step, begun).dialogue()

    def wait(self, job: str, timeout: float | None) -> Dialogue[dict[str, Any]]:
        """The job, when it has ended."""
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = POLL_FIRST
        while (found := (yield from self.show(job)))["state"] not in FINAL_STATES:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise WaitTimeoutError(f"job {job} is {found['state']} after {timeout:g} s; it goes on")
            yield Pause(pause if left is None else min(pause, left))
            pause = min(pause * 1.5, POLL_MOST)
        return found

    def events(self, job: str, after: int) -> Dialogue[None]:
        """Finds the job's events, until it has ended."""
        last, failures = after, 0
        while True:
            error: BrokenExchange | ApiError
            try:
                headers = {"Accept": "text/event-stream", "Last-Event-ID": str(last)}
                request = self._asking.request("GET", f"{_path(job)}/events", headers, patience=STREAM_SECONDS)
                head = yield from open_response(request)
                if head.status != 200:
                    raise (yield from read_refusal(head))
                parser = EventParser()
                while chunk := (yield from more_bytes()):
                    for event in parser.feed(chunk):
                        failures = 0
                        if event.kind == "end":
                            return
                        last = max(last, event.id)
                        yield Found(event)
                error = BrokenExchange(f"the event stream of job {job} ends again and again before the job does")
            except (BrokenExchange, ApiError) as broken:
                error = broken
            failures += 1
            yield Pause(self._asking.pause_after(failures, error))


def _chosen(
    *,
    entry: str | None = None,
    tags: Collection[str] = (),
    text: str | None = None,
    since: float | None = None,
    oldest_first: bool = False,
) -> list[tuple[str, str]]:
    """The query of a list, beside its states and pages."""
    given = {"entry": entry, "text": text, "since": None if since is None else repr(float(since))}
    return [
        *(("tag", tag) for tag in tags),
        *((name, value) for name, value in given.items() if value is not None),
        *([("order", "oldest")] if oldest_first else []),
    ]


def _path(job: str) -> str:
    if not job:
        raise OptionError("a job's id must not be empty")
    return f"/v1/jobs/{quote(job, safe='')}"
