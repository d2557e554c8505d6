"""Everything that can be asked of the service: each call is declared once, for both clients.

A method makes the coroutine of its call; ``_one`` and ``_many`` of the client say what becomes of it, so that
``JobClient.show`` returns a dict, and ``AsyncJobClient.show`` is awaited for one.
"""

# mypy: disable-error-code=no-any-return

from __future__ import annotations

import builtins
import math
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping
from pathlib import Path
from secrets import token_urlsafe
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import httpx

from asyncpipe.errors import OptionError
from asyncpipe.service.client.asking import Asking, BrokenExchange, Repeating, Wire, refusal
from asyncpipe.service.client.downloads import download
from asyncpipe.service.client.errors import ApiError, WaitTimeoutError
from asyncpipe.service.client.events import ServerEvent, events_of
from asyncpipe.service.job_states import FINAL_STATES, IDEMPOTENCY_KEY, is_idempotency_key

__all__ = ["JobCalls"]

POLL_FIRST, POLL_MOST = 0.05, 2.0
"""Seconds between two requests while waiting for a job, at first and at most."""
STREAM_SECONDS = 60.0
"""A stream without any bytes for so long, not even a keep-alive comment, counts as broken."""
PAGE = 1000
"""Rows that are asked for at once."""

_Table = TypeVar("_Table")
"""What a client returns for one JSON object, as a job; further ones: for several, for each of many …"""
_Tables = TypeVar("_Tables")
_EachTable = TypeVar("_EachTable")
_EachEvent = TypeVar("_EachEvent")
_File = TypeVar("_File")


class JobCalls(ABC, Generic[_Table, _Tables, _EachTable, _EachEvent, _File]):
    """The calls of a client."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        timeout: float = 30.0,
        retries: int = 5,
        sleep: Callable[[float], Any] | None = None,
        authority: str | Path | None = None,
    ) -> None:
        """``sleep`` is called in the place of the client's own.

        ``authority`` is the file (PEM) of who has signed the service's certificate, where the system does not trust it.
        """
        self._asking = Asking(self._wire(url, sleep, authority), url, token, timeout, retries)

    @property
    def url(self) -> str:
        """Where the service is."""
        return self._asking.url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @staticmethod
    @abstractmethod
    def _wire(url: str, sleep: Callable[[float], Any] | None, authority: str | Path | None) -> Wire:
        """What the client sends and waits with."""

    @abstractmethod
    def _one(self, call: Coroutine[Any, Any, Any]) -> Any:
        """What the client returns for ``call``."""

    @abstractmethod
    def _many(self, call: AsyncGenerator[Any, None]) -> Any:
        """What the client returns for what ``call`` yields."""

    # Changing

    def submit(self, submission: Mapping[str, Any], idempotency_key: str | None = None) -> _Table:
        """The new job. Submitting again with the same key returns the same job, even much later.

        Without a key, one is generated for this call, so that repeated requests create one job.
        """
        key = token_urlsafe(24) if idempotency_key is None else idempotency_key
        if not is_idempotency_key(key):
            raise OptionError(f"an idempotency key is {IDEMPOTENCY_KEY}")
        return self._ask("POST", "/v1/jobs", body=dict(submission), headers={"Idempotency-Key": key}, repeatable=True)

    def pause(self, job: str) -> _Table:
        """The job, which is paused after its step, with a snapshot; a queued job is paused at once."""
        return self._ask("POST", f"{_path(job)}/pause", body={})

    def resume(self, job: str) -> _Table:
        """The job, queued again."""
        return self._ask("POST", f"{_path(job)}/resume", body={})

    def cancel(self, job: str) -> _Table:
        """The job, which is cancelled between two tasks if it runs, and at once if not."""
        return self._ask("POST", f"{_path(job)}/cancel", body={})

    def retry(self, job: str, from_step: int | None = None, changes: Mapping[str, Any] | None = None) -> _Table:
        """The job, which failed, was cancelled or quarantined, queued again.

        It goes on from its newest snapshot, or that of ``from_step``; 0 begins anew. ``changes`` are other values by
        dotted keys, as ``{"training.learning_rate": 1e-4}``.
        """
        return self._ask("POST", f"{_path(job)}/retry", body={"from_step": from_step, "set": dict(changes or {})})

    def fork(self, job: str, from_step: int | None = None, changes: Mapping[str, Any] | None = None) -> _Table:
        """A new job that goes on from a copy of a snapshot of ``job``, as ``retry`` would; ``job`` stays as it is."""
        return self._ask("POST", f"{_path(job)}/fork", body={"from_step": from_step, "set": dict(changes or {})})

    def delete(self, job: str, *, dry_run: bool = False) -> _Table:
        """What was deleted with ``job``, which had ended: ``files``, ``bytes``, ``snapshots``.

        With ``dry_run``, what would be.
        """
        return self._ask("DELETE", _path(job), query=[("dry_run", "true")] if dry_run else [], repeatable=dry_run)

    def amend(
        self,
        job: str,
        *,
        priority_class: str | None = None,
        weight: float | None = None,
        priority: int | None = None,
        tags: Collection[str] | None = None,
    ) -> _Table:
        """The job, with another priority class, weight, priority or other tags; what is left out stays."""
        changes: dict[str, Any] = {"priority_class": priority_class, "weight": weight, "priority": priority}
        changes |= {"tags": None if tags is None else [*tags]}
        given = {name: value for name, value in changes.items() if value is not None}
        # Changing it twice is changing it once.
        return self._ask("PATCH", _path(job), body=given, repeatable=True)

    def change_schedule(self, job: str, schedule: str) -> _Table:
        """The job, which follows the registered ``schedule`` from its next step on."""
        return self._ask("PUT", f"{_path(job)}/schedule", body={"schedule": schedule})

    def drain(self, host: str) -> _Tables:
        """The workers of ``host``, which jobs leave after their steps, until ``undrain``."""
        return self._rows("workers", f"{_host(host)}/drain", "POST", body={})

    def undrain(self, host: str) -> _Tables:
        """The workers of ``host``, which jobs may use again."""
        return self._rows("workers", f"{_host(host)}/undrain", "POST", body={})

    # Reading

    def show(self, job: str) -> _Table:
        """The job, with what was submitted as ``document``."""
        return self._ask("GET", _path(job), repeatable=True)

    def list(
        self,
        states: Collection[str] | None = None,
        *,
        limit: int | None = None,
        after: str | None = None,
        entry: str | None = None,
        tags: Collection[str] = (),
        text: str | None = None,
        owner: str | None = None,
        since: float | None = None,
        oldest_first: bool = False,
        root: str | None = None,
    ) -> _EachTable:
        """The first ``limit`` jobs in any of ``states`` that follow job ``after`` in the list, the newest first.

        Further filters are ``entry``, ``tags`` (with all of these), ``text`` (in the name, entry, id, cause or a tag),
        ``owner``, ``since`` (changed then, a Unix time, or later) and ``root`` (the root line of its last failure).
        Requests page by page as the iterator advances; jobs may be added and change meanwhile.
        """
        query = [("state", state) for state in states or ()] + [("tag", tag) for tag in tags]
        given = {"entry": entry, "text": text, "owner": owner, "root": root}
        given["since"] = None if since is None else repr(float(since))
        query += [(name, value) for name, value in given.items() if value is not None]
        query += [("order", "oldest")] if oldest_first else []
        return self._many(self._pages("jobs", "/v1/jobs", query, after, limit))

    def me(self) -> _Table:
        """Who asks: ``user`` (``None`` where there are no users), ``role``, ``teams`` and ``team_access``."""
        return self._ask("GET", "/v1/me", repeatable=True)

    def history(self, job: str) -> _Tables:
        """The job's transitions in their order: ``from``, ``to``, ``at``, ``cause``, ``sequence``."""
        return self._rows("transitions", f"{_path(job)}/history")

    def losses(self, job: str, after: int = 0) -> _EachTable:
        """The steps after number ``after``: ``step``, ``loss``, ``learning_rate``, ``seconds``, ``tokens``."""
        return self._many(self._pages("losses", f"{_path(job)}/losses", [], str(after), None))

    def entries(self) -> _Tables:
        """The entries that jobs may name: ``name``, and ``parameters`` as JSON schema."""
        return self._rows("entries", "/v1/entries")

    def schedules(self) -> _Tables:
        """The schedules that jobs may name."""
        return self._rows("schedules", "/v1/schedules")

    def workers(self) -> _Tables:
        """The service's workers (``name``, ``host``, ``up``, ``draining``, ``jobs`` …); none if it has threads."""
        return self._rows("workers", "/v1/workers")

    def artifacts(self, job: str) -> _Tables:
        """What can be downloaded: ``name``, ``media_type``, and where known ``step``, ``size`` and ``sha256``."""
        return self._rows("artifacts", f"{_path(job)}/artifacts")

    def download(self, job: str, artifact: str = "model.pt", to: str | Path = ".", *, step: int | None = None) -> _File:
        """Download ``artifact`` to the file, or into the folder, ``to``; returns where it is.

        It is whole: it appears under its name when it has the SHA-256 that the service says. What a broken connection,
        a restart of the service or the end of this process leaves half done goes on there, if the artifact is still the
        same. A model is that of the snapshot after ``step``, by default the newest. Raises ``DamagedDownloadError``,
        and ``OSError`` if the disk fails.
        """
        path = f"{_path(job)}/artifacts/{_quoted(artifact, 'an artifact')}"
        query = [] if step is None else [("step", str(step))]
        return self._one(download(self._asking, path, query, artifact, Path(to)))

    def wait(self, job: str, timeout: float | None = None) -> _Table:
        """The job, when it has ended. Raises ``WaitTimeoutError`` after ``timeout`` seconds."""
        return self._one(self._until_ended(job, timeout))

    def events(self, job: str, after: int = 0) -> _EachEvent:
        """The past events of the job after event ``after``, then new ones as they happen, until the job has ended.

        If the connection breaks or the service restarts, the stream continues after the last event. Steps in between
        are left out (``losses`` has them), nothing else.
        """
        return self._many(self._follow(job, after))

    def logs(
        self,
        job: str,
        *,
        run: int | None = None,
        stream: str | None = None,
        tail: int | None = None,
        follow: bool = False,
    ) -> _EachTable:
        """The lines that the job's last run said: ``run``, ``at``, ``stream``, ``text``.

        ``run`` names another run, ``stream`` leaves out all others, ``tail`` says how many lines there are at most.
        With ``follow`` come those of later runs and what the job says from now on, until the job, or ``run``, has
        ended; if the connection breaks or the service restarts, none is left out.
        """
        given = {"run": run, "stream": stream, "tail": tail}
        query = [(name, str(value)) for name, value in given.items() if value is not None]
        return self._many(self._log_lines(job, query, follow=follow))

    def failures(self, since: float | None = None) -> _Tables:
        """Groups of jobs that have failed in the same way (``root``, ``count``, ``users``, ``jobs`` …), newest first.

        With ``since``, of those that have changed then, a Unix time, or later.
        """
        query = [] if since is None else [("since", repr(float(since)))]
        return self._rows("failures", "/v1/failures", query=query)

    # How

    def _ask(self, method: str, path: str, **options: Any) -> _Table:
        return self._one(self._asking.ask(method, path, **options))

    def _rows(self, name: str, path: str, method: str = "GET", **options: Any) -> _Tables:
        """The rows that the response has as ``name``."""

        async def ask() -> tuple[Any, ...]:
            # A change of a host that is made twice is made once.
            return tuple((await self._asking.ask(method, path, repeatable=True, **options)).get(name, ()))

        return self._one(ask())

    async def _pages(
        self, name: str, path: str, query: builtins.list[tuple[str, str]], after: str | None, limit: int | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The rows of all pages, at most ``limit``."""
        left = math.inf if limit is None else limit
        while left > 0:
            page = [("limit", str(min(left, PAGE))), *query, *([] if after is None else [("after", after)])]
            answer = await self._asking.ask("GET", path, query=page, repeatable=True)
            rows = answer.get(name) or []
            for row in rows:
                yield row
            left -= len(rows)
            if not rows or answer.get("next") is None:
                return
            after = str(answer["next"])

    async def _until_ended(self, job: str, seconds: float | None) -> dict[str, Any]:
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        pause, path = POLL_FIRST, _path(job)
        while (found := await self._asking.ask("GET", path, repeatable=True))["state"] not in FINAL_STATES:
            if (left := deadline - time.monotonic()) <= 0:
                raise WaitTimeoutError(f"job {job} is {found['state']} after {seconds:g} s; it goes on")
            await self._asking.wire.sleep(min(pause, left))
            pause = min(pause * 1.5, POLL_MOST)
        return found

    async def _log_lines(
        self, job: str, query: builtins.list[tuple[str, str]], *, follow: bool
    ) -> AsyncGenerator[dict[str, Any], None]:
        if follow:
            async for event in self._follow(job, None, "logs/events", query):
                for line in event.data["lines"]:
                    yield {"run": event.data["run"], **line}
            return
        place = builtins.list[tuple[str, str]]()
        while True:
            answer = await self._asking.ask("GET", f"{_path(job)}/logs", query=[*query, *place], repeatable=True)
            for line in answer["lines"]:
                yield {"run": answer["run"], **line}
            if not answer["more"]:
                return
            place = [("after", str(answer["next"]))]

    async def _follow(
        self, job: str, last: int | None, what: str = "events", query: Collection[tuple[str, str]] = ()
    ) -> AsyncGenerator[ServerEvent, None]:
        asking, repeating, path = self._asking, Repeating(self._asking), f"{_path(job)}/{what}"
        while True:
            try:
                headers = {"Accept": "text/event-stream"} | ({} if last is None else {"Last-Event-ID": str(last)})
                request = asking.request("GET", path, query=[*query], headers=headers, patience=STREAM_SECONDS)
                async with asking.wire.open(request) as (response, content):
                    if not response.is_success:
                        raise await refusal(response, content)
                    async for event in events_of(content):
                        repeating.progressed()
                        if event.kind == "end":
                            return
                        last = max(last or 0, event.id)
                        yield event
                raise BrokenExchange(f"the event stream of job {job} ends again and again before the job does")
            except (httpx.TransportError, BrokenExchange, ApiError) as error:
                await repeating.after(error)


def _path(job: str) -> str:
    return f"/v1/jobs/{_quoted(job, 'a job')}"


def _host(host: str) -> str:
    return f"/v1/workers/{_quoted(host, 'a host')}"


def _quoted(name: str, what: str) -> str:
    if not name:
        raise OptionError(f"the name of {what} must not be empty")
    return quote(name, safe="")
