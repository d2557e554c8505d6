"""The metrics of a command that runs for long, served over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

__all__ = ["metrics_served"]


@contextmanager
def metrics_served(collector: Collector, port: int | None, address: str) -> Iterator[None]:
    """Serve the metrics of ``collector`` during the block and print their address; without a port, do nothing."""
    if port is None:
        yield
        return
    from prometheus_client import CollectorRegistry

    from asyncpipe.observe.metrics import serve_metrics

    registry = CollectorRegistry()
    registry.register(collector)
    with serve_metrics(registry, port, address) as server:
        print(f"metrics: http://{address}:{server.port}/metrics", flush=True)
        yield
