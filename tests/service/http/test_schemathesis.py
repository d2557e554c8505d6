"""The OpenAPI document against the API: every answer is one that the document has, and none is a 5xx.

``ASYNCPIPE_SCHEMATHESIS`` is how many requests are made for each operation; 400 take some minutes.
"""

from __future__ import annotations

import asyncio
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

from asyncpipe.service.token_roles import TokenRole, create_token

schemathesis = pytest.importorskip("schemathesis", reason="no schemathesis: pip install -e '.[dev]'")
import requests  # noqa: E402 - it comes with schemathesis
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

EXAMPLES = int(os.environ.get("ASYNCPIPE_SCHEMATHESIS", "4"))
MAKES = [real] if EXAMPLES < 100 else [served, real]
SECONDS = 5.0
"""For one answer; a server that hangs fails the test."""
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
BEARER = {"Authorization": f"Bearer {TOKEN}"}

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


def each_operation(url: str, test: Callable[[Any], None], examples: int = EXAMPLES) -> int:
    """Runs ``test`` on cases of every operation; gives how many operations there were."""
    schema = schemathesis.openapi.from_url(f"{url}/v1/openapi.json", headers=BEARER)
    schema.config.update(base_url=url)
    operations = 0
    for found in schema.get_all_operations():
        operation = found.ok()
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
            strategy = operation.as_strategy(generation_mode=mode)
            limits = settings(
                max_examples=examples,
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


@pytest.mark.long
@pytest.mark.parametrize("make", MAKES)
def test_every_answer_is_as_the_document_says(tmp_path: Path, make: Make) -> None:
    statuses: Counter[tuple[str, int]] = Counter()
    with running(make, tmp_path, token=TOKEN) as api, requests.Session() as session:
        session.headers.update(BEARER)
        turns = count()

        def check(case: Any) -> None:
            # Ids at random are those of no job. A stream of a job that goes on has no end.
            if case.meta.generation.mode is schemathesis.GenerationMode.POSITIVE:
                turn = next(turns)
                if "id" in case.path_parameters:
                    known = {"events": [api.ended], "cancel": api.jobs[2:]}.get(case.path.rpartition("/")[2], api.jobs)
                    case.path_parameters["id"] = known[turn % len(known)] if turn % 4 else NOBODY
                if case.path.endswith(("/retry", "/fork")):
                    case.body = {"from_step": 0} if turn % 2 else {"set": {"training.steps": 9}}
                if case.method.upper() == "DELETE":
                    case.query = {"dry_run": "true"}
                    case.path_parameters["id"] = api.ended
                if case.path.endswith("/schedule") and turn % 2:
                    case.body = {"schedule": "1f1b"}
                if case.path == "/v1/jobs" and case.method.upper() == "POST" and turn % 2:
                    case.body = job(steps=10**6)
                if case.path.endswith("/artifacts/{name}") and turn % 4 == 1:
                    case.path_parameters |= {"name": "log.jsonl", "id": api.ended}
                    case.query, case.headers = {}, {}
            response = case.call(base_url=api.url, session=session, timeout=SECONDS)
            statuses[f"{case.method} {case.path}", response.status_code] += 1
            case.validate_response(response, checks=CHECKS)

        assert each_operation(api.url, check) >= 18
    assert {200, 201, 404, 409, 422} <= {status for _, status in statuses}, statuses
    unanswered = {operation for operation, _ in statuses} - {name for name, status in statuses if status < 300}
    # Drawn hosts are none of the fake's; the real one trains on threads, which have no hosts.
    unanswered = {operation for operation in unanswered if "{host}" not in operation}
    assert not unanswered, "\n".join(map(str, sorted(statuses.items())))


def test_without_a_token_nothing_is_answered(tmp_path: Path) -> None:
    with running(served, tmp_path, token=TOKEN) as api, requests.Session() as session:

        def check(case: Any) -> None:
            response = case.call(base_url=api.url, session=session, timeout=SECONDS)
            if case.path not in ("/livez", "/readyz"):
                assert response.status_code in (400, 401, 421), response.text

        assert each_operation(api.url, check, 1 + EXAMPLES // 4) >= 18


def test_a_stranger_is_answered_nothing_of_anothers_jobs(tmp_path: Path) -> None:
    with running(served, tmp_path, token=TOKEN, others="none") as api, requests.Session() as session:
        secret, _ = create_token(tmp_path, "bob", TokenRole.SUBMIT)
        session.headers["Authorization"] = f"Bearer {secret}"
        turns, statuses = count(), Counter[int]()

        def check(case: Any) -> None:
            if "id" in (case.path_parameters or {}):
                case.path_parameters["id"] = api.jobs[next(turns) % len(api.jobs)]
                response = case.call(base_url=api.url, session=session, timeout=SECONDS)
                statuses[response.status_code] += 1
                assert 400 <= response.status_code < 500, response.text
                assert not any(job in response.text for job in api.jobs)

        assert each_operation(api.url, check, 1 + EXAMPLES // 4) >= 18
        assert statuses[404] > 10
