"""Benchmarks with which users decide, on their own machines: ``asyncpipe bench NAME``.

``BENCHMARKS`` lists them. Each is a module with two functions: ``run`` measures and returns plain data, ``show`` turns
that data into Markdown. Its ``...Size`` class says how much is measured; tests pass a tiny one.

    harness.py      what all benchmarks share: turns, medians, tables. Start reading there
    cases.py        what a training step is that benchmarks measure
    contestants.py  ways to run such a step: a plain loop, and asyncpipe

The benchmarks that prove the project's own figures are beside the package, in ``benchmarks/``, over the same harness.
Benchmarks may import everything except ``asyncpipe.cli``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["BENCHMARKS", "Figures", "Progress"]

Figures = dict[str, Any]
"""What a benchmark's ``run`` returns: plain data, ready for JSON."""
Progress = Callable[[str], None]
"""Gets a line of text for each part of a benchmark."""

BENCHMARKS = {
    "overhead": "what the scheduler costs: µs per empty and per real task",
    "pipeline": "a compute-bound model on 2 CPU devices, against its bound and against one device",
}
"""By name: what it measures."""
