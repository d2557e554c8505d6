"""The benchmarks behind the project's own figures: ``python -m benchmarks NAME``, in a checkout.

``BENCHMARKS`` lists them. They have the form and the harness of those in ``asyncpipe/bench``, with which users decide:
a module with ``run`` and ``show``. Helpers:

    cases.py             training steps that several of them measure
    turns.py             the order of arms, and processes that never see Ctrl-C
    byte_counters.py     bytes of tensor storages, counted without an allocator
    examples.py          the repository's ``examples/charlm``
    light_worker.py      worker processes without torch, for ``controller``
    scraper.py           turns with and without metrics, which are fetched over HTTP as Prometheus does

``gpu``, ``paper``, ``peers`` and ``unet`` are folders, whose ``__init__`` has ``run`` and ``show``; ``models`` has what
several measure. ``gpt2_peers`` is a program of its own, for ``docs/peers.md``. Soaks, kills and random cases are tests:
``tests/campaigns``.
"""

from __future__ import annotations

__all__ = ["BENCHMARKS"]

BENCHMARKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "compiled": (
        "a GPT-2 on 2 CPU devices with compiled stages, against the same without: step, gradients, graphs",
        (),
    ),
    "controller": (
        "what a controller with workers costs: CPU a task, bytes of messages, memory, at 2 to 1,024 workers",
        (),
    ),
    "edges": ("a message between two worker processes: µs by size, against torch.distributed's send and recv", ()),
    "gpu": (
        "what only a GPU can show, in nine minutes: values, times and memory, beside what is expected; --cpu",
        (),
    ),
    "graphs": ("large graphs: seconds to lower and to simulate them", ()),
    "language_plan": (
        "a Llama 3 8B on four devices of 24 GB: bytes of its stages, counted, and the plans that fit",
        (),
    ),
    "many_steps": (
        "steps in a row, one by one and overlapping: time, idle shares, what is idle between two steps",
        ("steps", "repeats", "cases"),
    ),
    "metrics": ("training with metrics that are scraped every second, against training without", ()),
    "paper": (
        "the tables of the torchgpipe paper on emulated devices, against their bounds; its timelines",
        ("device", "out"),
    ),
    "peers": (
        "a step by asyncpipe, a plain loop, bare threads, bare processes and torch.distributed.pipelining",
        ("cases", "contestants", "repeats"),
    ),
    "plan": ("predicted steps of 14 pipelines on 2 CPU devices, 4 of them with replicas, against measured ones", ()),
    "prediction": ("predicted steps on several hosts, against measured ones of workers with slowed edges", ()),
    "reductions": (
        "reductions over replicas in the bubble: 4 × 8 simulated, against all at the end; the picture of a real 2 × 4",
        ("out",),
    ),
    "saving": ("steps while a save is written in the background, against steps without", ()),
    "service": (
        "a service with 10,000 jobs queued, 200 running and 200,000 ended: submissions, lists, start, memory",
        (),
    ),
    "shards": ("bytes of the states of an optimizer in shards, by replica", ()),
    "sharing": ("jobs on the same devices: shares by weight, and what a background job gets and takes", ()),
    "sharing_processes": (
        "jobs that share emulated devices, on threads and in a process each: cost alone, weights, a background job",
        (),
    ),
    "task_cost": (
        "processor time of F, B and C beyond torch, on a CPU and on emulated streams, and of its parts",
        ("device", "steps"),
    ),
    "unet": ("U-Nets on one device: speed, and the largest one in a given memory", ("device", "size")),
}
"""By name: what it measures, and its options, which are keyword arguments of ``run``."""
