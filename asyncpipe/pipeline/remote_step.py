"""One step of a pipeline whose stages live in workers, on its caller's thread."""

from __future__ import annotations

from functools import partial

import torch

from asyncpipe.core.graph.task import WHOLE_STEP
from asyncpipe.errors import OptionError
from asyncpipe.ops.execute.step_tensors import StepTensors
from asyncpipe.pipeline.build import PipelineParts
from asyncpipe.pipeline.pool import Tenancy
from asyncpipe.pipeline.remote_stages import PreparedWork, RemoteStages
from asyncpipe.pipeline.result import StepResult
from asyncpipe.pipeline.step import StepProtocol
from asyncpipe.pipeline.step_inputs import StepInputs
from asyncpipe.runtime.line import Line
from asyncpipe.runtime.parts_execution import PartsExecution
from asyncpipe.runtime.portal import PortalCall

__all__ = ["RemoteStep"]


class RemoteStep(StepProtocol[PartsExecution, StepResult]):
    """As ``PreparedStep``; the workers are told to keep what it leaves there, or to undo it."""

    def __init__(self, parts: PipelineParts, inputs: StepInputs, tenancy: Tenancy, stages: RemoteStages) -> None:
        """Raises ``OptionError`` for what needs gradients in this process."""
        super().__init__(parts, tenancy, inputs.graph(parts))
        self.inputs = inputs
        self._stages = stages
        self._work: PreparedWork | None = None
        self._execution: PartsExecution | None = None
        """Until the workers know whether to keep what it left."""
        if inputs.options.scaler is not None:
            raise OptionError(
                "a GradScaler reads gradients, which are in the workers; use bfloat16, or workers='threads'"
            )
        if inputs.training and parts.options.optimizer is None:
            raise OptionError(
                "the gradients of this step stay in the workers, where nothing would use them; give the pipeline an "
                "optimizer=, or use workers='threads'"
            )

    def _begin(self, *, in_line: bool = False) -> None:
        self._work = self._stages.work(self.inputs, overlaps=in_line)
        self.inputs = self.inputs.emptied()

    def _submit(self, line: Line[PartsExecution]) -> PortalCall[PartsExecution]:
        # Kept by nobody else: the frames of an error would keep the mini-batch.
        work, self._work = self._work, None
        assert work is not None
        return line.submit(self.tenancy.pool.portal, self._stages.driver, partial(self._start, [work]))

    def _start(self, work: list[PreparedWork], *, after: PartsExecution | None) -> PartsExecution:
        self._execution = self._stages.start(self.graph, work.pop(), after)
        self._execution.size = self.inputs.size(self.parts)
        return self._execution

    def _finish(self, execution: PartsExecution) -> StepResult:
        inputs, found = self.inputs, self._stages.result(execution)
        by_microbatch, counts = found.losses.tensors(), found.counts.tensors()
        losses = [loss for _, loss in sorted(by_microbatch.items())]
        with torch.no_grad():
            loss = inputs.mean_loss(self.parts, losses, StepTensors(counts=counts, items=inputs.plan.items))
            outputs = inputs.gather([output for _, output in sorted(found.outputs.items())])
            self.parts.loss_watch.saw(loss)
        self._settle(keep=True)
        portal = self.tenancy.pool.portal
        norms = found.gradient_norms.tensors()
        execution.note_norm(norms.get(WHOLE_STEP))
        return StepResult(loss, tuple(losses), outputs, execution, portal, norms, found.learning_rate)

    def abandon(self) -> None:
        self._settle(keep=False)

    def _settle(self, *, keep: bool) -> None:
        execution, self._execution = self._execution, None
        if execution is not None:
            self._stages.settle(execution, keep=keep)
