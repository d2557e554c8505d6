"""Large graphs: seconds to lower them from a schedule, and to simulate them."""

from __future__ import annotations

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.harness import markdown, seconds_of
from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule

__all__ = ["run", "show"]


def run(progress: Progress, *, stages: int = 64, microbatches: tuple[int, ...] = (128, 256, 512, 1024)) -> Figures:
    """A row for each number of micro-batches."""
    return {"stages": stages, "graphs": [_graph(stages, count, progress) for count in microbatches]}


show = markdown(graphs="1f1b on {stages} stages, recomputed except the last micro-batch:")


def _graph(stages: int, microbatches: int, progress: Progress) -> Figures:
    progress(f"{stages} stages × {microbatches} micro-batches")
    shape, graphs = Shape(stages, microbatches, stages), list[TaskGraph]()
    mode = CheckpointMode.EXCEPT_LAST
    lowered = seconds_of(lambda: graphs.append(lower(find_schedule("1f1b"), shape, checkpoint=mode)))
    times = {"lowered_seconds": lowered, "simulated_seconds": seconds_of(lambda: simulate(graphs[0]))}
    us = {f"us_a_{name.replace('seconds', 'task')}": 1e6 * each / len(graphs[0].tasks) for name, each in times.items()}
    return {"microbatches": microbatches, "tasks": len(graphs[0].tasks), **times, **us}
