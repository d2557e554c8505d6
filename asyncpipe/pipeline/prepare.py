"""A step of a pipeline, wherever its stages are."""

from __future__ import annotations

from typing import Any

from asyncpipe.pipeline.build import PipelineParts
from asyncpipe.pipeline.pool import Tenancy
from asyncpipe.pipeline.remote_stages import RemoteStages
from asyncpipe.pipeline.remote_step import RemoteStep
from asyncpipe.pipeline.step import PreparedStep
from asyncpipe.pipeline.step_inputs import StepInputs, StepOptions

__all__ = ["prepare_step"]


def prepare_step(
    parts: PipelineParts, tenancy: Tenancy, x: Any, target: Any, options: StepOptions
) -> PreparedStep | RemoteStep:
    """A step whose mini-batch is checked and cut. Raises ``BatchError`` or ``OptionError``, and changes nothing."""
    inputs = StepInputs.prepare(parts, x, target, options)
    if tenancy.stages is None:
        return PreparedStep(inputs, tenancy)
    assert isinstance(tenancy.stages, RemoteStages)
    return RemoteStep(inputs, tenancy, tenancy.stages)
