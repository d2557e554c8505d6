"""An HTTP server for ``/metrics``: prometheus_client's, on threads, so it answers also while an event loop is stuck.

Everybody who reaches its address may scrape it. Listen on loopback (the default), on a network that only the scraper is
in, or give a certificate and the authority whose client certificates are accepted (``tls_config`` in Prometheus).
"""

from __future__ import annotations

import ssl
from pathlib import Path
from threading import Thread
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

from asyncpipe.errors import OptionError

__all__ = ["MetricsServer", "serve_metrics"]


class MetricsServer:
    """A running HTTP server for ``/metrics``; leaving its ``with`` block closes it."""

    def __init__(self, server: WSGIServer, thread: Thread) -> None:
        self._server, self._thread = server, thread
        self.port: int = server.server_port

    def close(self) -> None:
        """Stop serving, free the port and join the thread; may be called twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve_metrics(
    registry: CollectorRegistry,
    port: int,
    address: str = "127.0.0.1",
    *,
    certificate: Path | None = None,
    key: Path | None = None,
    client_authority: Path | None = None,
) -> MetricsServer:
    """A server that answers scrapes of ``registry`` on threads of its own; port 0 takes a free one (``.port``).

    With ``certificate`` (and ``key``, if that is a file of its own) it speaks TLS; with ``client_authority`` as well,
    it answers only clients whose certificate this authority has signed. All are PEM files. Raises ``OptionError`` if it
    cannot listen there or cannot read a file. Close it, or use it in a ``with``: nothing else ends its thread.
    """
    if certificate is None and (key is not None or client_authority is not None):
        raise OptionError("metrics over TLS need certificate; key and client_authority alone do nothing")
    files = {"certfile": certificate, "keyfile": key or certificate, "client_cafile": client_authority}
    try:
        if certificate is not None:
            # Before anything listens, because prometheus_client would leave its socket open.
            tried = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tried.load_cert_chain(certificate, key)
            if client_authority is not None:
                tried.load_verify_locations(client_authority)
        names: dict[str, Any] = {name: str(path) for name, path in files.items() if path is not None}
        return MetricsServer(
            *start_http_server(port, address, registry, **names, client_auth_required=client_authority is not None)
        )
    except OSError as error:
        raise OptionError(f"cannot serve metrics on {address}:{port}: {error}") from error
