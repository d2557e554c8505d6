"""A small HTTP server for ``/metrics``, for programs without an endpoint of their own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, start_http_server

from asyncpipe.errors import OptionError

__all__ = ["MetricsServer", "serve_metrics"]


class MetricsServer:
    """A running HTTP server for ``/metrics``; leaving its ``with`` block closes it."""

    def __init__(self, registry: CollectorRegistry, port: int, address: str) -> None:
        try:
            self._server, self._thread = start_http_server(port, address, registry)
        except OSError as error:
            raise OptionError(f"cannot serve metrics on {address}:{port}: {error}") from error
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop serving, free the port and join the thread; may be called twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve_metrics(registry: CollectorRegistry, port: int, address: str = "127.0.0.1") -> MetricsServer:
    """A server that answers scrapes of ``registry`` on threads of its own; port 0 takes a free one (``.port``).

    By default it listens on loopback alone. Raises ``OptionError`` if it cannot listen there. Close it, or use it in a
    ``with``: nothing else ends its threads.
    """
    return MetricsServer(registry, port, address)
