"""The OpenAPI document against the API: what fits it is accepted, what nearly fits it is answered as it says, and
nothing with a 5xx. Streams of events are read, and each event is as the document says.

``ASYNCPIPE_SCHEMATHESIS`` is how many requests are made for each operation; 400 take some minutes.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from http_helpers import NOBODY, TOKEN, Api, job, real, served
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

schemathesis = pytest.importorskip("schemathesis", reason="no schemathesis: pip install -e '.[dev]'")
import requests  # noqa: E402 - it comes with schemathesis
from jsonschema import Draft202012Validator  # noqa: E402
from schemathesis.specs.openapi.checks import positive_data_acceptance  # noqa: E402

EXAMPLES = int(os.environ.get("ASYNCPIPE_SCHEMATHESIS", "8"))
SECONDS = 5.0
"""For one answer; a server that hangs fails the test."""

pytestmark = [pytest.mark.timeout(60 + 10 * EXAMPLES)]


Make = Callable[..., AbstractAsyncContextManager[Api]]


@dataclass
class Running:
    """Where the API is, and jobs that are there; of these, one that has ended."""

    url: str
    jobs: list[str]
    ended: str


@contextmanager
def running(make: Make, folder: Path, **settings: Any) -> Iterator[Running]:
    """The API in a thread with a loop of its own, since schemathesis blocks; with a few jobs to be found."""
    found: list[Running] = []
    loops: list[asyncio.AbstractEventLoop] = []
    begun, over = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with make(folder, **settings) as api:
            service = api.service
            jobs = [(await service.submit(job(steps=10**6, name=str(number))))[0].id for number in range(4)]
            await service.cancel(jobs[-1], "test")
            loops.append(asyncio.get_running_loop())
            found.append(Running(api.base, jobs, jobs[-1]))
            begun.set()
            await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert begun.wait(20)
        yield found[0]
    finally:
        if loops:
            loops[0].call_soon_threadsafe(over.set)
        thread.join(20)
        assert not thread.is_alive()


def described(url: str) -> Any:
    """The document."""
    answer = requests.get(f"{url}/v1/openapi.json", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=SECONDS)
    return answer.json()


def each_operation(document: Any, url: str, test: Callable[[Any], None]) -> int:
    """Runs ``test`` on cases of every operation; gives how many operations there were."""
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=url)
    operations = 0
    for found in schema.get_all_operations():
        operation = found.ok()
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
            strategy = operation.as_strategy(generation_mode=mode)
            limits = settings(
                max_examples=EXAMPLES,
                database=None,
                derandomize=True,
                phases=[Phase.explicit, Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            with suppress(Unsatisfiable):  # Nothing can be wrong where nothing is asked for.
                limits(_given(strategy, test))()
        operations += 1
    return operations


def _given(strategy: Any, test: Callable[[Any], None]) -> Any:
    @given(case=strategy)
    def run(case: Any) -> None:
        test(case)

    return run


BEYOND_SCHEMAS = {
    ("name", "must be a printable text"),  # That takes a table of Unicode.
    ("group", "must be a printable text"),
    ("after", "must be the id of a job, and no job has this one"),
    ("after", "there is no job"),
    ("deadline", "the deadline"),
    ("schedule", "schedule '"),  # Whether it fits the job, and takes these options.
    ("pipeline.schedule", "schedule '"),
    ("pipeline.order", 'must be "strict" with schedule'),
    ("pipeline.stages", "leave it out with schedule"),
    ("pipeline.balance", "leave it out with schedule"),
    ("pipeline", ""),  # How many stages of how many micro-batches.
    ("", "training.overlap:"),
}
"""The rules that a JSON schema cannot say, most of them between two keys: the only ones that what fits it may break."""


def accepted(response: Any) -> bool:
    """Whether what fits the schema got in, or broke one of the rules that a schema cannot say."""
    if response.status_code in (200, 201, 206, 404, 409, 416):
        return True
    problems = response.json().get("problems", [])
    return bool(problems) and all(
        any(problem["key"] == key and problem["text"].startswith(text) for key, text in BEYOND_SCHEMAS)
        for problem in problems
    )


def check_events(document: Any, text: str, end: bool) -> Counter[str]:
    """That each event in ``text`` is as the document says; gives how many there are of each kind."""
    parts = {"components": document["components"]}
    media = document["paths"]["/v1/jobs/{id}/events"]["get"]["responses"]["200"]["content"]["text/event-stream"]
    whole = Draft202012Validator(media["schema"] | parts)
    data = Draft202012Validator(media["schema"]["properties"]["data"]["contentSchema"] | parts)
    kinds: Counter[str] = Counter()
    for block in text.split("\n\n"):
        event = dict(line.split(": ", 1) for line in block.splitlines() if line and not line.startswith((":", "retry")))
        if event:
            whole.validate(event)
            data.validate(json.loads(event["data"]))
            kinds[event["event"]] += 1
    assert kinds["end"] == end
    return kinds


def follow_running(api: Running, document: Any) -> None:
    """Streams of jobs that go on, which have no end: the first events, while a job is paused."""
    place = f"{api.url}/v1/jobs/{api.jobs[0]}"
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    with requests.get(f"{place}/events", headers=bearer, stream=True, timeout=SECONDS) as stream:
        requests.post(f"{place}/pause", headers=bearer, json={}, timeout=SECONDS)
        text = ""
        for line in stream.iter_lines():
            text += f"{line.decode()}\n"
            if line.startswith(b"data: ") and json.loads(line[6:])["data"].get("to") == "paused":
                break
        assert check_events(document, text, end=False)["state"]


@pytest.mark.parametrize("make", [served, real])
def test_every_answer_is_as_the_document_says(tmp_path: Path, make: Make) -> None:
    statuses: Counter[tuple[str, int]] = Counter()
    kinds: Counter[str] = Counter()
    with running(make, tmp_path, token=TOKEN) as api, requests.Session() as session:
        session.headers["Authorization"] = f"Bearer {TOKEN}"
        turns = count()

        def check(case: Any) -> None:
            # Ids at random are those of no job. A stream of a job that goes on has no end.
            if case.meta.generation.mode is schemathesis.GenerationMode.POSITIVE and "id" in case.path_parameters:
                # Some jobs are left to be paused and to change their schedules.
                known = {"events": [api.ended], "cancel": api.jobs[2:], "retry": api.jobs[2:3]}.get(
                    case.path.rpartition("/")[2], api.jobs
                )
                turn = next(turns)
                case.path_parameters["id"] = known[turn % len(known)] if turn % 4 else NOBODY
                if case.path.endswith(("/retry", "/fork")):  # Which keys there are takes more than a schema.
                    case.body = {"from_step": 0} if turn % 2 else {"set": {"training.steps": 9}}
                if case.method.upper() == "DELETE":
                    case.query = {"dry_run": "true"}
                    case.path_parameters["id"] = api.ended
                if case.path.endswith("/schedule") and turn % 2:
                    case.body = {"schedule": "1f1b"}
                if case.path.endswith("/artifacts/{name}") and turn % 4 == 1:
                    case.path_parameters |= {"name": "log.jsonl", "id": api.ended}
                    case.query, case.headers = {}, {}
                if case.path.endswith("/events") and turn % 4 == 1:  # From the first event on.
                    case.headers.pop("Last-Event-ID", None)
                    case.query.pop("after", None)
            response = case.call(base_url=api.url, session=session, timeout=SECONDS)
            statuses[f"{case.method} {case.path}", response.status_code] += 1
            case.validate_response(response, excluded_checks=[positive_data_acceptance])
            assert response.status_code < 500
            assert tmp_path.name.encode() not in response.content
            if case.meta.generation.mode is schemathesis.GenerationMode.POSITIVE:
                assert accepted(response), response.text
            if case.path.endswith("/events") and response.status_code == 200:
                kinds.update(check_events(document, response.text, end=True))

        document = described(api.url)
        assert each_operation(document, api.url, check) == sum(map(len, document["paths"].values())) >= 18
        if make is real:
            assert kinds["state"]
            follow_running(api, document)
    reached = {status for _, status in statuses}
    assert {200, 201, 404, 409, 422} <= reached, statuses
    unanswered = {operation for operation, _ in statuses} - {name for name, status in statuses if status < 300}
    if make is real:  # It trains on threads, which have no hosts.
        unanswered = {operation for operation in unanswered if "{host}" not in operation}
    assert not unanswered, "\n".join(map(str, sorted(statuses.items())))


def test_without_a_token_nothing_is_answered(tmp_path: Path) -> None:
    probes = {"/livez", "/readyz"}
    with running(served, tmp_path, token=TOKEN) as api, requests.Session() as session:

        def check(case: Any) -> None:
            response = case.call(base_url=api.url, session=session, timeout=SECONDS)
            assert response.status_code < 500
            if case.path not in probes:
                assert response.status_code in (400, 401, 421, 431), response.text

        assert each_operation(described(api.url), api.url, check) >= 18
