"""A user who tries everything on the jobs of another, on a real ``asyncpipe serve``, while these jobs live.

Each operation of the OpenAPI document, and each page, is asked for by every way to name a job, with each role. Nothing
that the intruder is answered may have an id, a name, a tag or an entry's parameter of the other's jobs (``others =
"none"``), and nothing may change them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from asyncpipe.service.client import JobClient
from asyncpipe.service.token_roles import TokenRole, create_token
from tests.campaigns.service import Row
from tests.campaigns.service._served import JOB, RealService, serve

__all__ = ["run"]

MARK = "only-alice-knows"
"""In the name and the tags of each of her jobs."""
BODIES: list[Any] = [None, {}, {"from_step": 0}, {"schedule": "gpipe"}, {"weight": 2, "tags": ["taken"]}]
PAGES = ("/jobs/{id}", "/jobs/{id}/state", "/jobs/{id}/events")
KEY = "night-1"


def run(folder: Path) -> list[Row]:
    """A row where others are hidden, and one where they are seen."""
    return [row for others in ("none", "read") for row in _run(folder / others, others)]


def _run(folder: Path, others: str) -> Iterator[Row]:
    folder.mkdir()
    home = folder / "service"
    tokens = {
        (user, role): create_token(home, f"{user}-{role}", role, user=user, teams=["vision"])[0]
        for user, role in (("alice", TokenRole.SUBMIT), ("mallory", TokenRole.SUBMIT), ("mallory", TokenRole.READ))
    }
    with serve(folder, "--others", others, "--team-access", "none", "--max-running", "1") as service:
        alice = JobClient(service.url, tokens["alice", TokenRole.SUBMIT])
        jobs = [alice.submit(JOB | {"name": f"{MARK}-{n}", "tags": [MARK]}, f"{KEY}-{n}")["id"] for n in range(4)]
        alice.pause(jobs[1])
        alice.cancel(jobs[2])
        before = {job: _kept(alice, job) for job in jobs[1:3]}
        seen: Counter[int] = Counter()
        let_in, told = [], []
        for role in (TokenRole.SUBMIT, TokenRole.READ):
            for method, path, body, headers in _requests(service, tokens["alice", TokenRole.SUBMIT], jobs):
                status, text = _ask(service, tokens["mallory", role], method, path, body, headers)
                seen[status] += 1
                if method != "GET" and status < 300 and not path.endswith("/fork") and path != "/v1/jobs":
                    let_in.append(f"{method} {path}: {status}")
                if others == "none" and any(secret in text for secret in (MARK, *jobs)):
                    told.append(f"{method} {path}: {text[:80]}")
        after = {job: _kept(alice, job) for job in jobs[1:3]}
        lives = alice.show(jobs[0])["state"] in ("queued", "running", "finished")
        mine = list(JobClient(service.url, tokens["mallory", TokenRole.SUBMIT]).list(owner="mallory"))
    statuses = ", ".join(f"{status}: {count}" for status, count in sorted(seen.items()))
    figure = f"{seen.total()} requests, {statuses}; changed: {len(let_in)}, told: {len(told)}; own jobs: {len(mine)}"
    held = not let_in and not told and before == after and lives and 5 not in {status // 100 for status in seen}
    what = f"everything tried on another's jobs, others = {others!r}"
    yield Row(what, "; ".join([figure, *let_in[:3], *told[:3]]), held)


def _kept(client: JobClient, job: str) -> str:
    """All that may not change of a job at rest."""
    shown = client.show(job)
    return json.dumps([client.history(job), {key: shown[key] for key in shown if key != "place"}])


def _requests(service: RealService, alice: str, jobs: list[str]) -> Iterator[tuple[str, str, Any, dict[str, str]]]:
    _, text = _ask(service, alice, "GET", "/v1/openapi.json")
    document = json.loads(text[text.index("{") :])
    named = [(method.upper(), path) for path, methods in document["paths"].items() for method in methods]
    named += [("GET", page) for page in PAGES]
    ways = [
        name
        for n, job in enumerate(jobs)
        for name in (job, job[:20], job.upper(), f"{MARK}-{n}", f"{job}%00", f"..%2fjobs%2f{job}")
    ]
    for method, path in named:
        if "{id}" not in path:
            continue
        for way in ways:
            filled = path.replace("{id}", way).replace("{name}", "log.jsonl")
            for body in [None] if method == "GET" else BODIES:
                yield method, filled, body, {}
    for job in jobs:
        for query in (f"after={job}", f"text={job}", f"text={MARK}", f"tag={MARK}", "owner=alice", "limit=1000"):
            yield "GET", f"/v1/jobs?{query}", None, {}
    for n in range(4):  # Her keys, with what she submitted, and with something else.
        yield "POST", "/v1/jobs", JOB | {"name": f"guess-{n}"}, {"Idempotency-Key": f"{KEY}-{n}"}
        yield "POST", "/v1/jobs", JOB | {"name": f"guess-{n}"}, {"Idempotency-Key": f"alice {KEY}-{n}"}
    for path in ("/v1/jobs", "/v1/counts", "/v1/failures", "/v1/workers", "/v1/me", "/"):
        for header in ("X-Forwarded-User", "X-Remote-User", "X-Forwarded-For", "X-HTTP-Method-Override"):
            yield "GET", path, None, {header: "alice"}


def _ask(
    service: RealService, token: str, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, str]:
    connection = HTTPConnection(*service.place, timeout=10)
    sent = {"Authorization": f"Bearer {token}", "Content-Type": "application/json", **(headers or {})}
    try:
        connection.request(method, path, None if body is None else json.dumps(body), sent)
        answer = connection.getresponse()
        is_stream = (answer.getheader("Content-Type") or "").startswith("text/event-stream")
        return answer.status, str(answer.headers) + ("" if is_stream else answer.read().decode())
    finally:
        connection.close()
