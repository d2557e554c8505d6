"""``asyncpipe simulate``: the time and memory of a step, by running the real scheduler in virtual time."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from asyncpipe.cli.arguments import add_command
from asyncpipe.cli.step_options import (
    SCHEDULE_HELP,
    add_costs_argument,
    add_stages_argument,
    add_step_arguments,
    counted,
    headline,
    shape_of,
    spelled,
)
from asyncpipe.cli.tables import table
from asyncpipe.core.engine.events import StepRecord
from asyncpipe.core.graph.lower import CheckpointMode, lower
from asyncpipe.core.graph.task import Task
from asyncpipe.core.graph.task_graph import TaskGraph, Wiring
from asyncpipe.core.predict.balance import even_balance
from asyncpipe.core.predict.costs import Jitter, parse_costs
from asyncpipe.core.predict.memory import StageMemory, format_bytes, peak_memory
from asyncpipe.core.predict.report import peak_per_device, report
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import OptionError

if TYPE_CHECKING:
    from asyncpipe.cli.arguments import Subparsers

__all__ = ["add_parser"]

TRACE_UNIT = 1e-3
"""Seconds in a trace for each unit of --costs: with milliseconds, it resembles the trace of a real step."""

DESCRIPTION = """\
Simulate one step of a schedule and print how long it takes, how long each device is idle and how many micro-batches
it holds at most.

The scheduler is the one that runs real steps; time is virtual. Nothing is trained and no device is used.
"""

EPILOG = """\
what it prints:
  makespan  virtual time from the start of the step to its end, in the unit of --costs (seconds with --profile)
  bubble    the part of the makespan in which the device computes nothing
  peak      the most micro-batches that the device holds at a time; each of its v stages counts 1/v
  memory    the most bytes that the device holds at a time (with --profile; includes parameters and
            gradients, but no optimizer state)

what --trace writes:
  the step in Chrome's trace format, like the traces of real steps; open it in https://ui.perfetto.dev.
  A unit of --costs is shown as 1 ms. With --profile times are the predicted seconds, and each device's
  predicted memory is a counter. With --repeat it is the step of the first seed.

examples:
  asyncpipe simulate 1f1b --stages 4 --microbatches 8 --costs F=1,I=1,W=1,C=0
  asyncpipe simulate interleaved --stages 8 --virtual 2 --microbatches 8 --costs F=1,B=2,C=0.1 --json
  asyncpipe simulate 1f1b --order hint --stages 4 --microbatches 16 --jitter 0.3 --repeat 40
  asyncpipe simulate zb-h1 --stages 4 --microbatches 8 --trace step.json
  asyncpipe simulate my_package.schedules:Mine --stages 4 --microbatches 8
  asyncpipe simulate 1f1b --stages 3 --microbatches 8 --profile model.json --balance 3,5,2 --checkpoint always
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add ``simulate`` to the command line."""
    summary = "predict the time and memory of a step"
    parser = add_command(subparsers, "simulate", summary=summary, description=DESCRIPTION, examples=EPILOG)
    parser.add_argument("name", metavar="NAME", help=SCHEDULE_HELP)
    add_stages_argument(parser, required=True)
    add_step_arguments(parser)
    costs = parser.add_mutually_exclusive_group()
    add_costs_argument(costs)
    costs.add_argument(
        "--profile", type=Path, metavar="FILE", help="use the costs and sizes in a file of 'asyncpipe profile'"
    )
    parser.add_argument(
        "--balance", metavar="3,5,2", help="layers of each stage (default: stages that take equally long)"
    )
    parser.add_argument(
        "--jitter",
        type=float,
        metavar="SIGMA",
        help="multiply each cost by a random factor of mean 1 and this standard deviation",
    )
    parser.add_argument(
        "--jitter-per",
        choices=["task", "microbatch"],
        default="task",
        help="draw a factor for each task (default), or for each micro-batch, as if their sizes varied",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the random factors (default: 0)")
    parser.add_argument(
        "--repeat", type=int, default=1, metavar="K", help="simulate K seeds, starting at N, and print means"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a trace of the step, for Perfetto; 1 unit of --costs is 1 ms"
    )
    parser.set_defaults(run=_simulate)


@dataclass(frozen=True, slots=True)
class _CostModel:
    """The costs of a step's tasks in time and, if measured, in bytes."""

    costs: Callable[[Task], float]
    label: str
    wiring: Wiring | None = None
    memory: StageMemory | None = None
    overhead: float | None = None
    """Seconds of a step outside its tasks: before the first and after the last one."""
    unit: float = 1.0
    """Seconds in a trace for each unit of the costs."""


def _simulate(args: argparse.Namespace) -> int:
    model = _cost_model(args)
    models = _jittered(model.costs, args)
    schedule = find_schedule(args.name, order=args.order)
    shape = shape_of(schedule, args.stages, args.microbatches, args.virtual)
    graph = lower(schedule, shape, checkpoint=CheckpointMode.parse(args.checkpoint), wiring=model.wiring)
    found = _summary([_run(graph, costs, model.memory) for costs in models])
    if model.overhead is not None:
        found["step_seconds"] = found["makespan"] + model.overhead
    if args.trace is not None:
        _write_trace(simulate(graph, models[0]), model, args.trace)
        found["trace"] = str(args.trace)
    if args.json:
        asked = {
            "schedule": graph.schedule,
            "stages": shape.stages,
            "devices": shape.devices,
            "microbatches": shape.microbatches,
            "checkpoint": args.checkpoint,
        }
        print(json.dumps({**found, **asked}))
        return 0
    jitter = "" if args.jitter is None else f", jitter {args.jitter:g} per {args.jitter_per}"
    print(f"{headline(graph, args.checkpoint)}, {model.label}{jitter}\n")
    print(_device_table(graph, found) + "\n")
    print(_last_line(found))
    if args.trace is not None:
        print(f"trace: {args.trace} (open it in https://ui.perfetto.dev)")
    return 0


def _write_trace(record: StepRecord, model: _CostModel, path: Path) -> None:
    from asyncpipe.observe.pictures.trace import write_trace

    try:
        write_trace([record], path, memory=model.memory, unit=model.unit)
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error.strerror or error}") from error


def _cost_model(args: argparse.Namespace) -> _CostModel:
    if args.profile is None:
        if args.balance is not None:
            raise OptionError("--balance splits the layers of a profile; give --profile FILE with it")
        costs = parse_costs(args.costs)
        return _CostModel(costs, f"costs {spelled(costs)}", unit=TRACE_UNIT)
    from asyncpipe.core.predict.layer_profile import Profile

    profile = Profile.read(args.profile)
    checkpoint = CheckpointMode.parse(args.checkpoint)
    if args.balance is None:
        balance = even_balance(profile.layer_seconds(args.microbatches, checkpoint), args.stages)
    else:
        balance = _balance(args.balance, args.stages)
    return _CostModel(
        costs=profile.costs(balance, args.microbatches, checkpoint),
        label=f"costs of {args.profile}, balance {','.join(map(str, balance))}",
        wiring=profile.wiring(balance),
        memory=profile.memory(balance, args.microbatches),
        overhead=profile.measurement(args.microbatches).step,
    )


def _balance(text: str, stages: int) -> list[int]:
    """Parse ``3,5,2``: the layers of each stage."""
    try:
        balance = [int(count) for count in text.split(",")]
    except ValueError:
        balance = []
    if len(balance) != stages:
        wanted = counted(stages, "stage")
        raise OptionError(f"--balance must be the number of layers of each of {wanted}, as 3,5,2 for 3, got {text!r}")
    return balance


def _jittered(costs: Callable[[Task], float], args: argparse.Namespace) -> list[Callable[[Task], float]]:
    """The cost model of each simulated run."""
    if args.repeat < 1:
        raise OptionError(f"--repeat must be a positive integer, got {args.repeat}")
    if args.jitter is None:
        if args.repeat > 1:
            raise OptionError("--repeat without random factors simulates the same step again; give --jitter with it")
        return [costs]
    per_microbatch = args.jitter_per == "microbatch"
    return [Jitter(costs, args.jitter, args.seed + k, per_microbatch) for k in range(args.repeat)]


def _run(graph: TaskGraph, costs: Callable[[Task], float], memory: StageMemory | None) -> dict[str, Any]:
    """The figures of one simulated run: lists are by device, ``peak_in_flight`` by stage."""
    record = simulate(graph, costs)
    found = report(record)
    return {
        "makespan": found.seconds,
        "critical_path": found.critical_path,
        "bubble": [max(0.0, 1.0 - busy) if found.seconds else 0.0 for busy in found.device_utilization.values()],
        "peak": peak_per_device(found, graph),
        "peak_in_flight": found.peak_in_flight,
        **({} if memory is None else {"memory": peak_memory(record, memory)}),
    }


def _summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means of times and shares over the runs, and the maximum of their peaks, ready for ``json.dumps``."""
    columns = {name: [run[name] for run in runs] for name in runs[0]}
    found: dict[str, Any] = {name: fmean(columns.pop(name)) for name in ("makespan", "critical_path")}
    for name, rows in columns.items():
        merge = fmean if name == "bubble" else max
        found[name] = [merge(values) for values in zip(*rows, strict=True)]
    found["bubble_ratio"] = fmean(found["bubble"])
    if len(runs) > 1:
        found["makespans"] = [run["makespan"] for run in runs]
    return found


def _device_table(graph: TaskGraph, found: dict[str, Any]) -> str:
    """A row for each device: its stages and its figures."""
    head = ["device", "stages", "bubble", "peak", *(["memory"] if "memory" in found else [])]
    rows = []
    for device, name in enumerate(graph.devices):
        stages = " ".join(str(stage) for stage, at in enumerate(graph.placement) if at == device)
        memory = [format_bytes(found["memory"][device])] if "memory" in found else []
        rows.append([name, stages, f"{found['bubble'][device]:.1%}", f"{found['peak'][device]:g}", *memory])
    return table(head, rows, numbers=head[2:])


def _last_line(found: dict[str, Any]) -> str:
    line = f"makespan {found['makespan']:.6g}, bubble {found['bubble_ratio']:.1%}"
    if "step_seconds" in found:
        line += f", whole step {found['step_seconds']:.6g} s"
    makespans = found.get("makespans")
    if makespans is None:
        return line
    spread = f"{min(makespans):.6g} to {max(makespans):.6g}, deviation {pstdev(makespans):.3g}"
    return f"{line} (means of {len(makespans)} runs; makespan {spread})"
