"""Simulate the time and memory of a step.

Simulate one step of a schedule and print how long it takes, how long each device is idle and how many micro-batches
it holds at most. With --steps, simulate steps that overlap, as pipe.steps(...) runs them, and print also how soon one
follows the other.

The scheduler is the one that runs real steps; time is virtual. Nothing is trained and no device is used.

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
  asyncpipe simulate 1f1b --stages 4 --microbatches 8 --replicas 2 --costs F=1,B=2,A=1.5,G=0.5 --svg step.svg
  asyncpipe simulate my_package.schedules:Mine --stages 4 --microbatches 8
  asyncpipe simulate 1f1b --stages 3 --microbatches 8 --profile model.json --balance 3,5,2 --checkpoint always
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from asyncpipe.cli.arguments import add_command, count, counts, natural, writing
from asyncpipe.cli.step_options import (
    COSTS,
    SCHEDULE_HELP,
    STAGES_HELP,
    add_step_arguments,
    counted,
    headline,
    in_rows,
    shape_of,
    spelled,
)
from asyncpipe.cli.tables import table, terminal_width
from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.offload import check_offload
from asyncpipe.core.graph.task import Task
from asyncpipe.core.graph.task_graph import TaskGraph, Wiring
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.balance import even_balance
from asyncpipe.core.predict.costs import Jitter, parse_costs
from asyncpipe.core.predict.memory import StageMemory, format_bytes, peak_memory
from asyncpipe.core.predict.report import link_waits, peak_per_device, report, reports, steady_state
from asyncpipe.core.predict.simulate import simulate, simulate_steps
from asyncpipe.core.predict.topology import TopologyCosts
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import OptionError

if TYPE_CHECKING:
    from asyncpipe.cli.arguments import Subparsers

__all__ = ["add_parser"]

TRACE_UNIT = 1e-3
"""Seconds in a trace for each unit of --costs: with milliseconds, it resembles the trace of a real step."""


def add_parser(subparsers: Subparsers) -> None:
    """Add ``simulate`` to the command line."""
    parser = add_command(subparsers, "simulate", __doc__)
    add = parser.add_argument
    add("name", metavar="NAME", help=SCHEDULE_HELP)
    add("--stages", type=count, required=True, metavar="P", help=STAGES_HELP)
    add_step_arguments(parser)
    costs = parser.add_mutually_exclusive_group()
    costs.add_argument("--costs", **COSTS)
    text = "use the costs and sizes in a file of 'asyncpipe profile'"
    costs.add_argument("--profile", type=Path, metavar="FILE", help=text)
    add("--balance", type=counts, metavar="3,5,2", help="layers of each stage (default: stages that take equally long)")
    text = "the fraction of micro-batches that are offloaded to the host, or with commas that of each stage"
    add("--offload", type=_fractions, default=[], metavar="0.5", help=text)
    text = "multiply each cost by a random factor of mean 1 and this standard deviation"
    add("--jitter", type=float, metavar="SIGMA", help=text)
    text = "draw a factor for each task (default), or for each micro-batch, as if their sizes varied"
    add("--jitter-per", choices=["task", "microbatch"], default="task", help=text)
    add("--seed", type=int, default=0, metavar="N", help="seed of the random factors (default: 0)")
    add("--repeat", type=count, metavar="K", help="simulate K seeds, starting at N, and print means")
    text = "simulate N steps that overlap, and show their steady state and timeline"
    add("--steps", type=count, metavar="N", help=text)
    text = "steps that are submitted behind the one under way (default: 1); 0: each waits for the end of the other"
    add("--ahead", type=natural, metavar="A", help=text)
    add("--topology", type=Path, metavar="FILE.toml", help="hosts, devices and links to run it on")
    add("--sent", type=natural, metavar="BYTES", help="size of a message (with --topology; default: 0)")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    text = "write a trace of the step, for Perfetto; 1 unit of --costs is 1 ms"
    add("--trace", type=Path, metavar="FILE", help=text)
    add("--svg", type=Path, metavar="FILE", help="write the timeline of the step, or of all, as a picture")
    parser.set_defaults(run=_simulate)


def _fractions(text: str) -> list[float]:
    try:
        return [float(each) for each in text.split(",")]
    except ValueError:
        rule = "takes a fraction from 0 to 1, or one for each stage"
        raise argparse.ArgumentTypeError(f"{rule}, got {text!r}") from None


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
    buckets: Sequence[int] = ()
    """The number of each stage, if it was measured."""


NEEDS = {
    "ahead": ("steps", "--ahead says how steps overlap; give --steps N with it"),
    "sent": ("topology", "--sent is for a step on hosts; give --topology FILE with it"),
    "balance": ("profile", "--balance splits the layers of a profile; give --profile FILE with it"),
    "repeat": ("jitter", "--repeat without random factors simulates the same step again; give --jitter with it"),
}
"""Options that say nothing without another one, and what is said then."""


def _check(args: argparse.Namespace) -> None:
    """Raise ``OptionError`` for options that do not go together."""
    for option, (other, text) in NEEDS.items():
        if getattr(args, option) is not None and getattr(args, other) is None:
            raise OptionError(text)
    if args.sent is not None and args.profile is not None:
        raise OptionError("--sent goes with --costs; a profile says what layers send")
    if args.steps == 1:
        raise OptionError("--steps must be 2 or more, since a steady state shows between two steps, got 1")
    if args.balance is not None and len(args.balance) != args.stages:
        wanted, given = counted(args.stages, "stage"), ",".join(map(str, args.balance))
        raise OptionError(f"--balance must be the number of layers of each of {wanted}, as 3,5,2 for 3, got {given}")


def _simulate(args: argparse.Namespace) -> int:
    _check(args)
    schedule = find_schedule(args.name, order=args.order)
    shape = shape_of(schedule, args.stages, args.microbatches, args.virtual)
    model = _cost_model(args, schedule.placement(shape))
    shape, wiring = in_rows(shape, args, model.wiring, model.buckets)
    models, names = _jittered(model.costs, args), None
    if args.topology is not None:
        from asyncpipe.cli.prediction_files import read_topology

        topology = read_topology(args.topology)
        names = topology.first_devices(shape.devices)
        models = [TopologyCosts(each, topology, model.sizes) for each in models]
    checkpoint = CheckpointMode.parse(args.checkpoint)
    given = args.offload if len(args.offload) != 1 else args.offload[0]
    offload = check_offload(given, args.stages) * args.replicas if args.offload else ()
    graph = lower(schedule, shape, devices=names, checkpoint=checkpoint, wiring=wiring, offload=offload)
    steps, ahead = args.steps or 1, 1 if args.ahead is None else args.ahead
    found = _summary([_run(graph, costs, model.memory, steps, ahead) for costs in models])
    if model.overhead is not None:
        found["step_seconds"] = found["makespan"] + model.overhead
    title = f"{headline(graph, args.checkpoint)}, {model.label}"
    records = simulate_steps(graph, models[0], steps=steps, ahead=ahead if steps > 1 else 0)
    if args.trace is not None:
        from asyncpipe.observe.pictures.trace import write_trace

        with writing(args.trace):
            write_trace(records, args.trace, memory=model.memory, unit=model.unit)
        found["trace"] = str(args.trace)
    if args.svg is not None:
        from asyncpipe.observe.pictures.svg import svg_timeline

        with writing(args.svg):
            args.svg.write_text(svg_timeline(records, title=title, virtual=model.virtual), encoding="utf-8")
        found["svg"] = str(args.svg)
    if args.json:
        asked = {"schedule": graph.schedule, "stages": shape.stages, "devices": shape.devices}
        asked |= {"microbatches": shape.microbatches, "checkpoint": args.checkpoint, "replicas": args.replicas}
        print(json.dumps({**found, **asked}))
        return 0
    jitter = "" if args.jitter is None else f", jitter {args.jitter:g} per {args.jitter_per}"
    print(f"{title}{jitter}\n\n{_device_table(graph, found)}\n\n{_last_line(found)}")
    if args.steps is not None:
        from asyncpipe.observe.pictures.timeline import text_timeline

        print(f"\n{text_timeline(records, terminal_width(), virtual=model.virtual)}", end="")
    if args.trace is not None:
        print(f"trace: {args.trace} (open it in https://ui.perfetto.dev)")
    if args.svg is not None:
        print(f"picture: {args.svg}")
    return 0


def _cost_model(args: argparse.Namespace, placement: Sequence[int]) -> _CostModel:
    if args.profile is None:
        costs, sent = parse_costs(args.costs), args.sent or 0
        return _CostModel(
            costs,
            f"costs {spelled(costs)}",
            unit=TRACE_UNIT,
            sizes=lambda task: sent if task.kind is TaskKind.COPY else 0,
        )
    from asyncpipe.cli.prediction_files import read_profile

    profile = read_profile(args.profile)
    checkpoint = CheckpointMode.parse(args.checkpoint)
    pieces, rows = args.microbatches * args.replicas, args.replicas
    balance = args.balance or even_balance(profile.layer_seconds(pieces, checkpoint), args.stages)
    shards: bool = args.shard_optimizer
    measured = profile.costs(balance, pieces, checkpoint, placement, replicas=rows, shards=shards)
    return _CostModel(
        costs=measured,
        label=f"costs of {args.profile}, balance {','.join(map(str, balance))}",
        wiring=profile.wiring(balance, placement),
        buckets=[*map(len, profile.buckets(balance))],
        memory=profile.memory(balance, pieces, placement=placement),
        overhead=profile.measurement(pieces).step,
        virtual=False,
        sizes=measured.size,
    )


def _jittered(costs: Callable[[Task], float], args: argparse.Namespace) -> list[Callable[[Task], float]]:
    """The cost model of each simulated run."""
    if args.jitter is None:
        return [costs]
    per_microbatch = args.jitter_per == "microbatch"
    return [Jitter(costs, args.jitter, args.seed + k, per_microbatch) for k in range(args.repeat or 1)]


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
    columns: dict[str, tuple[str, Callable[[float], str]]] = {
        "bubble": ("bubble", "{:.1%}".format),
        "steady": ("steady_bubble", "{:.1%}".format),
        "waits for links": ("waits", "{:.1%}".format),
        "peak": ("peak", "{:g}".format),
        "memory": ("memory", format_bytes),
    }
    shown = {head: (found[key], form) for head, (key, form) in columns.items() if key in found}
    rows = [
        [name, " ".join(str(stage) for stage, at in enumerate(graph.placement) if at == device)]
        + [form(values[device]) for values, form in shown.values()]
        for device, name in enumerate(graph.devices)
    ]
    return table(["device", "stages", *shown], rows, numbers=shown)


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
