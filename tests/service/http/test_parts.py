"""The parts that refuse: JSON under limits, buckets, redaction, names, the audit."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from http_helpers import TOKEN, make_settings, mounted, served, submission
from hypothesis import given
from hypothesis import strategies as st

from asyncpipe.errors import OptionError
from asyncpipe.observe.http_hosts import is_own_page
from asyncpipe.service.http import audit as audit_module
from asyncpipe.service.http import serve_api
from asyncpipe.service.http.json_body import MOST_DEPTH, parse_json
from asyncpipe.service.http.problems import Problem
from asyncpipe.service.http.rate_limits import StreamLimit, TokenBuckets, client_of
from asyncpipe.service.http.redact import Redactor, shorten

TEXTS = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda values: st.lists(values, max_size=4) | st.dictionaries(TEXTS, values, max_size=4),
    max_leaves=20,
)


@given(VALUES, st.booleans())
def test_what_json_can_say_is_read(value: object, ascii_only: bool) -> None:
    assert parse_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@given(st.binary(max_size=200) | st.text(alphabet='[]{}",:\\u0d8 1e.-', max_size=60).map(str.encode))
def test_anything_else_is_a_400(body: bytes) -> None:
    try:
        read = parse_json(body), json.loads(body)
    except Problem as problem:
        read = problem.status, 400
    assert read[0] == read[1]


def test_the_depth_that_is_allowed_is_the_depth_that_is_said() -> None:
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        inner = "" if opening == "[" else "1"
        parse_json((opening * MOST_DEPTH + inner + closing * MOST_DEPTH).encode())
        with pytest.raises(Problem, match="nested"):
            parse_json((opening * (MOST_DEPTH + 1) + inner + closing * (MOST_DEPTH + 1)).encode())
    assert parse_json(json.dumps("[" * 1000 + '"' + "\\").encode()) == "[" * 1000 + '"' + "\\"


@pytest.mark.timeout(10)
def test_no_body_takes_long() -> None:
    size = 128 * 1024
    for body in (b'"' * size, b'\\"' * (size // 2), b'"' + b'\\"' * (size // 2), b"[]" * (size // 2), b"{" * size,
                 b"[" * (size // 2) + b"]" * (size // 2), b"1" * size, b'"' + b"\\" * size):  # fmt: skip
        with pytest.raises(Problem):
            parse_json(body)


def test_a_bucket_empties_and_fills_again() -> None:
    now = [100.0]
    buckets = TokenBuckets(2.0, 3, clock=lambda: now[0])
    assert [buckets.take("a") for _ in range(4)] == [0, 0, 0, 0.5]
    assert buckets.take("b") == 0
    now[0] += 0.5
    assert (buckets.take("a"), buckets.take("a")) == (0, 0.5)
    now[0] += 1000
    assert [buckets.take("a") for _ in range(4)] == [0, 0, 0, 0.5]


def test_the_table_of_clients_is_bounded_and_forgets_the_quietest() -> None:
    buckets = TokenBuckets(1.0, 1, most=3, clock=lambda: 0.0)
    for client in "abcabcd":
        buckets.take(client)
    assert len(buckets) == 3
    assert buckets.take("c") > 0
    assert buckets.take("a") == 0


def test_a_network_is_one_client() -> None:
    assert client_of("2001:db8::1") == client_of("2001:db8::ffff:2") == "2001:db8::"
    assert client_of("2001:db8:0:1::1") != client_of("2001:db8::1")
    assert client_of("::ffff:10.0.0.1") == client_of("10.0.0.1") == "10.0.0.1"
    assert client_of("fe80::1%eth0") == "fe80::"
    assert client_of(None) == "unknown"


def test_places_are_given_back() -> None:
    limit = StreamLimit(1)
    with limit.hold(), pytest.raises(Problem, match="too-many-streams"), limit.hold():
        pass
    with limit.hold():
        assert limit.held == 1
    assert limit.held == 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[Errno 2] No such file: '/home/me/data/x.bin'", "[Errno 2] No such file: '…/x.bin'"),
        ("/srv/service/jobs/1/snapshots", "…/jobs/1/snapshots"),
        ("at /srv/service", "at …/"),
        ("runs/service/jobs", "…/jobs"),
        (f"the token {TOKEN} is in it", "the token [hidden] is in it"),
        ('File "/usr/lib/python3/x.py", line 7', 'File "…/x.py", line 7'),
        ("csv:/etc/passwd", "csv:…/passwd"),
        (r"C:\Users\me\x.bin", "…/x.bin"),
        ("file:///srv/x", "…"),
        ("~/secrets/key", "…/key"),
        ("1/2 of it and/or 3 / 4, step 7/10", "1/2 of it and/or 3 / 4, step 7/10"),
        ("see http://host/a/b", "see http://host/a/b"),
    ],
)
def test_texts_lose_paths_and_secrets(text: str, told: str) -> None:
    assert Redactor(["runs/service", "/srv/service", None, "."], [TOKEN, None, ""])(text) == told


def test_texts_are_shortened() -> None:
    assert shorten("x" * 101) == "x" * 99 + "…"
    assert shorten("x" * 100) == "x" * 100


@pytest.mark.parametrize(
    ("origin", "host", "own"),
    [
        ("http://a:80", "a", True),
        ("http://a", "a:80", True),
        ("https://a", "a", True),
        ("https://a", "a:80", False),
        ("http://A", "a", True),
        ("http://a:81", "a", False),
        ("http://b", "a", False),
        ("null", "a", False),
        ("ftp://a", "a", False),
        ("http://", "", False),
        ("http://[::1]:8080", "[::1]:8080", True),
        ("http://a:99999", "a", False),
        ("https://known:1", "a", True),
    ],
)
def test_which_pages_are_ours(origin: str, host: str, own: bool) -> None:
    assert is_own_page(origin, host, {"known"}) is own


# The audit


async def test_every_change_and_refusal_is_in_the_audit(tmp_path: Path) -> None:
    level = logging.getLogger(audit_module.LOGGER).level
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    async with served(tmp_path, token=TOKEN) as api:
        _, job, _ = await api.ask("POST", "/v1/jobs", submission(), Idempotency_Key="my-key", **bearer)
        await api.ask("POST", f"/v1/jobs/{job['id']}/pause", {}, **bearer)
        await api.ask("POST", f"/v1/jobs/{job['id']}/pause", {}, **bearer)
        await api.ask("POST", "/v1/jobs", submission(entry="os:system"), **bearer)
        await api.ask("GET", "/v1/jobs", **bearer)
        await api.ask("GET", "/v1/jobs?token=" + TOKEN)
        await api.ask("POST", "/v1/jobs", submission(), Origin="http://evil.example", **bearer)
        await api.ask("GET", "/" + "p" * 5000, Host="evil.example", **bearer)
    files = [tmp_path / name for name in ("audit.jsonl", "refused.jsonl")]
    changes, refusals = ([json.loads(line) for line in file.read_text().splitlines()] for file in files)
    assert [(line["what"], line["outcome"], line["job"]) for line in changes] == [
        ("submit", "ok", job["id"]),
        ("pause", "ok", job["id"]),
    ]
    told = [(line["what"][:20], line["outcome"], line.get("status"), line["job"]) for line in refusals]
    assert told == [
        ("pause", "refused", 409, job["id"]),
        ("submit", "refused", 422, None),
        ("GET /v1/jobs", "refused", 401, None),
        ("POST /v1/jobs", "refused", 403, None),
        ("GET /" + "p" * 15, "refused", 421, None),
    ]
    assert changes[0]["client"] == "127.0.0.1"
    assert len(changes[0]["key"]) == 16
    assert changes[0]["when"].endswith("Z")
    for file in files:
        assert TOKEN not in file.read_text()
        assert "my-key" not in file.read_text()
        assert max(map(len, file.read_text().splitlines())) < 500
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    logger = logging.getLogger(audit_module.LOGGER)
    assert (logger.level, logger.handlers) == (level, [])


async def test_two_services_of_a_process_have_an_audit_each(tmp_path: Path) -> None:
    async with served(tmp_path / "one") as one, served(tmp_path / "two") as two:
        await one.submitted()
        await two.submitted()
        await two.submitted()
    counts = [len((tmp_path / name / "audit.jsonl").read_text().splitlines()) for name in ("one", "two")]
    assert counts == [1, 2]


async def test_a_mounted_api_tells_the_logger_of_the_host(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, audit_module.LOGGER):
        async with mounted(tmp_path) as api:
            await api.submitted()
    assert json.loads(caplog.messages[-1])["what"] == "submit"
    assert not (tmp_path / "audit.jsonl").exists()


async def test_a_full_disk_ends_nothing(tmp_path: Path, full: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.joinpath("service").mkdir(mode=0o700)
    (tmp_path / "service" / "audit.jsonl").symlink_to(full)
    async with served(tmp_path / "service") as api:
        await api.submitted()
        await api.submitted()
    assert caplog.text.count("the audit file cannot be written") == 1


async def test_a_disk_that_is_behind_loses_lines_and_not_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(audit_module, "MOST_WAITING", 2)
    import threading

    may_write = threading.Event()
    emit = audit_module.AuditFile.emit
    monkeypatch.setattr(audit_module.AuditFile, "emit", lambda *given: may_write.wait(10) and emit(*given))
    async with served(tmp_path) as api:
        for _ in range(8):
            await api.submitted()
        may_write.set()
    assert "lines are lost" in caplog.text
    assert 2 <= len((tmp_path / "audit.jsonl").read_text().splitlines()) < 8


async def test_the_audit_is_bounded_and_refusals_push_no_change_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_module, "MOST_BYTES", 1000)
    async with served(tmp_path) as api:
        ids = [await api.submitted() for _ in range(6)]
        for number in range(20):
            await api.ask("GET", f"/{number:02}", Host="evil.example")
    for name in ("audit.jsonl", "audit.jsonl.1", "refused.jsonl", "refused.jsonl.1"):
        assert 0 < (tmp_path / name).stat().st_size <= 1000
    assert [line["job"] for line in kept(tmp_path, "audit.jsonl")] == ids
    last = [line["what"] for line in kept(tmp_path, "refused.jsonl")]
    assert 3 < len(last) < 20
    assert last == [f"GET /{number:02}" for number in range(20 - len(last), 20)]
    assert stat.S_IMODE((tmp_path / "audit.jsonl").stat().st_mode) == 0o600


def kept(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for file in (f"{name}.1", name) for line in (folder / file).read_text().splitlines()]


def test_an_audit_that_cannot_be_moved_goes_to_the_log_and_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(audit_module, "MOST_BYTES", 1000)
    file = audit_module.AuditFile(tmp_path / "audit.jsonl", False)

    def tell(number: int) -> None:
        file.emit(logging.makeLogRecord({"msg": json.dumps({"number": number, "more": "x" * 300})}))

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for number in range(3):
        tell(number)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)  # It was moved, and there is no room for another one.
        tell(3)
    tell(4)
    (tmp_path / "audit.jsonl").rename(tmp_path / "elsewhere")  # As an operator may.
    for number in (5, 6, 7):
        tell(number)
    file.close()
    assert [line["number"] for line in kept(tmp_path, "audit.jsonl")] == [0, 1, 2, 7]
    assert len((tmp_path / "elsewhere").read_text().splitlines()) == 3
    assert '"number": 3' in caplog.text


async def test_a_folder_that_is_not_there_is_an_option_error(tmp_path: Path) -> None:
    settings = make_settings(tmp_path / "nothing")
    with pytest.raises(OptionError, match="audit file"):
        async with serve_api(SimpleNamespace(tokens=None), settings):  # type: ignore[arg-type]
            pass


async def test_a_port_that_is_taken_is_an_option_error(tmp_path: Path) -> None:
    async with served(tmp_path) as api:
        port = int(api.base.rpartition(":")[2])
        (tmp_path / "other").mkdir()
        settings = make_settings(tmp_path / "other", port=port)
        with pytest.raises(OptionError, match=f"127.0.0.1:{port}: .*in use"):
            async with serve_api(api.service, settings):  # type: ignore[arg-type]
                pass
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


@pytest.mark.parametrize("folder", ["s", "runs", "runs/service"])
def test_a_folder_that_is_a_word_garbles_none(folder: str) -> None:
    redact = Redactor([folder], [])
    told = "a finished/failed job; runs end; services run"
    assert redact(told) == told
    assert redact(f"cannot write {folder}/jobs.sqlite3") == "cannot write …/jobs.sqlite3"
