"""Whether steps of a pipeline may be under way at once: only if all that a step leaves behind is made by its tasks."""

from __future__ import annotations

from torch import nn

from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.ops.execute.host_optimizer import updated_by
from asyncpipe.pipeline.build import PipelineParts
from asyncpipe.pipeline.pool import Tenancy

__all__ = ["why_alone"]


def why_alone(parts: PipelineParts, tenancy: Tenancy, graph: TaskGraph, *, training: bool) -> str | None:
    """Why steps of ``graph`` cannot be under way together; ``None`` if they can."""
    if parts.factory is not None and parts.factory.group > 1:
        return "the workers that share a stage take its collectives in the order of one step"
    if graph.rule is not None:
        return "the schedule decides as it goes what comes next"
    if parts.resources.ties.links:
        return "stages on several devices share parameters or buffers"
    if parts.deferred:
        return "deferred batch norms count whole mini-batches"
    if not tenancy.pool.has_built_in_policies:
        return "the devices have a policy that is not built in"
    if not training:
        return None
    rows = graph.rows
    if 0 in rows.microbatches:
        # Nothing of the next step waits until such a replica has read the sums, and what others have updated.
        return "a replica has no micro-batch"
    chain = {(stage, stage + 1) for stage in range(graph.shape.stages) if not rows.is_last(stage)}
    if not chain <= set(graph.wiring.links):
        return "not every stage gets values from the one before it"
    updated = _updated(parts, graph)
    loss = parts.options.loss_fn
    others = loss.parameters() if isinstance(loss, nn.Module) else ()
    # Parameters of the loss have an optimizer of the caller's, which runs between two steps.
    if any(p.requires_grad for p in others) or any(
        id(p) not in updated for p in parts.module.parameters() if p.requires_grad
    ):
        return "the pipeline does not have the optimizers of all parameters that train"
    return None


def _updated(parts: PipelineParts, graph: TaskGraph) -> set[int]:
    """The parameters, by ``id``, that the optimizers of ``graph`` have."""
    optimizers, stages = parts.resources.optimizers, parts.resources.stages
    updated: set[int] = set()
    for stage in graph.wiring.updates:
        if stages[stage].device.is_elsewhere:
            # Its optimizer is made there, of all that train when the pipeline is made.
            updated.update(map(id, stages[stage].module.parameters()))
            continue
        updated.update(map(id, updated_by(optimizers[stage])))
    return updated
