"""The value of slack: schedules under jitter and slow copies, simulated and run on emulated devices.

When times vary, a smarter order at equal memory gains little, while more micro-batches in flight gain much. All arms
see the same random times, which depend only on the action and a seed. The measured steps run through the whole
pipeline: four emulated devices, whose tasks take the time that the cost model says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median

import torch
from torch import nn

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.harness import run_on_loop, table
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task import Task
from asyncpipe.core.predict.costs import Costs, Jitter
from asyncpipe.core.predict.report import report
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.schedules.backward_first import BackwardFirst
from asyncpipe.core.schedules.protocol import Schedule, Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.pipeline.pipeline import Pipeline
from asyncpipe.testing import EmulatedExecutor

__all__ = ["SlackSize", "run", "show"]

DEVICES, MICROBATCHES = 4, 16
CostModel = Callable[[Task], float]

SCENARIOS: dict[str, tuple[str, Callable[[int], CostModel]]] = {
    "uniform": ("uniform times", lambda seed: Costs(1, 2)),
    "jitter": ("jitter, sigma 0.3", lambda seed: Jitter(Costs(1, 2), 0.3, seed)),
    "lengths": ("micro-batch lengths, sigma 0.6", lambda seed: Jitter(Costs(1, 2), 0.6, seed, per_microbatch=True)),
    "copies": ("copies as long as a forward", lambda seed: Costs(1, 2, copy=1)),
}
"""The titles of the scenarios, and their cost models by seed."""


@dataclass(frozen=True, slots=True)
class SlackSize:
    """How often each schedule is simulated and run."""

    seeds: int = 40
    """Simulations."""
    rounds: int = 9
    """Measured steps."""
    unit: float = 0.01
    """Real seconds of a forward in a measured step."""


def schedules() -> dict[str, Schedule]:
    """The schedules that are compared."""
    return {
        "1f1b": find_schedule("1f1b"),
        "1f1b as hint": find_schedule("1f1b", order="hint"),
        "backward-first": BackwardFirst(),
        "eager-1f1b": find_schedule("eager-1f1b"),
        "eager-1f1b as hint": find_schedule("eager-1f1b", order="hint"),
    }


def run(progress: Progress, *, size: SlackSize | None = None) -> Figures:
    """Mean makespans of the simulations, and median seconds of the measured steps, by scenario and schedule."""
    size = size or SlackSize()
    progress(f"simulating {size.seeds} seeds")
    simulated = {scenario: _simulated(scenario, size.seeds) for scenario in SCENARIOS}
    measured = run_on_loop(_measured(progress, size))
    return {
        "simulated": simulated,
        "measured": measured,
        "gain": {
            scenario: {
                "simulated": simulated[scenario]["1f1b"] / simulated[scenario]["eager-1f1b"],
                "measured": measured[scenario]["1f1b"] / measured[scenario]["eager-1f1b"],
            }
            for scenario in SCENARIOS
        },
        "devices": DEVICES,
        "microbatches": MICROBATCHES,
        "seeds": size.seeds,
        "rounds": size.rounds,
        "unit_seconds": size.unit,
    }


def show(figures: Figures) -> str:
    """Both tables, and what eager 1F1B gains over 1F1B."""
    names = list(schedules())
    lines = [f"{figures['devices']} devices, {figures['microbatches']} micro-batches, t_F = 1, t_B = 2"]
    for kind, unit in (("simulated", 1.0), ("measured", figures["unit_seconds"])):
        how = f"mean of {figures['seeds']} seeds" if kind == "simulated" else f"median of {figures['rounds']} steps"
        rows = [
            [SCENARIOS[scenario][0], *(f"{row[name] / unit:.1f}" for name in names)]
            for scenario, row in figures[kind].items()
        ]
        lines += ["", f"{kind}: {how}, in units of a forward", *table([["", *names], *rows])]
    gains = [
        [SCENARIOS[scenario][0], f"{gain['simulated']:.2f}×", f"{gain['measured']:.2f}×"]
        for scenario, gain in figures["gain"].items()
    ]
    return "\n".join([*lines, "", *table([["1f1b over eager-1f1b", "simulated", "measured"], *gains])])


def _simulated(scenario: str, seeds: int) -> dict[str, float]:
    shape = Shape(DEVICES, MICROBATCHES, DEVICES)
    graphs = {name: lower(schedule, shape) for name, schedule in schedules().items()}
    costs = [SCENARIOS[scenario][1](seed) for seed in range(seeds)]
    return {name: fmean(report(simulate(graph, cost)).seconds for cost in costs) for name, graph in graphs.items()}


async def _measured(progress: Progress, size: SlackSize) -> dict[str, dict[str, float]]:
    """Median seconds of steps, all of one pipeline, whose schedule changes from step to step."""
    cost: list[CostModel] = [Costs()]

    def seconds(task: Task) -> float:
        return size.unit * cost[0](task)

    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(DEVICES)))
    x = torch.randn(MICROBATCHES, 4)
    times: dict[str, dict[str, list[float]]] = {scenario: {name: [] for name in schedules()} for scenario in SCENARIOS}
    async with Pipeline(
        model,
        [f"cpu:{device}" for device in range(DEVICES)],
        microbatches=MICROBATCHES,
        checkpoint="never",
        loss_fn=nn.functional.mse_loss,
        executors=lambda device: EmulatedExecutor(device, seconds),
    ) as pipe:
        for scenario, (title, make) in SCENARIOS.items():
            progress(f"running steps: {title}")
            for seed in range(size.rounds):
                cost[0] = make(seed)
                for name, schedule in schedules().items():
                    pipe.change_schedule(schedule)
                    result = await pipe.step(x, x, return_outputs=False)
                    await result.completed()
                    times[scenario][name].append(result.report.seconds)
                    model.zero_grad()
    return {scenario: {name: median(row) for name, row in rows.items()} for scenario, rows in times.items()}
