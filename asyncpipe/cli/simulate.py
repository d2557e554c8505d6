"""``asyncpipe simulate``: the time and memory of one step or several, by running the real scheduler in virtual time."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from asyncpipe.cli.arguments import add_command, natural
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
from asyncpipe.core.graph.lower import CheckpointMode, lower
from asyncpipe.core.graph.offload import check_offload
from asyncpipe.core.graph.task import Task
from asyncpipe.core.graph.task_graph import TaskGraph, Wiring
from asyncpipe.core.predict.balance import even_balance
from asyncpipe.core.predict.costs import Jitter, parse_costs
from asyncpipe.core.predict.memory import StageMemory, format_bytes, peak_memory
from asyncpipe.core.predict.report import link_waits, peak_per_device, report, reports, steady_state
from asyncpipe.core.predict.simulate import simulate, simulate_steps
from asyncpipe.core.predict.topology import Topology, TopologyCosts
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import OptionError

if TYPE_CHECKING:
    from asyncpipe.cli.arguments import Subparsers

__all__ = ["add_parser"]

TRACE_UNIT = 1e-3
"""Seconds in a trace for each unit of --costs: with milliseconds, it resembles the trace of a real step."""

DESCRIPTION = """\
Simulate one step of a schedule and print how long it takes, how long each device is idle and how many micro-batches
it holds at most. With --steps, simulate steps that overlap, as pipe.steps(...) runs them, and print also how soon one
follows the other.

The scheduler is the one that runs real steps; time is virtual. Nothing is trained and no device is used.
"""

EPILOG = """\
what it prints:
  makespan  virtual time from the start of the step to its end, in the unit of --costs (seconds with --profile)
  bubble    the part of the makespan in which the device computes nothing
  peak      the most micro-batches that the device holds at a time; each of its v stages counts 1/v
  memory    the most bytes that the device holds at a time (with --profile; includes parameters and
            gradients, but no optimizer state)

what --steps adds:
  steady    the part of the time between the ends of two steps in which the device computes nothing
  steady state: a step every ...
            that time; the first step fills the pipeline, and only its end counts
  a timeline of the steps, with a bar where a device begins the next one. On a terminal it is scaled to fit
  Each device begins a step as soon as it has computed all of the one before; it need not wait for other devices. So a
  schedule whose devices are idle only at the ends of a step (zb-h2, zbv) has no bubble, and one whose first device
  begins and ends the step (gpipe, 1f1b) gains nothing. Steps of a schedule that decides by a rule do not overlap.

what --topology adds:
  The devices are the first ones of the file, which 'asyncpipe plan --help' describes; a copy is a message of --sent
  bytes on their links (with --profile: of the measured size), and C does not count. Costs are seconds on a device of
  speed 1. The table shows in what part of the step a device waits for links.

what --trace writes:
  the step, or all of --steps, in Chrome's trace format, like the traces of real steps; open it in https://ui.perfetto.dev.
  A unit of --costs is shown as 1 ms. With --profile times are the predicted seconds, and each device's
  predicted memory is a counter. With --repeat it is the step of the first seed.

examples:
  asyncpipe simulate 1f1b --stages 4 --microbatches 8 --costs F=1,I=1,W=1,C=0
  asyncpipe simulate interleaved --stages 8 --virtual 2 --microbatches 8 --costs F=1,B=2,C=0.1 --json
  asyncpipe simulate 1f1b --order hint --stages 4 --microbatches 16 --jitter 0.3 --repeat 40
  asyncpipe simulate zb-h1 --stages 4 --microbatches 8 --trace step.json
  asyncpipe simulate zb-h2 --stages 4 --microbatches 8 --steps 2 --svg steps.svg
  asyncpipe simulate 1f1b --stages 4 --microbatches 16 --costs F=0.01,B=0.02 --topology hosts.toml --sent 4000000
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
        "--offload",
        metavar="0.5",
        help="the fraction of micro-batches that are offloaded to the host, or with commas that of each stage",
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
    parser.add_argument(
        "--steps", type=int, metavar="N", help="simulate N steps that overlap, and show their steady state and timeline"
    )
    parser.add_argument(
        "--ahead",
        type=int,
        metavar="A",
        help="steps that are submitted behind the one under way (default: 1); 0: each waits for the end of the other",
    )
    parser.add_argument("--topology", type=Path, metavar="FILE.toml", help="hosts, devices and links to run it on")
    parser.add_argument("--sent", type=natural, metavar="BYTES", help="size of a message (with --topology; default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a trace of the step, for Perfetto; 1 unit of --costs is 1 ms"
    )
    parser.add_argument(
        "--svg", type=Path, metavar="FILE", help="write the timeline of the step, or of all, as a picture"
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
    virtual: bool = True
    """Whether the costs have a unit of their own."""
    sizes: Callable[[Task], float] | None = None
    """The bytes of messages, on a topology."""


def _offload(text: str | None, stages: int) -> tuple[float, ...]:
    """The fractions in ``--offload``, by stage."""
    if text is None:
        return ()
    try:
        given = [float(each) for each in text.split(",")]
    except ValueError:
        raise OptionError(f"--offload takes a fraction from 0 to 1, or one for each stage, got {text!r}") from None
    return check_offload(given if len(given) > 1 else given[0], stages)


def _simulate(args: argparse.Namespace) -> int:
    steps, ahead = _steps(args)
    topology = _topology(args)
    schedule = find_schedule(args.name, order=args.order)
    shape = shape_of(schedule, args.stages, args.microbatches, args.virtual)
    model = _cost_model(args, schedule.placement(shape))
    models = _jittered(model.costs, args)
    names = None
    if topology is not None:
        names = topology.first_devices(shape.devices)
        models = [TopologyCosts(each, topology, model.sizes) for each in models]
    checkpoint = CheckpointMode.parse(args.checkpoint)
    offload = _offload(args.offload, shape.stages)
    graph = lower(schedule, shape, devices=names, checkpoint=checkpoint, wiring=model.wiring, offload=offload)
    found = _summary([_run(graph, costs, model.memory, steps, ahead) for costs in models])
    if model.overhead is not None:
        found["step_seconds"] = found["makespan"] + model.overhead
    title = f"{headline(graph, args.checkpoint)}, {model.label}"
    records = simulate_steps(graph, models[0], steps=steps, ahead=ahead)
    if args.trace is not None:
        _write_trace(records, model, args.trace)
        found["trace"] = str(args.trace)
    if args.svg is not None:
        _write_picture(records, model, title, args.svg)
        found["svg"] = str(args.svg)
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
    print(f"{title}{jitter}\n")
    print(_device_table(graph, found) + "\n")
    print(_last_line(found))
    if args.steps is not None:
        print(_timeline(records, virtual=model.virtual), end="")
    if args.trace is not None:
        print(f"trace: {args.trace} (open it in https://ui.perfetto.dev)")
    if args.svg is not None:
        print(f"picture: {args.svg}")
    return 0


def _steps(args: argparse.Namespace) -> tuple[int, int]:
    """How many steps are asked for, and how many of them are submitted behind the one under way."""
    if args.steps is None:
        if args.ahead is not None:
            raise OptionError("--ahead says how steps overlap; give --steps N with it")
        return 1, 0
    if args.steps < 2:
        raise OptionError(f"--steps must be 2 or more, since a steady state shows between two steps, got {args.steps}")
    ahead = 1 if args.ahead is None else args.ahead
    if ahead < 0:
        raise OptionError(f"--ahead must not be negative, got {ahead}")
    return args.steps, ahead


def _topology(args: argparse.Namespace) -> Topology | None:
    """What is asked for; raises ``OptionError`` for ``--sent`` without it, or beside a profile."""
    if args.topology is None and args.sent:
        raise OptionError("--sent is for a step on hosts; give --topology FILE with it")
    if args.sent is not None and args.profile is not None:
        raise OptionError("--sent goes with --costs; a profile says what layers send")
    if args.topology is None:
        return None
    from asyncpipe.cli.prediction_files import read_topology

    return read_topology(args.topology)


def _timeline(records: Sequence[StepRecord], *, virtual: bool) -> str:
    from asyncpipe.observe.pictures.timeline import text_timeline

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return "\n" + text_timeline(records, width, virtual=virtual)


def _write_trace(records: Sequence[StepRecord], model: _CostModel, path: Path) -> None:
    from asyncpipe.observe.pictures.trace import write_trace

    try:
        write_trace(records, path, memory=model.memory, unit=model.unit)
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error.strerror or error}") from error


def _write_picture(records: Sequence[StepRecord], model: _CostModel, title: str, path: Path) -> None:
    from asyncpipe.observe.pictures.svg import svg_timeline

    try:
        path.write_text(svg_timeline(records, title=title, virtual=model.virtual), encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error.strerror or error}") from error


def _cost_model(args: argparse.Namespace, placement: Sequence[int]) -> _CostModel:
    if args.profile is None:
        if args.balance is not None:
            raise OptionError("--balance splits the layers of a profile; give --profile FILE with it")
        costs = parse_costs(args.costs)
        sent = args.sent or 0
        return _CostModel(costs, f"costs {spelled(costs)}", unit=TRACE_UNIT, sizes=lambda task: sent)
    from asyncpipe.cli.prediction_files import read_profile

    profile = read_profile(args.profile)
    checkpoint = CheckpointMode.parse(args.checkpoint)
    if args.balance is None:
        balance = even_balance(profile.layer_seconds(args.microbatches, checkpoint), args.stages)
    else:
        balance = _balance(args.balance, args.stages)
    measured = profile.costs(balance, args.microbatches, checkpoint, placement)
    return _CostModel(
        costs=measured,
        label=f"costs of {args.profile}, balance {','.join(map(str, balance))}",
        wiring=profile.wiring(balance, placement),
        memory=profile.memory(balance, args.microbatches, placement=placement),
        overhead=profile.measurement(args.microbatches).step,
        virtual=False,
        sizes=measured.size,
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


def _run(
    graph: TaskGraph, costs: Callable[[Task], float], memory: StageMemory | None, steps: int, ahead: int
) -> dict[str, Any]:
    """The figures of one simulated run: lists are by device, ``peak_in_flight`` by stage."""
    record = simulate(graph, costs)
    found = report(record)
    steady: dict[str, Any] = {}
    if steps > 1:
        state = steady_state(reports(simulate_steps(graph, costs, steps=steps, ahead=ahead)))
        steady = {"steady_seconds": state.seconds, "steady_bubble": [*state.device_bubble.values()]}
    return {
        "makespan": found.seconds,
        "critical_path": found.critical_path,
        "bubble": [max(0.0, 1.0 - busy) if found.seconds else 0.0 for busy in found.device_utilization.values()],
        "peak": peak_per_device(found, graph),
        "peak_in_flight": found.peak_in_flight,
        **({} if not found.arrived else {"waits": _shares(link_waits(found, graph).values(), found.seconds)}),
        **({} if memory is None else {"memory": peak_memory(record, memory)}),
        **steady,
    }


def _shares(seconds: Iterable[float], whole: float) -> list[float]:
    return [each / whole if whole else 0.0 for each in seconds]


def _summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means of times and shares over the runs, and the maximum of their peaks, ready for ``json.dumps``."""
    columns = {name: [run[name] for run in runs] for name in runs[0]}
    times = [name for name in ("makespan", "critical_path", "steady_seconds") if name in columns]
    found: dict[str, Any] = {name: fmean(columns.pop(name)) for name in times}
    for name, rows in columns.items():
        merge = fmean if name.endswith(("bubble", "waits")) else max
        found[name] = [merge(values) for values in zip(*rows, strict=True)]
    found |= {f"{name}_ratio": fmean(found[name]) for name in ("bubble", "steady_bubble") if name in found}
    if len(runs) > 1:
        found["makespans"] = [run["makespan"] for run in runs]
    return found


def _device_table(graph: TaskGraph, found: dict[str, Any]) -> str:
    """A row for each device: its stages and its figures."""
    steady = ["steady"] if "steady_bubble" in found else []
    waits = ["waits for links"] if "waits" in found else []
    head = ["device", "stages", "bubble", *steady, *waits, "peak", *(["memory"] if "memory" in found else [])]
    rows = []
    for device, name in enumerate(graph.devices):
        stages = " ".join(str(stage) for stage, at in enumerate(graph.placement) if at == device)
        memory = [format_bytes(found["memory"][device])] if "memory" in found else []
        bubbles = [f"{found[kind][device]:.1%}" for kind in ("bubble", "steady_bubble", "waits") if kind in found]
        rows.append([name, stages, *bubbles, f"{found['peak'][device]:g}", *memory])
    return table(head, rows, numbers=head[2:])


def _last_line(found: dict[str, Any]) -> str:
    line = f"makespan {found['makespan']:.6g}, bubble {found['bubble_ratio']:.1%}"
    if "step_seconds" in found:
        line += f", whole step {found['step_seconds']:.6g} s"
    if "steady_seconds" in found:
        line += f"; steady state: a step every {found['steady_seconds']:.6g}, bubble {found['steady_bubble_ratio']:.1%}"
    makespans = found.get("makespans")
    if makespans is None:
        return line
    spread = f"{min(makespans):.6g} to {max(makespans):.6g}, deviation {pstdev(makespans):.3g}"
    return f"{line} (means of {len(makespans)} runs; makespan {spread})"
