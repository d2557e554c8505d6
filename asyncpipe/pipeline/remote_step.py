"""One step of a pipeline whose stages live in workers, on its caller's thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from asyncpipe.errors import OptionError
from asyncpipe.ops.execute.step_tensors import StepTensors
from asyncpipe.pipeline.overlap import why_alone
from asyncpipe.pipeline.pool import Tenancy
from asyncpipe.pipeline.remote_stages import PreparedWork, RemoteStages
from asyncpipe.pipeline.result import StepResult
from asyncpipe.pipeline.step_inputs import StepInputs
from asyncpipe.runtime.line import Line
from asyncpipe.runtime.parts_execution import PartsExecution
from asyncpipe.runtime.portal import PortalCall
from asyncpipe.runtime.waits import Waiting

__all__ = ["RemoteStep"]


class RemoteStep:
    """As ``PreparedStep``: made of a mini-batch that is checked and cut, then run once, or started and finished."""

    def __init__(self, inputs: StepInputs, tenancy: Tenancy, stages: RemoteStages) -> None:
        """Raises ``OptionError`` for what needs gradients in this process."""
        self._inputs = inputs
        self._tenancy = tenancy
        self._stages = stages
        self._graph = inputs.graph
        self._execution: PartsExecution | None = None
        if inputs.options.scaler is not None:
            raise OptionError(
                "a GradScaler reads gradients, which are in the workers; use bfloat16, or workers='threads'"
            )
        if inputs.training and inputs.parts.options.optimizer is None:
            raise OptionError(
                "the gradients of this step stay in the workers, where nothing would use them; give the pipeline an "
                "optimizer=, or use workers='threads'"
            )

    @property
    def training(self) -> bool:
        """Whether it has backwards."""
        return self._inputs.training

    @property
    def is_fed(self) -> bool:
        """Whether the pipeline's feed has made its mini-batch."""
        return self._inputs.options.is_fed

    def run(self) -> Waiting[StepResult]:
        """Run it, for both kinds of callers."""
        with self._settled():
            return (yield from self._tenancy.pool.on_loop(self._run(self._work(overlaps=False))))

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """Have the workers undo what the block leaves if it raises, and keep it otherwise.

        On the caller's thread: a cancellation may come when the workers are done and the caller does not know it yet.
        """
        try:
            yield
        except BaseException:
            self.drop()
            raise
        self._settle(keep=True)

    # Steps that overlap

    @property
    def overlaps(self) -> bool:
        """Whether it may be under way together with others."""
        return why_alone(self._inputs.parts, self._tenancy, self._graph, training=self.training) is None

    def start(self, line: Line[PartsExecution]) -> PortalCall[PartsExecution]:
        """Begin it behind the last step of ``line``; then ``finish`` or ``drop`` it."""
        begin = partial(self._begin, self._work(overlaps=True))
        return line.submit(self._tenancy.pool.portal, self._stages.driver, begin)

    def _begin(self, work: PreparedWork, after: PartsExecution | None) -> PartsExecution:
        self._execution = self._stages.start(self._graph, work, after)
        return self._execution

    def finish(self, execution: PartsExecution) -> StepResult:
        """Its result; all its parts have ended. If this raises, it is still to be dropped."""
        result = self._result(execution)
        self._settle(keep=True)
        return result

    def drop(self) -> None:
        """Undo what is left of it; no worker computes for it any more."""
        self._settle(keep=False)

    def _settle(self, *, keep: bool) -> None:
        execution, self._execution = self._execution, None
        if execution is not None:
            self._stages.settle(execution, keep=keep)

    def _work(self, *, overlaps: bool) -> PreparedWork:
        work = self._stages.work(self._inputs, overlaps=overlaps)
        self._inputs = self._inputs.emptied()
        return work

    async def _run(self, work: PreparedWork) -> StepResult:
        execution = self._begin(work, None)
        del work  # The frames of an error would keep the mini-batch.
        await self._stages.driver.issued(execution)
        return self._result(execution)

    def _result(self, execution: PartsExecution) -> StepResult:
        inputs, found = self._inputs, self._stages.result(execution)
        by_microbatch, counts = found.losses.tensors(), found.counts.tensors()
        losses = [loss for _, loss in sorted(by_microbatch.items())]
        with torch.no_grad():
            loss = inputs.mean_loss(losses, StepTensors(losses=by_microbatch, counts=counts))
            outputs = inputs.gather(found.outputs)
        portal = self._tenancy.pool.portal
        return StepResult(loss, tuple(losses), outputs, execution, portal, found.gradient_norms.tensors())
