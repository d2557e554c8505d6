"""Random streams: draws depend on seed, micro-batch and stage only, on CPUs and on accelerators."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import asyncpipe
from asyncpipe.ops.autograd import random_streams
from asyncpipe.ops.autograd.random_streams import (
    RandomStream,
    check_repeated,
    draw_step_seed,
    random_stream,
    turns_paused,
)
from asyncpipe.ops.device.generator_turns import GeneratorTurn

CPU, CUDA, OTHER = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")


def stream(seed: int = 1, microbatch: int = 0, stage: int = 0, branch: int = 0) -> RandomStream:
    return random_stream(seed, microbatch, stage, CPU, branch)


def test_streams_differ_by_seed_micro_batch_stage_and_branch_and_go_on() -> None:
    def drawn(*key: int) -> tuple[float, ...]:
        with stream(*key):
            return tuple(torch.rand(3).tolist())

    keys = list(product((1, 2), range(4), range(4), range(3)))
    assert len({drawn(*key) for key in keys}) == len(keys)
    with stream():
        first, second = torch.rand(3), torch.rand(3)
    assert not torch.equal(first, second)


def test_a_step_takes_one_number_from_the_callers_generator() -> None:
    torch.manual_seed(0)
    expected = torch.randint(0, 2**62, ()).item()
    after = torch.get_rng_state()
    torch.manual_seed(0)
    seed = draw_step_seed()
    with stream(seed):
        F.dropout(torch.ones(5))
    assert seed == expected
    assert torch.equal(torch.get_rng_state(), after)


def test_what_was_drawn_is_compared() -> None:
    def drawn(*sizes: int) -> list[Tensor]:
        with stream() as entered:
            for size in sizes:
                torch.rand(size)
            entered.generator(CPU)  # As torch's checkpoint does to keep its state; this draws nothing.
            return entered.drawn()

    check_repeated(0, drawn(), drawn())
    check_repeated(0, drawn(3, 4), drawn(4, 3))
    for first, again in [((), (1,)), ((1,), ()), ((3,), (4,))]:
        with pytest.raises(asyncpipe.errors.RecomputeError, match="stage 5 drew other random numbers"):
            check_repeated(5, drawn(*first), drawn(*again))


# Accelerators, played by generators of the CPU


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[torch.device, torch.Generator]]:
    """The default generators of two devices. Nobody may have a turn at the end."""
    generators = {CUDA: torch.Generator().manual_seed(1), OTHER: torch.Generator().manual_seed(2)}
    turns = {device: GeneratorTurn(device, generator) for device, generator in generators.items()}
    monkeypatch.setattr(random_streams, "turn_of", turns.get)
    before = {device: generator.get_state() for device, generator in generators.items()}
    yield generators
    for device, generator in generators.items():
        assert torch.equal(generator.get_state(), before[device])
        turns[device].acquire(0)
        turns[device].release()


Devices = dict[torch.device, torch.Generator]


@pytest.mark.promise(
    "Bit-identical results",
    "Random numbers on an accelerator are equal in every recomputation mode, schedule and placement.",
)
def test_tasks_on_one_accelerator_take_turns(devices: Devices) -> None:
    def draw(microbatch: int, barrier: threading.Barrier | None, into: dict[int, list[Tensor]]) -> None:
        for _ in range(20):
            if barrier is not None:
                barrier.wait()
            with random_stream(1, microbatch, 0, CUDA):
                drawn = [torch.rand(1000, generator=devices[CUDA]) for _ in range(3)]
            into.setdefault(microbatch, []).append(torch.cat(drawn))

    alone: dict[int, list[Tensor]] = {}
    together: dict[int, list[Tensor]] = {}
    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=draw, args=(i, barrier, together)) for i in range(2)]
    for thread in threads:
        thread.start()
    for i, thread in enumerate(threads):
        thread.join()
        draw(i, None, alone)
        assert all(map(torch.equal, alone[i], together[i]))


def test_a_task_that_waits_lets_others_have_the_turn(devices: Devices) -> None:
    """As a loss function that calls a pipeline, whose tasks run on other threads of the same device."""

    def other() -> None:
        with random_stream(9, 0, 0, CUDA):
            torch.rand(5, generator=devices[CUDA])

    with random_stream(1, 0, 0, CUDA):
        wanted = torch.rand(6, generator=devices[CUDA])
    with random_stream(1, 0, 0, CUDA) as entered:
        first = torch.rand(3, generator=devices[CUDA])
        with turns_paused():
            with turns_paused():
                other()  # On the same thread, as tasks of the same pool may be.
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        assert entered.has_drawn
        found = torch.cat([first, torch.rand(3, generator=devices[CUDA])])
        assert entered.drawn()
    assert torch.equal(found, wanted)
