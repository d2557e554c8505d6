"""The webhook against a real receiver: what arrives, signed by whom, how often it is tried, and what is given up."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from manager_helpers import ENTRY, Fake, Fakes, make_settings, mlp, submission
from webhook_receiver import WebhookReceiver, signature

from asyncpipe.service.job_states import JobSpec, JobState
from asyncpipe.service.settings.webhook_settings import WebhookSettings
from asyncpipe.service.store.job_store import JobStore
from asyncpipe.service.submission.entries import Entries
from asyncpipe.service.telling import webhook as module
from asyncpipe.service.telling.post import post
from asyncpipe.service.telling.webhook import NAME, Webhook
from asyncpipe.service.training_service import TrainingService
from asyncpipe.train.step_failures import NonFiniteLossError

KEY = b"0123456789 is the key of tests"
SECRET = "whsec_" + base64.b64encode(KEY).decode()


@pytest.fixture
def receiver() -> Iterator[WebhookReceiver]:
    with WebhookReceiver() as found:
        yield found


def settings_of(folder: Path, port: int, **more: Any) -> WebhookSettings:
    secret = folder / "secret"
    secret.write_text(SECRET + "\n")
    secret.chmod(0o600)
    return WebhookSettings(url=f"http://127.0.0.1:{port}/hooks?of=tests", secret_file=secret, **more)  # type: ignore[arg-type]


@asynccontextmanager
async def telling(folder: Path, port: int, **more: Any) -> AsyncIterator[tuple[JobStore, Webhook]]:
    options = {name: more.pop(name) for name in ("send", "clock") if name in more}
    async with JobStore(folder / "jobs.sqlite3") as store:
        webhook = Webhook(settings_of(folder, port, **more), store, folder, first_retry=0.001, **options)
        async with webhook:
            yield store, webhook


async def ends(store: JobStore, webhook: Webhook | None, to: JobState, name: str = "nan", cause: str = "nan") -> str:
    """A job that begins and ends so; its id."""
    record, _ = await store.add(JobSpec(name, "m:f", {}, tags=("a",)))
    await store.transition(record.id, JobState.RUNNING, "its turn")
    await store.transition(record.id, to, cause)
    if webhook is not None:
        webhook.wake()
    return record.id


async def until(true: Any) -> None:
    while not true():  # noqa: ASYNC110 - a test's own time limit ends what never comes
        await asyncio.sleep(0.001)


async def test_a_message_says_who_ended_and_why_and_who_says_so(receiver: WebhookReceiver, tmp_path: Path) -> None:
    async with telling(tmp_path, receiver.port) as (store, webhook):
        await ends(store, webhook, JobState.FINISHED)
        job = await ends(store, webhook, JobState.FAILED, cause="the loss of step 3 is nan")
        await until(lambda: webhook.figures.delivered)
    [(headers, body)] = receiver.got
    message = json.loads(body)
    assert message["type"] == "job.failed"
    data = {"job": job, "name": "nan", "entry": "m:f", "state": "failed", "was": "running", "step": 0, "attempts": 1}
    assert message["data"] == {
        **data, "cause": "the loss of step 3 is nan", "snapshot": None, "tags": ["a"], "lost": 0
    }  # fmt: skip
    assert headers["webhook-signature"] == signature(KEY, headers, body)
    assert headers["webhook-id"].startswith(job)
    assert headers["content-type"] == "application/json"


async def test_it_is_tried_until_it_arrives_with_one_id_and_in_order(receiver: WebhookReceiver, tmp_path: Path) -> None:
    receiver.answers = [
        "500 No\r\n",
        "302 Found\r\nlocation: http://127.0.0.1:1/\r\n",
        "429 Wait\r\nRetry-After: 0\r\n",
    ]
    async with telling(tmp_path, receiver.port) as (store, webhook):
        first = await ends(store, webhook, JobState.FAILED)
        second = await ends(store, webhook, JobState.QUARANTINED)
        await until(lambda: webhook.figures.delivered == 2)
        assert webhook.figures.waiting_since is None or await webhook_is_idle(webhook)
    assert [message["data"]["job"] for message in receiver.messages()] == [first] * 4 + [second]
    assert len({headers["webhook-id"] for headers, _ in receiver.got}) == 2
    assert receiver.messages()[-1]["type"] == "job.quarantined"


async def webhook_is_idle(webhook: Webhook) -> bool:
    await until(lambda: webhook.figures.waiting_since is None)
    return webhook.figures.waiting_seconds(1e12) == 0


async def test_what_a_receiver_missed_is_told_by_the_next_service_once(tmp_path: Path, caplog: Any) -> None:
    """The receiver is away, the service ends; a job fails while no webhook is there; then both are back."""
    with WebhookReceiver() as gone:
        port = gone.port
    caplog.set_level(logging.WARNING)
    async with telling(tmp_path, port) as (store, webhook):
        first = await ends(store, webhook, JobState.FAILED)
        await until(lambda: "next try" in caplog.text)
        assert webhook.figures.waiting_seconds(1e12) > 0
    assert "the rest is at the next start" in caplog.text
    async with JobStore(tmp_path / "jobs.sqlite3") as store:
        second = await ends(store, None, JobState.FAILED)
    with WebhookReceiver(port) as back:
        async with telling(tmp_path, port) as (_, webhook):
            await until(lambda: webhook.figures.delivered == 2)
        async with telling(tmp_path, port) as (store, webhook):
            third = await ends(store, webhook, JobState.FAILED)
            await until(lambda: webhook.figures.delivered == 1)
        assert [message["data"]["job"] for message in back.messages()] == [first, second, third]


async def test_a_service_that_has_none_yet_tells_of_what_happens_from_now_on(
    receiver: WebhookReceiver, tmp_path: Path, caplog: Any
) -> None:
    async with JobStore(tmp_path / "jobs.sqlite3") as store:
        await ends(store, None, JobState.FAILED)
    for content in (None, b"{", b'{"sequence": 10000, "lost": 0}'):  # Nothing, damage, and a store that was restored.
        if content is not None:
            (tmp_path / NAME).write_bytes(content)
        async with telling(tmp_path, receiver.port) as (store, webhook):
            await ends(store, webhook, JobState.FAILED, cause=str(content))
            await until(lambda webhook=webhook: webhook.figures.delivered == 1)
    causes = ["None", "b'{'", 'b\'{"sequence": 10000, "lost": 0}\'']
    assert [message["data"]["cause"] for message in receiver.messages()] == causes
    assert "cannot be read" in caplog.text
    assert "the store is older than" in caplog.text


async def test_what_is_given_up_is_said_by_the_next_message(
    receiver: WebhookReceiver, tmp_path: Path, caplog: Any
) -> None:
    receiver.answers = ["422 No\r\n"]
    async with telling(tmp_path, receiver.port) as (store, webhook):
        await ends(store, webhook, JobState.FAILED)
        await ends(store, webhook, JobState.FAILED)
        await until(lambda: webhook.figures.delivered == 1)
        assert (webhook.figures.refused, webhook.figures.lost) == (1, 0)
    assert receiver.messages()[-1]["data"]["lost"] == 1
    assert "will not be told that job" in caplog.text
    # Of more than two that wait the oldest are given up, and of these two the one that is too old.
    async with JobStore(tmp_path / "jobs.sqlite3") as store:
        jobs = [await ends(store, None, JobState.FAILED) for _ in range(5)]
        newest = (await store.get(jobs[-1])).updated
    clock = iter([newest + 11.0])
    limits = {"max_waiting": 2, "give_up_seconds": 10.0, "clock": lambda: next(clock, newest + 1.0)}
    async with telling(tmp_path, receiver.port, **limits) as (_, webhook):
        await until(lambda: webhook.figures.delivered == 1)
        assert webhook.figures.lost == 4
    assert (receiver.messages()[-1]["data"]["job"], receiver.messages()[-1]["data"]["lost"]) == (jobs[-1], 4)
    assert "3 changes of jobs: more than 2 wait" in caplog.text


async def test_a_receiver_that_does_not_answer_holds_nothing_up(receiver: WebhookReceiver, tmp_path: Path) -> None:
    receiver.may_answer.clear()
    async with telling(tmp_path, receiver.port, timeout_seconds=0.05) as (store, webhook):
        await ends(store, webhook, JobState.FAILED)
        await until(lambda: len(receiver.got) > 1)
        receiver.may_answer.set()
        await until(lambda: webhook.figures.delivered == 1)


async def test_a_service_tells_of_a_job_that_fails_and_logs_each_of_its_states(
    receiver: WebhookReceiver, tmp_path: Path, caplog: Any
) -> None:
    def fails(_: Fake) -> BaseException | None:
        return NonFiniteLossError("step 1: the loss is nan")

    caplog.set_level(logging.INFO)
    fakes = Fakes()
    fakes.free, fakes.fails = True, fails
    settings = make_settings(tmp_path / "service", webhook=settings_of(tmp_path, receiver.port))
    async with TrainingService(settings, entries=Entries({ENTRY: mlp}), make_trainer=fakes) as service:
        job, _ = await service.submit(submission())
        await until(lambda: receiver.got)
        assert (await service.get(job.id)).state is JobState.FAILED
    [message] = receiver.messages()
    assert (message["data"]["job"], message["data"]["state"]) == (job.id, "failed")
    assert "nan" in message["data"]["cause"]
    assert [line.event for line in caplog.records if getattr(line, "job", None) == job.id] == [
        "submitted",
        "begin",
        "end",
    ]


async def test_an_answer_that_is_none_is_an_error() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answers.pop(0))
        writer.close()

    answers = [b"SSH-2.0\r\n\r\n", b"", b"HTTP/1.1 103 Early\r\n\r\nHTTP/1.1 200 OK\r\nretry-AFTER: 7\r\n\r\n"]
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(ConnectionError, match="the answer is not HTTP: b'SSH"):
            await post(url, b"", {}, 10.0)
        with pytest.raises(ConnectionError, match="closed the connection without an answer"):
            await post(url, b"", {}, 10.0)
        assert await post(url, b"", {}, 10.0) == (200, 7.0)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"url": "ftp://x"}, "begins with https:// or http://"),
        ({"url": "https://user:pass@x/"}, "without a user"),
        ({"url": "https://a b"}, "begins with"),
        ({"events": ["queued"]}, "running"),
        ({"events": []}, "at least 1"),
        ({"timeout_seconds": 0}, "greater than 0"),
        ({"secret": "x" * 20}, "Extra inputs"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, wrong: dict[str, Any], text: str) -> None:
    right = settings_of(tmp_path, 1)
    assert right.states == (JobState.FAILED, JobState.QUARANTINED)
    with pytest.raises(ValueError, match=text):
        WebhookSettings(**{"url": "https://x", "secret_file": tmp_path / "secret", **wrong})


def test_the_secret_is_in_a_private_file_and_in_no_text(tmp_path: Path) -> None:
    found = settings_of(tmp_path, 1)
    assert SECRET not in f"{found!r} {found} {found.model_dump()}"
    assert "hooks" not in f"{found!r} {found}"
    (tmp_path / "secret").chmod(0o644)
    with pytest.raises(ValueError, match="no other user can access"):
        WebhookSettings(url="https://x", secret_file=tmp_path / "secret")  # type: ignore[arg-type]
    (tmp_path / "secret").chmod(0o600)
    (tmp_path / "secret").write_text("whsec_no+base64==+no")
    with pytest.raises(ValueError, match="must be base64"):
        WebhookSettings(url="https://x", secret_file=tmp_path / "secret")  # type: ignore[arg-type]


async def test_a_file_that_cannot_be_written_stops_nothing(
    receiver: WebhookReceiver, tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_told", full)
    async with telling(tmp_path, receiver.port) as (store, webhook):
        await ends(store, webhook, JobState.FAILED)
        await until(lambda: webhook.figures.delivered == 1)
    assert "so messages may come again" in caplog.text
