"""List schedules, or show a simulated step of one or several.

example:
  asyncpipe schedule show 1f1b --stages 4 --microbatches 8
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from asyncpipe.cli.arguments import add_command, count, writing
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
from asyncpipe.core.graph.export import to_dict, to_dot
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task_graph import Phase, TaskGraph
from asyncpipe.core.predict.costs import Costs, parse_costs
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.schedules.protocol import Schedule, Shape
from asyncpipe.core.schedules.registry import find_schedule, known_schedules
from asyncpipe.errors import OptionError

if TYPE_CHECKING:
    from asyncpipe.cli.arguments import Subparsers

__all__ = ["add_parser"]


def add_parser(subparsers: Subparsers) -> None:
    """Add ``schedule list`` and ``schedule show`` to the command's parser."""
    commands = add_command(subparsers, "schedule", __doc__).add_subparsers(
        title="commands", metavar="COMMAND", required=True
    )
    add_command(commands, "list", _list.__doc__).set_defaults(run=_list)
    show = add_command(commands, "show", _show.__doc__)
    show.add_argument("names", metavar="NAME", nargs="+", help=SCHEDULE_HELP)
    size = show.add_mutually_exclusive_group(required=True)
    size.add_argument("--stages", type=count, metavar="P", help=STAGES_HELP)
    size.add_argument("--devices", type=count, metavar="D", help="devices, each with the schedule's number of stages")
    add_step_arguments(show)
    show.add_argument("--forward-only", action="store_true", help="show a step without backward")
    show.add_argument("--costs", **COSTS)
    show.add_argument("--format", choices=FORMATS, default="text", help="default: text")
    show.add_argument("--output", type=Path, metavar="FILE", help="write to FILE instead of the standard output")
    show.set_defaults(run=_show)


def _list(args: argparse.Namespace) -> int:
    """List the known schedules."""
    summaries = ((type(find_schedule(name)).__doc__ or "").strip().partition("\n")[0] for name in known_schedules())
    print(table(("", ""), zip(known_schedules(), summaries, strict=True)))
    return 0


@dataclass(frozen=True, slots=True)
class _LoweredSchedule:
    """A schedule to show: lowered, with its costs and title."""

    schedule: Schedule
    graph: TaskGraph
    costs: Costs
    title: str


def _show(args: argparse.Namespace) -> int:
    """Simulate one step of a schedule, or of several, and show it.

    Lower schedules to their task graphs, simulate one step of each at the given costs and show it.

    Nothing is trained and no device is used: times are virtual, in the unit of --costs.

    formats:
      text   a timeline: a row a device, F0 the forward of micro-batch 0, B a backward, I and W its halves (input and
             weight gradients), R a recompute, dots where the device is idle; stage numbers follow (F0.4) if a
             device has several
      html   a page with a timeline and the figures of each schedule, on one time scale; open it in a browser
      svg    one timeline as a picture
      csv    the order in the notation of torch.distributed.pipelining, which has no costs or recomputation
      json   the task graph: tasks, and edges with their reasons
      dot    the task graph for Graphviz

    text and html show several schedules, the other formats one.

    comparing:
      Schedules put different numbers of stages on a device. With --stages P all of them split the model into P stages,
      on different numbers of devices. With --devices D all of them run on D devices, each schedule with its own number
      of stages per device (or --virtual), and --costs are those of all stages of a device together: each of v stages
      costs 1/v of F, R, B, I and W, since the model is the same. A copy costs C in both cases.

    examples:
      asyncpipe schedule show gpipe --stages 3 --microbatches 4 --checkpoint except_last
      asyncpipe schedule show 1f1b --stages 4 --microbatches 8 --costs F=1,B=2,C=0.5
      asyncpipe schedule show gpipe 1f1b interleaved --devices 4 --microbatches 8 --format html --output compare.html
      asyncpipe schedule show interleaved --stages 8 --virtual 2 --microbatches 8 --format svg --output step.svg
      asyncpipe schedule show gpipe --stages 3 --microbatches 4 --format dot | dot -Tpng > graph.png
    """
    if len(args.names) > 1 and args.format not in FOR_SEVERAL:
        raise OptionError(f"--format {args.format} shows one schedule, got {len(args.names)}; text and html show more")
    costs = parse_costs(args.costs)
    # Lower and draw all schedules before anything is written, so that an error leaves no partial output.
    text = FORMATS[args.format]([_lowered(name, costs, args) for name in args.names], args)
    if args.output is None:
        sys.stdout.write(text)
    else:
        with writing(args.output):
            args.output.write_text(text, encoding="utf-8")
    return 0


def _lowered(name: str, costs: Costs, args: argparse.Namespace) -> _LoweredSchedule:
    schedule = find_schedule(name, order=args.order)
    checkpoint = CheckpointMode.parse(args.checkpoint)
    phase = Phase.FORWARD if args.forward_only else Phase.STEP
    if args.devices is None:
        shape = shape_of(schedule, args.stages, args.microbatches, args.virtual)
    else:
        shape, costs = _shape_on_devices(schedule, costs, args)
    shape, wiring = in_rows(shape, args)
    graph = lower(schedule, shape, checkpoint=checkpoint, phase=phase, wiring=wiring)
    return _LoweredSchedule(schedule, graph, costs, f"{headline(graph, checkpoint.value)}, costs {spelled(costs)}")


def _shape_on_devices(schedule: Schedule, costs: Costs, args: argparse.Namespace) -> tuple[Shape, Costs]:
    """The shape on ``--devices``, and the costs of one stage: a device's costs divided by its number of stages."""
    virtual = schedule.virtual if args.virtual is None else args.virtual
    shares = {name: cost / virtual for name, cost in asdict(costs).items() if name != "copy" and cost is not None}
    return Shape(args.devices * virtual, args.microbatches, args.devices), replace(costs, **shares)


def _text(several: Sequence[_LoweredSchedule], args: argparse.Namespace) -> str:
    from asyncpipe.observe.pictures.timeline import text_timeline

    # In a pipe or file the timeline is exact and as wide as needed; on a terminal it is scaled to fit.
    width = terminal_width() if args.output is None else None
    texts = []
    for shown in several:
        record, copies = simulate(shown.graph, shown.costs), max(shown.costs.copy, shown.costs.reduce) > 0
        texts.append(f"{shown.title}\n\n{text_timeline(record, width, copies=copies, virtual=True)}")
    return "\n".join(texts)


def _html(several: Sequence[_LoweredSchedule], args: argparse.Namespace) -> str:
    from asyncpipe.observe.pictures.html import ComparedStep, html_comparison

    steps = []
    for shown in several:
        name = shown.graph.schedule
        detail = shown.title.removeprefix(f"{name}: ")
        steps.append(ComparedStep(name, simulate(shown.graph, shown.costs), virtual=True, detail=detail))
    title = steps[0].title if len(steps) == 1 else f"{len(steps)} schedules at the same costs"
    return html_comparison(steps, title=f"{title}, {counted(args.microbatches, 'micro-batch')}")


def _svg(several: Sequence[_LoweredSchedule], args: argparse.Namespace) -> str:
    from asyncpipe.observe.pictures.svg import svg_timeline

    [shown] = several
    return svg_timeline(simulate(shown.graph, shown.costs), title=shown.title, virtual=True)


def _csv(several: Sequence[_LoweredSchedule], args: argparse.Namespace) -> str:
    from asyncpipe.core.graph.export import write_csv

    [shown] = several
    if args.forward_only:
        raise OptionError("--format csv holds whole steps; leave --forward-only out")
    [(_, shape), *_] = shown.graph.rows.shapes()  # Of each replica.
    return write_csv(shown.schedule, shape)


def _json(several: Sequence[_LoweredSchedule], args: argparse.Namespace) -> str:
    return json.dumps(to_dict(several[0].graph)) + "\n"


def _dot(several: Sequence[_LoweredSchedule], args: argparse.Namespace) -> str:
    return to_dot(several[0].graph)


FORMATS = {"text": _text, "html": _html, "svg": _svg, "csv": _csv, "json": _json, "dot": _dot}
FOR_SEVERAL = ("text", "html")
