"""What slack is worth: schedules under jitter and slow copies, simulated and run on devices that sleep.

Cleverness at equal memory gains little when times vary; micro-batches in flight do. Both arms of a comparison see
the same random times, since these depend on the action and a seed alone. The real runs go through the whole
pipeline: four emulated devices, whose tasks take as long as the cost model says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from statistics import fmean, median

import torch
from torch import nn

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.rounds import drop_gradients
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task import Task
from asyncpipe.core.predict.costs import Costs, Jitter
from asyncpipe.core.predict.report import report
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.schedules.backward_first import BackwardFirst
from asyncpipe.core.schedules.protocol import Schedule, Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.pipeline.pipeline import Pipeline
from asyncpipe.runtime.portal import new_event_loop
from asyncpipe.testing import EmulatedExecutor

__all__ = ["run", "show"]

DEVICES, MICROBATCHES = 4, 16
SEEDS = 40
ROUNDS = 9
UNIT = 0.01
"""Real seconds of a forward."""
CostModel = Callable[[Task], float]

SCENARIOS: dict[str, Callable[[int], CostModel]] = {
    "uniform": lambda seed: Costs(1, 2),
    "jitter": lambda seed: Jitter(Costs(1, 2), 0.3, seed),
    "lengths": lambda seed: Jitter(Costs(1, 2), 0.6, seed, per_microbatch=True),
    "copies": lambda seed: Costs(1, 2, copy=1),
}
TITLES = {
    "uniform": "uniform times",
    "jitter": "jitter, sigma 0.3",
    "lengths": "micro-batch lengths, sigma 0.6",
    "copies": "copies as long as a forward",
}


def schedules() -> dict[str, Schedule]:
    """The schedules that are compared."""
    return {
        "1f1b": find_schedule("1f1b"),
        "1f1b as hint": find_schedule("1f1b", order="hint"),
        "backward-first": BackwardFirst(),
        "eager-1f1b": find_schedule("eager-1f1b"),
        "eager-1f1b as hint": find_schedule("eager-1f1b", order="hint"),
    }


def run(progress: Progress) -> Figures:
    """Mean makespans of the simulations, and median seconds of the real steps, by scenario and schedule."""
    progress(f"simulating {SEEDS} seeds")
    simulated = {scenario: _simulated(scenario) for scenario in SCENARIOS}
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        measured = runner.run(_measured(progress))
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
        "seeds": SEEDS,
        "rounds": ROUNDS,
        "unit_seconds": UNIT,
    }


def show(figures: Figures) -> str:
    """Both tables, and what eager 1F1B gains over 1F1B."""
    names = list(schedules())
    width = max(map(len, TITLES.values()))
    head = " ".join(f"{name:>18}" for name in names)
    lines = [f"{figures['devices']} devices, {figures['microbatches']} micro-batches, t_F = 1, t_B = 2"]
    for kind, unit in (("simulated", 1.0), ("measured", figures["unit_seconds"])):
        how = f"mean of {figures['seeds']} seeds" if kind == "simulated" else f"median of {figures['rounds']} steps"
        lines += ["", f"{kind}: {how}, in units of a forward".ljust(width), f"{'':{width}} {head}"]
        for scenario, row in figures[kind].items():
            times = " ".join(f"{row[name] / unit:18.1f}" for name in names)
            lines.append(f"{TITLES[scenario]:{width}} {times}")
    lines += ["", "1f1b over eager-1f1b".ljust(width) + "  simulated  measured"]
    for scenario, gain in figures["gain"].items():
        lines.append(f"{TITLES[scenario]:{width}}  {gain['simulated']:8.2f}× {gain['measured']:8.2f}×")
    return "\n".join(lines)


def _simulated(scenario: str) -> dict[str, float]:
    shape = Shape(DEVICES, MICROBATCHES, DEVICES)
    graphs = {name: lower(schedule, shape) for name, schedule in schedules().items()}
    costs = [SCENARIOS[scenario](seed) for seed in range(SEEDS)]
    return {name: fmean(report(simulate(graph, cost)).seconds for cost in costs) for name, graph in graphs.items()}


async def _measured(progress: Progress) -> dict[str, dict[str, float]]:
    """One pipeline, whose schedule changes from step to step: arms alternate and see the same seeds."""
    cost: list[CostModel] = [Costs()]

    def seconds(task: Task) -> float:
        return UNIT * cost[0](task)

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
        for scenario, make in SCENARIOS.items():
            progress(f"running steps: {TITLES[scenario]}")
            for seed in range(ROUNDS):
                cost[0] = make(seed)
                for name, schedule in schedules().items():
                    pipe.change_schedule(schedule)
                    result = await pipe.step(x, x, return_outputs=False)
                    await result.completed()
                    times[scenario][name].append(result.report.seconds)
                    drop_gradients(model)
    return {scenario: {name: median(row) for name, row in rows.items()} for scenario, rows in times.items()}
