"""The floor: plain threads or processes that run their lists of forwards and backwards, and nothing else.

No checks, no names, no times, no cancelling. What a pipeline costs beyond it is the price of the rest. Between threads
is a queue for each link. Between processes is shared memory, in which each micro-batch has a place of its own, so that
nobody waits for room; a semaphore counts what is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from math import prod
from multiprocessing import get_context
from queue import SimpleQueue
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from asyncpipe.bench.cases import Case, loss_fn
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.schedules.one_f_one_b import OneFOneB
from asyncpipe.core.schedules.protocol import Action, Shape

__all__ = ["bare_rank", "bare_threads", "links"]

Send: TypeAlias = Callable[[Tensor], object]
Receive: TypeAlias = Callable[[], Tensor]


@contextmanager
def bare_threads(stages: Sequence[nn.Module], microbatches: int) -> Iterator[Callable[[Tensor, Tensor], None]]:
    """A step in 1F1B, without recomputation, on a thread for each stage; gradients accumulate in the parameters.

    The step raises what the first stage raises that fails.
    """
    # By the stage that reads: what its inputs, and what the gradients of its outputs come from.
    inputs, gradients = ([SimpleQueue[Any]() for _ in stages] for _ in range(2))
    errors: list[BaseException] = []

    def run(index: int, x: Sequence[Tensor], target: Sequence[Tensor]) -> None:
        order = _order(index, len(stages), microbatches)
        before = (inputs[index].get, gradients[index - 1].put) if index else None
        after = (inputs[index + 1].put, gradients[index].get) if index + 1 < len(stages) else None
        try:
            _run_order(stages[index], order, x, target, before, after)
        except BaseException as error:  # noqa: BLE001 - `step` raises it
            errors.append(error)
            for queue in (*inputs, *gradients):
                queue.put(None)  # Which ends the others, wherever they wait.

    def step(x: Tensor, target: Tensor) -> None:
        batch = x.chunk(microbatches), target.chunk(microbatches)
        for ended in [pool.submit(run, index, *batch) for index in range(len(stages))]:
            ended.result()
        if errors:
            raise errors[0]

    with ThreadPoolExecutor(len(stages)) as pool:
        yield step


def _order(index: int, stages: int, microbatches: int) -> list[Action]:
    return list(OneFOneB().order(index, Shape(stages, microbatches, stages)))


def _run_order(
    stage: nn.Module,
    order: Sequence[Action],
    x: Sequence[Tensor],
    target: Sequence[Tensor],
    before: tuple[Receive, Send] | None,
    after: tuple[Send, Receive] | None,
) -> None:
    """Run a device's list. ``before`` are the ends of the links to the stage before, inputs and gradients, if there is
    one; ``after`` are those to the next one."""
    weight = torch.tensor(1 / len(x))
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    for action in order:
        if action.kind is TaskKind.FORWARD:
            values = before[0]().requires_grad_() if before else x[action.microbatch]
            output = stage(values)
            if after:
                after[0](output.detach())
            else:
                output = loss_fn(output, target[action.microbatch])
            kept[action.microbatch] = values, output
        else:
            values, output = kept.pop(action.microbatch)
            torch.autograd.backward(output, after[1]() if after else weight)
            if before:
                assert values.grad is not None
                before[1](values.grad)


# Processes


class _Link:
    """Tensors from one process to the other. A step uses all places, and begins when the one before has ended."""

    def __init__(self, shape: torch.Size, microbatches: int) -> None:
        context = get_context("spawn")
        self._shape = microbatches, *shape
        self._memory: Any = context.RawArray("f", prod(self._shape))
        self._there = context.Semaphore(0)

    def open(self) -> tuple[Send, Receive]:
        """What sends and what receives, for the process that calls."""
        places = cycle(torch.frombuffer(self._memory, dtype=torch.float32).view(self._shape).unbind())

        def send(tensor: Tensor) -> None:
            next(places).copy_(tensor)
            self._there.release()

        def receive() -> Tensor:
            self._there.acquire()
            return next(places).detach()

        return send, receive


def links(case: Case) -> tuple[_Link, _Link]:
    """The links between two processes with half of the stages each, forward and backward: one tensor in each."""
    with torch.no_grad():
        between = case.model()[: case.stages // 2](case.batch()[0][: case.shape[0]])
    return _Link(between.shape, case.microbatches), _Link(between.shape, case.microbatches)


def bare_rank(links: tuple[_Link, _Link], rank: int, half: nn.Sequential, case: Case) -> Callable[[], object]:
    """What process ``rank`` does in a step, with its ``half`` of the stages."""
    (send, receive), (send_gradient, receive_gradient) = (link.open() for link in links)
    x, target = (whole.chunk(case.microbatches) for whole in case.batch())
    work = partial(_run_order, half, _order(rank, 2, case.microbatches), x, target)
    return partial(work, (receive, send_gradient), None) if rank else partial(work, None, (send, receive_gradient))
