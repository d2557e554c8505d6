"""The metrics of a command that runs for long, served over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

__all__ = ["metrics_served"]


@contextmanager
def metrics_served(
    collector: Collector,
    port: int | None,
    address: str,
    *,
    may_read: Callable[[bytes], bool] | None = None,
    most_connections: int | None = None,
) -> Iterator[None]:
    """Serve the metrics of ``collector`` during the block and print their address; without a port, do nothing.

    ``may_read`` and ``most_connections`` are as for ``serve_metrics``.
    """
    if port is None:
        yield
        return
    from prometheus_client import CollectorRegistry

    from asyncpipe.observe.metrics import serve_metrics
    from asyncpipe.observe.metrics.server import MOST_CONNECTIONS

    registry = CollectorRegistry()
    registry.register(collector)
    most = MOST_CONNECTIONS if most_connections is None else most_connections
    with serve_metrics(registry, port, address, may_read=may_read, most_connections=most) as server:
        print(f"metrics: http://{address}:{server.port}/metrics", flush=True)
        yield
