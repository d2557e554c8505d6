"""What a pipeline shows of itself: a text, and in notebooks HTML with a picture."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.observe.pictures.svg import svg_timeline
from asyncpipe.pipeline.build import PipelineParts

__all__ = ["MOST_TASKS", "pipeline_html", "pipeline_text"]

MOST_TASKS = 4000
"""A picture of more is slow to draw, and too fine to read."""


def pipeline_text(parts: PipelineParts, graph: TaskGraph) -> str:
    """A line about the whole, and one for each stage: its device and its parameters."""
    rows = [f"  stage {stage}  {device}  {size} parameters" for stage, device, size in _stages(parts, graph)]
    return "\n".join([f"Pipeline: {_summary(parts, graph)}", *rows])


def pipeline_html(parts: PipelineParts, graph: TaskGraph) -> str:
    """As the text, with the timeline of a step whose stages all take equally long."""
    rows = "".join(f"<tr><td>{s}<td>{escape(d)}<td align=right>{size}" for s, d, size in _stages(parts, graph))
    table = f"<table><tr><th>stage<th>device<th>parameters{rows}</table>"
    picture = ""
    if len(graph.tasks) <= MOST_TASKS:
        record = simulate(graph)
        picture = svg_timeline(record, title="if all stages take equally long", virtual=True)
    return f"<p><b>Pipeline</b>: {escape(_summary(parts, graph))}</p>{table}{picture}"


def _summary(parts: PipelineParts, graph: TaskGraph) -> str:
    options = parts.options
    replicas = f" in each of {options.replicas} replicas" if options.replicas > 1 else ""
    cut = f"{parts.stages_per_row} stages{replicas} on {len(graph.devices)} devices"
    return f"{cut}, {parts.graphs.schedule.name}, {options.microbatches} micro-batches, checkpoint {parts.checkpoint}"


def _stages(parts: PipelineParts, graph: TaskGraph) -> Sequence[tuple[int, str, str]]:
    return [
        (number, graph.devices[device], f"{sum(each.numel() for each in stage.module.parameters()):,}")
        for number, (stage, device) in enumerate(zip(parts.resources.stages, graph.placement, strict=True))
    ]
