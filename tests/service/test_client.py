"""Both clients against a scripted service: what they send, what they ask again, what they never do."""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from client_helpers import Awaited, Service, breaks, says, scripted

from asyncpipe.errors import AsyncpipeError, OptionError
from asyncpipe.service.client import ApiError, AsyncJobClient, JobClient, UnreachableError, WaitTimeoutError

TOKEN = "correct-horse-battery-staple"
JOB = "01k8zq1m7h9x2v4n6r8t0w3y5b"


@pytest.fixture(params=[JobClient, Awaited])
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    with scripted(request.param) as found:
        yield found


def streams(text: str) -> Callable[[BaseHTTPRequestHandler], None]:
    """Events, and then the end of the connection."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.end_headers()
        handler.wfile.write(text.encode())

    return answer


def event(number: int, kind: str = "note", **data: Any) -> str:
    document = {"id": number, "at": 5.0 + number, "kind": kind, "data": data}
    return f"id: {number}\nevent: {kind}\ndata: {json.dumps(document)}\n\n"


END = "event: end\ndata: {}\n\n"


def dead_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


# What is sent


@pytest.mark.parametrize(
    ("call", "method", "path", "body"),
    [
        (lambda c: c.submit({"name": "x"}), "POST", "/v1/jobs", {"name": "x"}),
        (lambda c: c.show(JOB), "GET", f"/v1/jobs/{JOB}", None),
        (lambda c: c.pause(JOB), "POST", f"/v1/jobs/{JOB}/pause", {}),
        (lambda c: c.change_schedule(JOB, "gpipe"), "PUT", f"/v1/jobs/{JOB}/schedule", {"schedule": "gpipe"}),
        (lambda c: c.history(JOB), "GET", f"/v1/jobs/{JOB}/history", None),
        (lambda c: c.entries(), "GET", "/v1/entries", None),
        (lambda c: list(c.losses(JOB)), "GET", f"/v1/jobs/{JOB}/losses?limit=1000&after=0", None),
        (
            lambda c: list(c.list(["queued", "paused"], limit=7)),
            "GET",
            "/v1/jobs?limit=7&state=queued&state=paused",
            None,
        ),
        (lambda c: c.show("../entries?x"), "GET", "/v1/jobs/..%2Fentries%3Fx", None),
    ],
)
def test_each_call_is_one_request(call, method, path, body, service):
    service.answers = [says(200, {})]
    call(service.client(token=TOKEN))
    (request,) = service.requests
    assert (request.method, request.path, request.body) == (method, path, body)
    assert request.headers["authorization"] == f"Bearer {TOKEN}"
    assert request.headers.get("content-type") == (None if body is None else "application/json")
    assert TOKEN not in request.path


def test_an_application_may_have_mounted_the_service_below_a_path(service):
    service.answers = [says(200, {"id": JOB})]
    assert service.client("/training/").show(JOB) == {"id": JOB}
    assert service.requests[0].path == f"/training/v1/jobs/{JOB}"
    assert "authorization" not in service.requests[0].headers


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8080", "ftp://a", "http://u:p@a", "http://a?x", "http://a:99999", "http://ä"]
)
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(OptionError, match="url must look like"):
        JobClient(url)


def test_the_token_is_shown_nowhere(service):
    service.answers = [says(401, {"title": "Unauthorized", "detail": "no"}), breaks]
    with pytest.raises(OptionError, match="token: must be 16 to") as refused:
        JobClient(service.url, "with space in between")
    assert "with space" not in str(refused.value)
    client = service.client(token=TOKEN, retries=0)
    assert TOKEN not in repr(client)
    for _ in range(2):
        with pytest.raises(AsyncpipeError) as told:
            client.show(JOB)
        assert TOKEN not in str(told.value)


def test_lists_and_losses_are_asked_for_page_by_page(service):
    service.answers = [
        says(200, {"jobs": [{"id": "a"}, {"id": "b"}], "next": "b"}),
        says(200, {"jobs": [{"id": "c"}], "next": None}),
        says(200, {"losses": [{"step": 1}], "next": 1}),
        says(200, {"losses": [{"step": 2}], "next": None}),
    ]
    client = service.client()
    assert [job["id"] for job in client.list()] == ["a", "b", "c"]
    assert [row["step"] for row in client.losses(JOB)] == [1, 2]
    assert [request.path.partition("?")[2] for request in service.requests] == [
        "limit=1000",
        "limit=1000&after=b",
        "limit=1000&after=0",
        "limit=1000&after=1",
    ]


# What is asked again


def test_a_submission_is_asked_again_with_its_key_until_it_is_answered(service):
    service.answers = [breaks, says(503, {}, Retry_After="2"), says(429, {}), says(201, {"id": JOB})]
    assert service.client().submit({"name": "x"}) == {"id": JOB}
    keys = {request.headers["idempotency-key"] for request in service.requests}
    assert len(service.requests) == 4
    assert len(keys) == 1
    assert 2.0 in service.pauses
    for key in (None, "mine"):
        service.client().submit({}, key)
    assert len({request.headers["idempotency-key"] for request in service.requests} - keys) == 2
    for wrong in ("", "x" * 201, "line\nbreak"):
        with pytest.raises(OptionError, match="idempotency key"):
            service.client().submit({}, wrong)


@pytest.mark.parametrize("change", ["pause", "resume", "cancel"])
def test_a_change_that_may_have_been_done_is_not_asked_again(change, service):
    service.answers = [breaks]
    with pytest.raises(UnreachableError, match=service.url):
        getattr(service.client(), change)(JOB)
    service.answers = [says(502, {})]
    with pytest.raises(ApiError):
        getattr(service.client(), change)(JOB)
    assert len(service.requests) == 2
    service.answers = [says(503, {}), says(200, {"id": JOB})]  # Surely not done.
    assert getattr(service.client(), change)(JOB) == {"id": JOB}


def test_a_service_that_is_not_there_is_asked_a_bounded_number_of_times(service):
    pauses: list[float] = []
    client = service.kind(f"http://127.0.0.1:{dead_port()}", retries=3, sleep=pauses.append)
    for ask in (lambda: client.pause(JOB), lambda: client.show(JOB), lambda: list(client.events(JOB))):
        pauses.clear()
        with pytest.raises(UnreachableError, match="http://127"):
            ask()
        assert len(pauses) == 3
        assert pauses == sorted(pauses)


def test_all_pauses_together_are_no_longer_than_the_timeout(service):
    service.answers = [says(503, {"title": "busy"}, Retry_After="9")]
    with pytest.raises(ApiError, match="busy"):
        service.client(timeout=20.0, retries=100).show(JOB)
    assert service.pauses == [9.0, 9.0]


@pytest.mark.parametrize("status", [401, 409, 500])
def test_a_refusal_is_not_asked_again(status, service):
    service.answers = [says(status, {"type": "urn:x:kind", "title": "No", "detail": "because"})]
    with pytest.raises(ApiError) as told:
        service.client().show(JOB)
    assert (told.value.status, told.value.title, told.value.detail) == (status, "No", "because")
    assert told.value.kind == "kind"
    assert len(service.requests) == 1


def test_wrong_keys_are_told_one_a_line_and_errors_travel(service):
    problems = [{"key": "training.steps", "text": "must be more"}, {"key": "", "text": "and 3 more"}]
    service.answers = [says(422, {"title": "Unprocessable", "detail": "wrong", "problems": problems})]
    with pytest.raises(ApiError) as told:
        service.client().submit({})
    assert told.value.problems == [("training.steps", "must be more"), ("", "and 3 more")]
    assert str(told.value) == "Unprocessable (422): wrong\ntraining.steps: must be more\nand 3 more"
    again = pickle.loads(pickle.dumps(told.value))
    assert (str(again), again.status, again.problems) == (str(told.value), 422, told.value.problems)


# What is never done


@pytest.mark.parametrize("status", [301, 308])
def test_redirects_are_not_followed(status, service):
    elsewhere = f"http://localhost:{service.url.rpartition(':')[2]}/stolen"
    service.answers = [says(status, {}, Location=elsewhere)]
    for ask in (lambda c: c.submit({"name": "x"}), lambda c: c.show(JOB), lambda c: list(c.events(JOB))):
        with pytest.raises(ApiError, match="redirects are not followed"):
            ask(service.client(token=TOKEN))
    assert {request.path for request in service.requests} == {"/v1/jobs", f"/v1/jobs/{JOB}", f"/v1/jobs/{JOB}/events"}


def test_proxies_of_the_environment_are_not_used(service, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{dead_port()}")
    service.answers = [says(200, {"id": JOB})]
    assert service.client(token=TOKEN).show(JOB) == {"id": JOB}
    assert service.requests[0].path.startswith("/v1/")


def test_a_cancelled_call_closes_its_connection(service):
    """The service sees the end of the connection, and nothing waits for the rest of the response."""
    begun, ended = threading.Event(), threading.Event()

    def never_ends(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.flush()
        begun.set()
        assert handler.connection.recv(1) == b""
        ended.set()

    async def cancel() -> None:
        call = asyncio.create_task(AsyncJobClient(service.url).show(JOB))
        await asyncio.to_thread(begun.wait)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    service.answers = [never_ends]
    asyncio.run(cancel())
    assert ended.wait(30)


@pytest.mark.parametrize(
    ("answer", "part"),
    [
        (says(200, raw=b"<html>"), "not a JSON object"),
        (says(200, [1]), "not a JSON object"),
        (says(404, raw=b"<html>"), "is this the address of an asyncpipe service"),
        (says(400, [1]), "is this the address"),
    ],
)
def test_what_is_no_answer_of_a_service_is_told(answer, part, service):
    service.answers = [answer]
    with pytest.raises((UnreachableError, ApiError), match=part):
        service.client(retries=0).show(JOB)


def test_what_json_cannot_say_is_not_sent(service):
    for wrong in ({"x": float("nan")}, {"x": object()}):
        with pytest.raises(OptionError, match="must be JSON"):
            service.client().submit(wrong)
    assert not service.requests


# Watching


def test_events_come_in_order_until_the_end(service):
    hello = "retry: 1000\n\n: nothing new\n\n"
    service.answers = [streams(hello + event(1, "state", to="queued") + event(2, "note", text="a") + END)]
    first, second = service.client(token=TOKEN).events(JOB)
    assert (first.id, first.kind, first.at, first.data) == (1, "state", 6.0, {"to": "queued"})
    assert (second.id, second.kind, second.data) == (2, "note", {"text": "a"})
    (request,) = service.requests
    assert (request.path, request.headers["last-event-id"]) == (f"/v1/jobs/{JOB}/events", "0")
    assert request.headers["accept"] == "text/event-stream"
    assert request.headers["authorization"] == f"Bearer {TOKEN}"


def test_a_stream_that_breaks_goes_on_where_it_was(service):
    torn = event(4)[:-9]
    service.answers = [
        streams(event(1) + event(2)),
        breaks,
        says(503, {}),
        streams(event(3) + torn),
        streams(event(4) + END),
    ]
    assert [found.id for found in service.client().events(JOB)] == [1, 2, 3, 4]
    assert [request.headers["last-event-id"] for request in service.requests] == ["0", "2", "2", "2", "3"]
    assert len(service.pauses) == 4


def test_a_stream_that_never_gets_anywhere_is_given_up(service):
    service.answers = [streams(": nothing new\n\n")]
    with pytest.raises(UnreachableError, match="again and again"):
        list(service.client(retries=4).events(JOB))
    assert len(service.requests) == 5
    service.answers = [streams(event(1)), streams(event(2)), streams(event(3)), streams(event(4) + END)]
    assert [found.id for found in service.client(retries=1).events(JOB)] == [1, 2, 3, 4], (
        "each that brings something counts"
    )


@pytest.mark.parametrize("text", ["data: nonsense\n\n", "data: [1]\n\n"])
def test_events_that_are_none_are_given_up(text, service):
    service.answers = [streams(text)]
    with pytest.raises(UnreachableError, match="an event"):
        list(service.client(retries=1).events(JOB))


def test_waiting_ends_with_the_job(service):
    service.answers = [says(200, {"state": "queued"}), says(200, {"state": "running"}), says(200, {"state": "failed"})]
    assert service.client().wait(JOB) == {"state": "failed"}
    assert len(service.pauses) == 2


def test_waiting_has_an_end_and_the_job_goes_on(service):
    service.answers = [says(200, {"state": "running"})]
    with pytest.raises(WaitTimeoutError, match=f"job {JOB} is running after 0 s; it goes on") as told:
        service.client().wait(JOB, timeout=0)
    assert isinstance(told.value, TimeoutError)
    assert [request.method for request in service.requests] == ["GET"]


def test_threads_may_share_a_client(service):
    def echo(handler: BaseHTTPRequestHandler) -> None:
        says(200, {"path": handler.path})(handler)

    service.answers = [echo]
    client = service.client()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(client.show, map(str, range(100))))
    assert [answer["path"] for answer in found] == [f"/v1/jobs/{number}" for number in range(100)]
