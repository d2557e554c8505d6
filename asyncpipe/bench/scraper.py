"""Metrics served and scraped as in production: a collector behind an HTTP server, and a thread that fetches it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from urllib.request import urlopen

from prometheus_client import CollectorRegistry

from asyncpipe.observe.metrics import PipelineCollector, serve_metrics

__all__ = ["Scraper", "scraper"]


class Scraper:
    """Fetches the metrics of a server on the loopback address every ``period`` seconds, as Prometheus does."""

    def __init__(self, port: int, period: float) -> None:
        self.scrapes = 0
        self._url = f"http://127.0.0.1:{port}/metrics"
        self._period = period

    @contextmanager
    def scraping(self) -> Iterator[None]:
        """Scrape on a thread during the block, first after half a period.

        A block that is too short for that is scraped once at its end. The error of a failed scrape is raised there.
        """
        before = self.scrapes
        stop = Event()
        failed: list[OSError] = []

        def scrape() -> None:
            pause = self._period / 2
            while not stop.wait(pause):
                pause = self._period
                try:
                    self.scrape()
                except OSError as error:
                    failed.append(error)
                    return

        thread = Thread(target=scrape, name="asyncpipe bench scraper")
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        if failed:
            raise failed[0]
        if self.scrapes == before:
            self.scrape()

    def scrape(self) -> str:
        """Fetch all metrics once."""
        with urlopen(self._url) as answer:  # noqa: S310 - always http
            text: str = answer.read().decode()
        self.scrapes += 1
        return text


@contextmanager
def scraper(collector: PipelineCollector, period: float) -> Iterator[Scraper]:
    """Serve ``collector`` during the block; yields a scraper of it."""
    registry = CollectorRegistry()
    registry.register(collector)
    with serve_metrics(registry, 0) as server:
        yield Scraper(server.port, period)
