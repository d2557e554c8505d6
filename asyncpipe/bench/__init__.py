"""Benchmarks that users run on their own machines: ``asyncpipe bench NAME``.

``BENCHMARKS`` below lists them. Each is a module of this folder with two functions: ``run`` measures and returns plain
data, ``show`` turns that data into text. Its ``...Size`` class says how much is measured; tests pass a tiny one. All of
them build on ``harness.py`` (start reading there); the other helpers are

    byte_counters.py     bytes of tensor storages, counted without an allocator
    examples.py          models and job files of the repository's examples
    scraper.py           metrics over HTTP, fetched as Prometheus does
    web_app.py, load_generator.py    a web server and its requests, for ``embedded``

Benchmarks may import everything except ``asyncpipe.cli``. Soaks and fault campaigns are tests: ``tests/campaigns``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from asyncpipe.errors import OptionError

__all__ = ["BENCHMARKS", "Benchmark"]

Figures = dict[str, Any]
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Benchmark:
    """The name, summary and options of a benchmark, whose module ``run`` and ``show`` import when called."""

    name: str
    summary: str
    options: tuple[str, ...] = ()
    """Keyword arguments of the module's ``run`` that the command line may set, each a string."""

    def run(self, progress: Progress, **options: str) -> Figures:
        """Measure and return plain data, ready for JSON; ``progress`` gets a line of text for each part.

        Raises ``OptionError`` for an option that this benchmark does not have.
        """
        for option in options:
            if option not in self.options:
                has = ", ".join(f"--{name}" for name in self.options) or "no options"
                raise OptionError(f"the benchmark {self.name!r} has no --{option}; it has {has}")
        figures: Figures = import_module(f"asyncpipe.bench.{self.name}").run(progress, **options)
        return figures

    def show(self, figures: Figures) -> str:
        """The figures as text."""
        text: str = import_module(f"asyncpipe.bench.{self.name}").show(figures)
        return text


BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark(
            "overhead", "what the scheduler and its metrics cost: µs per empty task, and seconds to build a graph"
        ),
        Benchmark("metrics", "training with metrics that are scraped every second, against training without"),
        Benchmark("pipeline", "a compute-bound model on 2 CPU devices, against its bound and against one device"),
        Benchmark("dropin", "loss(pipe(x)).backward() on 2 CPU devices, against a backward by autograd's engine alone"),
        Benchmark("memory", "bytes that wait for a backward, recomputed against not, over the micro-batches"),
        Benchmark("plan", "predicted steps of ten pipelines on 2 CPU devices, against measured ones"),
        Benchmark("slack", "schedules under jitter and slow copies, simulated and on emulated devices"),
        Benchmark("embedded", "a service inside a web application: its requests while it trains, and what they cost"),
        Benchmark("sharing", "jobs on the same devices: shares by weight, and what a background job gets and takes"),
        Benchmark("unet", "U-Nets on one device: speed, and the largest one in a given memory", ("device", "size")),
    )
}
