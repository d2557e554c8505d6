"""Downloads by both clients: whole or not there at all, whatever breaks, and going on where they were."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from client_helpers import Awaited, Service, breaks, says, scripted

from asyncpipe.errors import OptionError
from asyncpipe.service.client import ApiError, DamagedDownloadError, JobClient, UnreachableError
from asyncpipe.service.http.ranges import select_bytes

JOB = "01k8zq1m7h9x2v4n6r8t0w3y5b"
OLD, NEW = b"old" * 100_000, b"newer" * 50_000
Answer = Callable[[BaseHTTPRequestHandler], None]


@pytest.fixture(params=[JobClient, Awaited])
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    with scripted(request.param) as found:
        yield found


def sends(content: bytes, *, step: int | None = None, most: int | None = None, damaged: bool = False) -> Answer:
    """``content`` by ranges, as a service does, but ``most`` bytes of it."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        tag = f'"{hashlib.sha256(content).hexdigest()}"'
        found = select_bytes({name.lower(): value for name, value in handler.headers.items()}, tag, len(content))
        handler.send_response(found.status)
        handler.send_header("ETag", tag)
        handler.send_header("Content-Length", str(found.end - found.first))
        if (part := found.content_range(len(content))) is not None:
            handler.send_header("Content-Range", part)
        if step is not None:
            handler.send_header("Content-Location", f"model.pt?step={step}")
        handler.end_headers()
        sent = content[found.first : found.end][:most]
        handler.wfile.write(sent[::-1] if damaged else sent)

    return answer


def asked(service: Service) -> list[tuple[str, str | None]]:
    """The query and the range of each request."""
    return [(each.path.partition("?")[2], each.headers.get("range")) for each in service.requests]


def test_a_model_is_downloaded_into_a_folder_or_as_a_file(service, tmp_path):
    service.answers = [sends(OLD, step=40)]
    client = service.client()
    assert client.download(JOB, "model.pt", tmp_path) == tmp_path / "model.pt"
    assert client.download(JOB, to=tmp_path / "mine.pt", step=40) == tmp_path / "mine.pt"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"model.pt": OLD, "mine.pt": OLD}
    assert [each.path for each in service.requests] == [
        f"/v1/jobs/{JOB}/artifacts/model.pt",
        f"/v1/jobs/{JOB}/artifacts/model.pt?step=40",
    ]


def test_a_download_that_breaks_goes_on_with_the_same_snapshot(service, tmp_path):
    service.answers = [
        sends(OLD, step=40, most=1000),
        breaks,
        says(503, {}),
        sends(OLD, step=40, most=50_000),
        sends(OLD, step=40),
    ]
    assert service.client().download(JOB, to=tmp_path).read_bytes() == OLD
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]
    assert asked(service) == [("", None), *[("step=40", "bytes=1000-")] * 3, ("step=40", "bytes=51000-")]
    assert {each.headers.get("if-range") for each in service.requests[1:]} == {f'"{hashlib.sha256(OLD).hexdigest()}"'}


def test_another_client_goes_on_where_one_was_given_up(service, tmp_path):
    service.answers = [sends(OLD, step=40, most=1000), breaks]
    with pytest.raises(UnreachableError):
        service.client(retries=1).download(JOB, to=tmp_path)
    (left,) = tmp_path.iterdir()
    assert left.name == f"model.pt.40-{hashlib.sha256(OLD).hexdigest()}.part"
    assert left.read_bytes() == OLD[:1000]
    service.requests.clear()
    service.answers = [sends(OLD, step=40)]
    assert JobClient(service.url).download(JOB, to=tmp_path).read_bytes() == OLD
    assert asked(service) == [("step=40", "bytes=1000-")]
    assert not left.exists()


def test_what_was_all_there_is_only_named(service, tmp_path):
    left = tmp_path / f"model.pt.40-{hashlib.sha256(OLD).hexdigest()}.part"
    left.write_bytes(OLD)
    service.answers = [sends(OLD, step=40)]
    assert service.client().download(JOB, to=tmp_path).read_bytes() == OLD
    assert asked(service) == [("step=40", f"bytes={len(OLD)}-")]


def test_a_snapshot_that_is_gone_makes_room_for_the_newest(service, tmp_path):
    service.answers = [
        sends(OLD, step=40, most=1000),
        says(404, {"title": "Not Found", "detail": "there is no model.pt of step 40"}),
        sends(NEW, step=50),
    ]
    assert service.client().download(JOB, to=tmp_path).read_bytes() == NEW
    assert asked(service) == [("", None), ("step=40", "bytes=1000-"), ("", None)]
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


def test_a_step_that_was_named_has_no_substitute(service, tmp_path):
    service.answers = [sends(OLD, step=40, most=1000), says(404, {"title": "Not Found", "detail": "there is none"})]
    with pytest.raises(ApiError, match="there is none"):
        service.client().download(JOB, to=tmp_path, step=40)
    assert asked(service) == [("step=40", None), ("step=40", "bytes=1000-")]


def test_what_has_changed_is_downloaded_anew(service, tmp_path):
    service.answers = [sends(OLD, most=1000), sends(NEW)]
    found = service.client().download(JOB, "losses.csv", tmp_path / "curve.csv")
    assert found.read_bytes() == NEW
    assert [path.name for path in tmp_path.iterdir()] == ["curve.csv"]


def test_a_part_of_another_step_is_not_used(service, tmp_path):
    (tmp_path / f"model.pt.30-{hashlib.sha256(NEW).hexdigest()}.part").write_bytes(NEW[:10])
    service.answers = [sends(OLD, step=40)]
    assert service.client().download(JOB, to=tmp_path, step=40).read_bytes() == OLD
    assert asked(service) == [("step=40", None)]
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


def test_what_is_damaged_is_not_kept(service, tmp_path):
    service.answers = [sends(NEW, damaged=True)]
    (tmp_path / "model.pt").write_bytes(b"before")
    with pytest.raises(DamagedDownloadError, match="SHA-256"):
        service.client().download(JOB, to=tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"model.pt": b"before"}


def test_a_download_that_gets_nowhere_is_given_up(service, tmp_path):
    service.answers = [sends(OLD, step=40, most=0)]
    with pytest.raises(UnreachableError):
        service.client(retries=2).download(JOB, to=tmp_path)
    assert len(service.requests) == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("answer", [says(200, {"id": JOB}), says(200, raw=b"<html>", ETag='"abc"')])
def test_what_is_no_artifact_is_told(answer, service, tmp_path):
    service.answers = [answer]
    with pytest.raises(UnreachableError, match="no SHA-256 as its tag"):
        service.client(retries=0).download(JOB, to=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_artifact_is_an_empty_file(service, tmp_path):
    service.answers = [sends(b"")]
    assert service.client().download(JOB, "log.jsonl", tmp_path).read_bytes() == b""


def test_one_process_downloads_a_file_at_a_time(service, tmp_path):
    def twice(handler: BaseHTTPRequestHandler) -> None:
        try:
            service.client(retries=0).download(JOB, to=tmp_path)
        except OptionError as error:
            told.append(str(error))
        handler.wfile.write(OLD[1000:])

    def begins(handler: BaseHTTPRequestHandler) -> None:
        sends(OLD, step=40, most=1000)(handler)
        handler.wfile.flush()

    told: list[str] = []
    service.answers = [begins, lambda handler: (sends(OLD, step=40, most=0)(handler), twice(handler))[0]]
    assert service.client().download(JOB, to=tmp_path).read_bytes() == OLD
    assert told == [f"{tmp_path / 'model.pt'} is being downloaded by another process"]


@pytest.mark.parametrize("name", ["../x", "a/b", "/etc/passwd", ".."])
def test_a_name_leads_out_of_no_folder(name, service, tmp_path):
    with pytest.raises(OptionError, match="no path"):
        service.client().download(JOB, name, tmp_path)
    assert not service.requests


def test_a_folder_that_is_missing_is_told_before_anything_is_asked(service, tmp_path):
    with pytest.raises(OptionError, match="there is no folder"):
        service.client().download(JOB, to=tmp_path / "no" / "model.pt")
    assert not service.requests


def test_artifacts_are_listed(service):
    listed: list[dict[str, Any]] = [{"name": "model.pt", "step": 3}]
    service.answers = [says(200, json.loads(json.dumps({"artifacts": listed})))]
    assert service.client().artifacts(JOB) == tuple(listed)
    assert service.requests[0].path == f"/v1/jobs/{JOB}/artifacts"
