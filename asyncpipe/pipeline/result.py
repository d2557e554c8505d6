"""``StepResult``, which a step returns."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from html import escape
from types import MappingProxyType
from typing import Any

from torch import Tensor

from asyncpipe.core.graph.task import WHOLE_STEP
from asyncpipe.core.predict.report import Report, report
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.errors import AsyncpipeError
from asyncpipe.observe.pictures.svg import svg_timeline
from asyncpipe.pipeline.shown import MOST_TASKS
from asyncpipe.runtime.portal import Portal
from asyncpipe.runtime.step_driver import DrivenStep

__all__ = ["StepResult"]


class StepResult:
    """Loss and outputs of a step whose last task is issued, and its record.

    On CUDA devices the tensors may be used at once: the caller's streams are ordered behind the step. ``record``
    and ``report`` exist when every device is done: on CPUs at once, on CUDA after ``await completed()``, or after
    ``wait()`` without ``await``.
    """

    def __init__(
        self,
        loss: Tensor | None,
        losses: tuple[Tensor, ...],
        outputs: Any,
        execution: DrivenStep,
        portal: Portal,
        gradient_norms: Mapping[int, Tensor] = MappingProxyType({}),
        learning_rate: float | None = None,
    ) -> None:
        self.loss = loss
        """The mini-batch's loss, without dimensions, detached; ``None`` where no loss was computed."""
        self.losses = losses
        """What ``loss_fn`` returned for each micro-batch."""
        self.outputs = outputs
        """The last stage's outputs, gathered over the micro-batches and detached; ``None`` if not kept."""
        self.gradient_norms = {stage: norm for stage, norm in gradient_norms.items() if stage != WHOLE_STEP}
        """By stage: the norm of the gradients that its optimizer has used, before clipping, with
        ``gradient_norms=True``. That of all stages is the root of the sum of their squares."""
        self.gradient_norm = gradient_norms.get(WHOLE_STEP)
        """With ``clip_grad_norm``: the norm of all gradients before clipping, if the step updates; else ``None``."""
        self.learning_rate = learning_rate
        """With ``lr_schedule``: the learning rate of the optimizer's first parameter group in this step's update."""
        self._execution = execution
        self._portal = portal

    @property
    def is_done(self) -> bool:
        """Whether every device is done, so that the step has a record."""
        return self._execution.done.done()

    @property
    def record(self) -> StepRecord:
        """The step's journal and graph, as observers get them. Raises ``AsyncpipeError`` if a device is not done."""
        if not self.is_done:
            raise AsyncpipeError("the devices have not completed this step; call 'await result.completed()' first")
        return self._execution.record()

    @cached_property
    def report(self) -> Report:
        """Task times, utilization, bubble and peaks, computed from ``record``."""
        return report(self.record)

    async def completed(self) -> StepResult:
        """Wait until every device is done. Raises ``TaskError`` if a task failed."""
        if self.is_done:
            self._raise_for_end()
        else:
            await self._portal.run(self._execution.completed())
        return self

    def wait(self) -> StepResult:
        """As ``completed``, blocking the calling thread."""
        if self.is_done:
            self._raise_for_end()
        else:
            self._portal.call(self._execution.completed())
        return self

    def __repr__(self) -> str:
        if not self.is_done:
            return "StepResult(its devices are not done yet)"
        loss = "no loss" if self.loss is None else f"loss {float(self.loss):.6g}"
        return f"StepResult({loss}, {self.report.seconds:.3g} s, bubble {self.report.bubble_ratio:.1%})"

    def _repr_html_(self) -> str:
        is_shown = self.is_done and len(self.record.graph.tasks) <= MOST_TASKS
        return f"<p>{escape(repr(self))}</p>" + (svg_timeline(self.record) if is_shown else "")

    def _raise_for_end(self) -> None:
        self._execution.raise_for(self._execution.end())
