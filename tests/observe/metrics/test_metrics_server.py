"""What the server of ``/metrics`` refuses, and that idle connections keep no scrape out."""

from __future__ import annotations

import base64
import errno
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from prometheus_client import CollectorRegistry, Gauge

from asyncpipe.observe.metrics import server as server_module
from asyncpipe.observe.metrics.server import MetricsServer, serve_metrics

TOKEN = b"quite-a-secret-token"
BEARER = f"Authorization: Bearer {TOKEN.decode()}"
HERE = "Host: 127.0.0.1"


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Gauge("answer", "Of everything", registry=registry).set(42)
    return registry


@contextmanager
def connection(server: MetricsServer) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        yield client


def read_all(client: socket.socket) -> bytes:
    """What comes until the server closes."""
    told = b""
    try:
        while piece := client.recv(65536):
            told += piece
    except ConnectionError:  # It closed before it had read everything.
        pass
    return told


def ask(server: MetricsServer, *lines: str, request: str = "GET /metrics HTTP/1.1") -> bytes:
    with connection(server) as client:
        client.sendall("\r\n".join([request, *lines, "", ""]).encode())
        return read_all(client)


def status(answer: bytes) -> int:
    return int(answer.split(b" ")[1])


def test_what_is_refused(registry: CollectorRegistry) -> None:
    with serve_metrics(registry, 0) as server:
        assert b"\nanswer 42.0\n" in ask(server, HERE)
        assert b"\nanswer 42.0\n" in ask(server, "Host: localhost:9400", request="GET /metrics?name[]=answer HTTP/1.0")
        assert b"Content-Encoding: gzip" in ask(server, HERE, "Accept-Encoding: gzip")
        assert status(ask(server, "Host: evil.example")) == 421
        assert status(ask(server)) == 421
        assert status(ask(server, HERE, request="POST /metrics HTTP/1.1")) == 405
        assert status(ask(server, HERE, request="GET /etc/passwd HTTP/1.1")) == 404
        assert status(ask(server, HERE, request="nonsense")) == 400
        assert status(ask(server, HERE, request="GET /metrics HTTP/2")) == 400
        assert ask(server, "X: " + "h" * 100_000) == b""


def test_others_need_a_token(registry: CollectorRegistry) -> None:
    with serve_metrics(registry, 0, "0.0.0.0", may_read=lambda token: token == TOKEN) as server:
        assert status(ask(server, BEARER)) == 200, "a name of the host is not asked for: the token is what counts"
        basic = base64.b64encode(b"any:" + TOKEN).decode()
        assert status(ask(server, f"Authorization: Basic {basic}")) == 200
        for wrong in ([], [f"{BEARER}x"], [BEARER, BEARER], ["Authorization: Basic ???"]):
            answer = ask(server, *wrong)
            assert status(answer) == 401
            assert b"WWW-Authenticate: Bearer" in answer
            assert b"answer" not in answer


def test_connections_that_send_nothing_give_way(registry: CollectorRegistry) -> None:
    with serve_metrics(registry, 0, most_connections=4) as server, ExitStack() as stack:
        idle = [stack.enter_context(connection(server)) for _ in range(40)]
        assert b"\nanswer 42.0\n" in ask(server, HERE)
        assert idle[0].recv(1) == b"", "the first had to go"
    assert not [thread for thread in threading.enumerate() if thread.name == "asyncpipe metrics"]


def test_a_head_that_never_ends_is_cut_off(registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(server_module, "POLL_SECONDS", 0.05)
    with serve_metrics(registry, 0) as server, connection(server) as client:
        client.settimeout(0.02)
        client.sendall(b"GET /metrics HTTP/1.1\r\nX-Drops: ")
        while True:  # Drop by drop, so that no single wait is long.
            try:
                client.sendall(b"x")
                if client.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break


def test_a_scrape_under_way_does_not_give_way(registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    begun = threading.Semaphore(0)

    class Slow:
        def describe(self) -> list[object]:
            return []

        def collect(self) -> Iterator[object]:
            begun.release()
            assert go_on.wait(20)
            yield from ()

    registry.register(Slow())  # type: ignore[arg-type]
    answers: list[bytes] = []
    with serve_metrics(registry, 0, most_connections=2) as server:
        scrapes = [threading.Thread(target=lambda: answers.append(ask(server, HERE))) for _ in range(2)]
        for each in scrapes:
            each.start()
        for _ in scrapes:
            assert begun.acquire(timeout=20)
        assert status(ask(server, HERE)) == 503
        go_on.set()
        for each in scrapes:
            each.join()
    assert [status(answer) for answer in answers] == [200, 200]


def test_who_does_not_read_is_cut_off(registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "READ_SECONDS", 0.2)
    monkeypatch.setattr(server_module, "POLL_SECONDS", 0.05)
    gauge = Gauge("large", "Too much for a socket's buffer", ["label"], registry=registry)
    for number in range(3000):
        gauge.labels(f"{number:04}" + "x" * 2000).set(number)
    ended = threading.Event()
    end = server_module._ScrapeServer.shutdown_request

    def told(server: object, request: object) -> None:
        end(server, request)  # type: ignore[arg-type]
        ended.set()

    monkeypatch.setattr(server_module._ScrapeServer, "shutdown_request", told)
    with serve_metrics(registry, 0) as server, connection(server) as client:
        client.sendall(f"GET /metrics HTTP/1.1\r\n{HERE}\r\n\r\n".encode())
        assert ended.wait(20)


def test_a_process_without_descriptors_does_not_spin(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    accept: Callable[[socket.socket], object] = socket.socket.accept

    def full(listening: socket.socket) -> object:
        if not waits:
            raise OSError(errno.EMFILE, "too many open files")
        return accept(listening)

    monkeypatch.setattr(server_module, "sleep", waits.append)
    monkeypatch.setattr(socket.socket, "accept", full)
    with serve_metrics(registry, 0) as server:
        assert status(ask(server, HERE)) == 200
    assert waits == [server_module.POLL_SECONDS]
