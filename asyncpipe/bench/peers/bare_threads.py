"""The floor: a plain thread for each device that runs its list of forwards and backwards, and a queue for each link.

Nothing else: no checks, no names, no times, no cancelling. What a pipeline costs beyond it is the price of the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn

from asyncpipe.bench.peers.cases import loss_fn
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.schedules.one_f_one_b import OneFOneB
from asyncpipe.core.schedules.protocol import Shape

__all__ = ["BareThreads", "order_of", "run_order"]

Order = Sequence[tuple[bool, int]]

_END: Any = None
"""Where a batch or a tensor is due: nothing more comes."""


class BareThreads:
    """The threads of one model, in 1F1B and without recomputation. They wait for the next step until ``close``."""

    def __init__(self, stages: Sequence[nn.Module], microbatches: int) -> None:
        self._microbatches = microbatches
        self._batches = [SimpleQueue[Any]() for _ in stages]
        self._ended = SimpleQueue[BaseException | None]()
        # By the stage that reads: what its inputs, and what the gradients of its outputs come from.
        self._inputs = [SimpleQueue[Tensor]() for _ in stages]
        self._gradients = [SimpleQueue[Tensor]() for _ in stages]
        self._threads = [
            threading.Thread(
                target=self._run,
                args=(stage, index, order_of(index, len(stages), microbatches)),
                daemon=True,  # A stage that never returns must not keep the interpreter from ending.
            )
            for index, stage in enumerate(stages)
        ]
        for thread in self._threads:
            thread.start()

    def step(self, x: Tensor, target: Tensor) -> None:
        """Run one step; gradients accumulate in the parameters. Raises what a stage raised, after ``close``."""
        batch = x.chunk(self._microbatches), target.chunk(self._microbatches)
        for batches in self._batches:
            batches.put(batch)
        for _ in self._threads:
            if (error := self._ended.get()) is not None:
                self.close()
                raise error

    def close(self) -> None:
        """End the threads, wherever they wait."""
        for queue in (*self._batches, *self._inputs, *self._gradients):
            queue.put(_END)
        for thread in self._threads:
            thread.join()

    def _run(self, stage: nn.Module, index: int, order: Order) -> None:
        for batch in iter(self._batches[index].get, _END):
            try:
                self._stage_step(stage, index, order, *batch)
                self._ended.put(None)
            except BaseException as error:  # noqa: BLE001 - the caller of `step` raises it
                self._ended.put(error)

    def _stage_step(
        self,
        stage: nn.Module,
        index: int,
        order: Order,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
    ) -> None:
        first, last = index == 0, index == len(self._threads) - 1
        run_order(
            stage,
            order,
            iter(inputs).__next__ if first else self._inputs[index].get,
            targets if last else None,
            None if last else self._inputs[index + 1].put,
            self._gradients[index].get,
            None if first else self._gradients[index - 1].put,
            len(inputs),
        )


def order_of(index: int, stages: int, microbatches: int) -> Order:
    """What the device of stage ``index`` runs in 1F1B: whether it is a forward, and the micro-batch."""
    schedule, shape = OneFOneB(), Shape(stages, microbatches, stages)
    return [(action.kind is TaskKind.FORWARD, action.microbatch) for action in schedule.order(index, shape)]


def run_order(
    stage: nn.Module,
    order: Order,
    receive: Callable[[], Tensor],
    targets: Sequence[Tensor] | None,
    send_output: Callable[[Tensor], object] | None,
    receive_gradient: Callable[[], Tensor],
    send_gradient: Callable[[Tensor], object] | None,
    microbatches: int,
) -> None:
    """Run a device's list. Only the last stage has ``targets``; it sends no output, and the first one no gradient."""
    weight = torch.tensor(1 / microbatches)
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    backward = torch.autograd.backward
    for is_forward, microbatch in order:
        if is_forward:
            values = receive()
            if send_gradient:
                values.requires_grad_()
            output = stage(values)
            if send_output:
                send_output(output.detach())
            if targets is not None:
                output = loss_fn(output, targets[microbatch])
            kept[microbatch] = values, output
        else:
            values, output = kept.pop(microbatch)
            backward(output, weight if targets is not None else receive_gradient())
            if send_gradient:
                gradient = values.grad
                assert gradient is not None
                send_gradient(gradient)
