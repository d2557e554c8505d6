"""Benchmarks that run on the user's own machine: ``asyncpipe bench NAME``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

__all__ = ["BENCHMARKS", "Benchmark"]

Figures = dict[str, Any]
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark: what it measures, and the module whose ``run`` does it and whose ``show`` prints it."""

    name: str
    summary: str

    def run(self, progress: Progress) -> Figures:
        """Measure; ``progress`` is told what is being done. Returns plain data, ready for JSON."""
        figures: Figures = import_module(f"asyncpipe.bench.{self.name}").run(progress)
        return figures

    def show(self, figures: Figures) -> str:
        """The figures as text."""
        text: str = import_module(f"asyncpipe.bench.{self.name}").show(figures)
        return text


BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("overhead", "what the scheduler costs: µs per empty task, and seconds to build a graph"),
        Benchmark("pipeline", "a compute-bound model on 2 CPU devices, against its bound and against one device"),
    )
}
