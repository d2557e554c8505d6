"""Downloads by both clients: whole or not there at all, whatever breaks, and going on where they were."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler

import pytest
from client_helpers import Awaited, Service, breaks, says, scripted

from asyncpipe.errors import OptionError
from asyncpipe.service.client import ApiError, DamagedDownloadError, JobClient, UnreachableError

JOB = "01k8zq1m7h9x2v4n6r8t0w3y5b"
OLD, NEW = b"old" * 100_000, b"newer" * 50_000
Answer = Callable[[BaseHTTPRequestHandler], None]


@pytest.fixture(params=[JobClient, Awaited])
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    with scripted(request.param) as found:
        yield found


def sends(content: bytes, *, most: int | None = None, damaged: bool = False) -> Answer:
    """``content``, or the rest of it that is asked for, but ``most`` bytes."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        tag = f'"{hashlib.sha256(content).hexdigest()}"'
        first = 0
        if handler.headers.get("If-Range") == tag:
            first = int(handler.headers["Range"].removeprefix("bytes=").removesuffix("-"))
        is_all = first >= len(content) > 0
        handler.send_response(416 if is_all else 206 if first else 200)
        handler.send_header("ETag", tag)
        handler.send_header("Content-Length", str(len(content) - first))
        handler.end_headers()
        sent = content[first:][:most]
        handler.wfile.write(sent[::-1] if damaged else sent)

    return answer


def asked(service: Service) -> list[tuple[str, str | None]]:
    """The query and the range of each request."""
    return [(each.path.partition("?")[2], each.headers.get("range")) for each in service.requests]


def test_a_model_is_downloaded_into_a_folder_or_as_a_file(service, tmp_path):
    service.answers = [sends(OLD)]
    client = service.client()
    assert client.download(JOB, "model.pt", tmp_path) == tmp_path / "model.pt"
    assert client.download(JOB, to=tmp_path / "mine.pt", step=40) == tmp_path / "mine.pt"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"model.pt": OLD, "mine.pt": OLD}
    assert [each.path for each in service.requests] == [
        f"/v1/jobs/{JOB}/artifacts/model.pt",
        f"/v1/jobs/{JOB}/artifacts/model.pt?step=40",
    ]


def test_a_download_that_breaks_goes_on_where_it_was(service, tmp_path):
    service.answers = [sends(OLD, most=1000), breaks, says(503, {}), sends(OLD, most=50_000), sends(OLD)]
    assert service.client().download(JOB, to=tmp_path).read_bytes() == OLD
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]
    assert asked(service) == [("", None), *[("", "bytes=1000-")] * 3, ("", "bytes=51000-")]


def test_another_client_goes_on_where_one_was_given_up(service, tmp_path):
    service.answers = [sends(OLD, most=1000), breaks]
    with pytest.raises(UnreachableError):
        service.client(retries=1).download(JOB, to=tmp_path, step=40)
    (left,) = tmp_path.iterdir()
    assert left.read_bytes() == OLD[:1000]
    service.requests.clear()
    service.answers = [sends(OLD)]
    assert JobClient(service.url).download(JOB, to=tmp_path, step=40).read_bytes() == OLD
    assert asked(service) == [("step=40", "bytes=1000-")]
    assert not left.exists()


def test_what_was_all_there_is_only_named(service, tmp_path):
    service.answers = [sends(OLD)]
    (tmp_path / f"model.pt.{hashlib.sha256(OLD).hexdigest()}.part").write_bytes(OLD)
    assert service.client().download(JOB, to=tmp_path).read_bytes() == OLD
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


def test_what_has_changed_is_downloaded_anew(service, tmp_path):
    service.answers = [sends(OLD, most=1000), sends(NEW)]
    found = service.client().download(JOB, "losses.csv", tmp_path / "curve.csv")
    assert found.read_bytes() == NEW
    assert [path.name for path in tmp_path.iterdir()] == ["curve.csv"]


def test_what_is_not_there_is_told(service, tmp_path):
    service.answers = [says(404, {"title": "Not Found", "detail": "there is none"})]
    with pytest.raises(ApiError, match="there is none"):
        service.client().download(JOB, to=tmp_path, step=40)
    assert list(tmp_path.iterdir()) == []


def test_what_is_damaged_is_not_kept(service, tmp_path):
    service.answers = [sends(NEW, damaged=True)]
    (tmp_path / "model.pt").write_bytes(b"before")
    with pytest.raises(DamagedDownloadError, match="SHA-256"):
        service.client().download(JOB, to=tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"model.pt": b"before"}


def test_a_download_that_gets_nowhere_is_given_up(service, tmp_path):
    service.answers = [sends(OLD, most=0)]
    with pytest.raises(UnreachableError):
        service.client(retries=2).download(JOB, to=tmp_path)
    assert len(service.requests) == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("answer", [says(200, {"id": JOB}), says(200, raw=b"<html>", ETag="x")])
def test_what_is_no_artifact_is_told(answer, service, tmp_path):
    service.answers = [answer]
    with pytest.raises(UnreachableError, match="no SHA-256 as its tag"):
        service.client(retries=0).download(JOB, to=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_artifact_is_an_empty_file(service, tmp_path):
    service.answers = [sends(b"")]
    assert service.client().download(JOB, "log.jsonl", tmp_path).read_bytes() == b""


@pytest.mark.parametrize("name", ["../x", ".."])
def test_a_name_leads_out_of_no_folder(name, service, tmp_path):
    with pytest.raises(OptionError, match="no path"):
        service.client().download(JOB, name, tmp_path)
    with pytest.raises(OptionError, match="there is no folder"):
        service.client().download(JOB, to=tmp_path / "no" / "model.pt")
    assert not service.requests
