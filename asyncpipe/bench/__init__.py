"""Benchmarks that users run on their own machines: ``asyncpipe bench NAME``.

``BENCHMARKS`` below lists them. Each is a module of this folder with two functions: ``run`` measures and returns plain
data, ``show`` turns that data into text. Its ``...Size`` class says how much is measured; tests pass a tiny one. All of
them build on ``harness.py`` (start reading there); the other helpers are

    byte_counters.py     bytes of tensor storages, counted without an allocator
    examples.py          models and job files of the repository's examples
    light_worker.py      worker processes without torch, for ``controller``
    many_steps.py        steps in a row, one by one and overlapping, for ``pipeline``
    real_tasks.py        steps of real tasks against the plain loop, stage by stage
    scraper.py           turns with and without metrics, which are fetched over HTTP as Prometheus does
    web_app.py           a web application for ``embedded``, and its requests

``paper`` and ``unet`` are folders, whose ``__init__`` has these functions.

Benchmarks may import everything except ``asyncpipe.cli``. Soaks and fault campaigns are tests: ``tests/campaigns``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["BENCHMARKS", "OPTIONS"]

Figures = dict[str, Any]
"""What a benchmark's ``run`` returns: plain data, ready for JSON."""
Progress = Callable[[str], None]
"""Gets a line of text for each part of a benchmark."""

BENCHMARKS = {
    "overhead": "what the scheduler and its metrics cost: µs per empty and per real task, seconds to build a graph",
    "metrics": "training with metrics that are scraped every second, against training without",
    "pipeline": "a compute-bound model on 2 CPU devices, against its bound and against one device",
    "compiled": "a GPT-2 on 2 CPU devices with compiled stages, against the same without: step, gradients, graphs",
    "dropin": "loss(pipe(x)).backward() on 2 CPU devices, against a backward by autograd's engine alone",
    "peers": "a step by asyncpipe, a plain loop, bare threads, torchgpipe, fairscale and torch's pipelining",
    "memory": "bytes that wait for a backward, recomputed against not, over the micro-batches",
    "offload": "activations kept, offloaded and recomputed in a given memory: bytes and time, predicted and measured",
    "rss": "resident memory of the controller and its workers, for a model that is sent there or built there",
    "plan": "predicted steps of ten pipelines on 2 CPU devices, against measured ones",
    "prediction": "predicted steps on several hosts, against measured ones of workers with slowed edges",
    "slack": "schedules under jitter and slow copies, simulated and on emulated devices",
    "embedded": "a service inside a web application: its requests while it trains, and what they cost",
    "controller": "what a controller with workers costs: CPU a task, bytes of messages, memory, at 2 to 1,024 workers",
    "edges": "a message between two worker processes: µs by size, against torch.distributed's send and recv",
    "sharing": "jobs on the same devices: shares by weight, and what a background job gets and takes",
    "paper": "the tables of the torchgpipe paper on emulated devices, against their bounds; its timelines",
    "unet": "U-Nets on one device: speed, and the largest one in a given memory",
}
OPTIONS = {
    "paper": ("device", "out"),
    "pipeline": ("steps", "repeats", "cases"),
    "peers": ("cases", "contestants", "repeats"),
    "sharing": ("beside",),
    "unet": ("device", "size"),
}
"""The options that benchmarks have: keyword arguments of their ``run``; the command's parser says what each is."""
