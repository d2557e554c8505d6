"""Timelines of simulated steps, on one scale where they are to be compared."""

from __future__ import annotations

from asyncpipe.core.graph.lower import lower
from asyncpipe.core.predict.costs import Costs
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.observe.pictures.svg import common_scale, svg_timeline

__all__ = ["schedules"]

COMPARED = ("gpipe", "1f1b", "zb-h1")
COSTS = Costs(forward=1, backward=2, input_gradient=1, weight_gradient=1)


def schedules() -> dict[str, str]:
    """The same step by three schedules: 4 stages, 8 micro-batches, a backward twice as long as a forward."""
    shape = Shape(stages=4, microbatches=8, devices=4)
    records = {name: simulate(lower(find_schedule(name), shape), COSTS) for name in COMPARED}
    scale = common_scale([*records.values()])
    return {
        f"schedule-{name}": svg_timeline(record, title=name, virtual=True, scale=scale, arrows=False)
        for name, record in records.items()
    }
