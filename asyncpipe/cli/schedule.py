"""``asyncpipe schedule``: list the schedules, and show what a step of one would look like."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from asyncpipe.core.costs import Costs
from asyncpipe.core.graph import Phase, TaskGraph, to_dict, to_dot
from asyncpipe.core.lower import CheckpointMode, lower
from asyncpipe.core.registry import find_schedule, known_schedules
from asyncpipe.core.schedule import Schedule, Shape
from asyncpipe.core.simulate import simulate
from asyncpipe.errors import OptionError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["add_parser"]

COST_FIELDS = {"F": "forward", "R": "recompute", "B": "backward", "C": "copy"}

SHOW_DESCRIPTION = """\
Lower a schedule to its task graph, simulate one step at the given costs and show it.

Nothing is trained and no device is touched: times are virtual, in the unit of --costs.
"""

SHOW_EPILOG = """\
formats:
  text   a timeline: a row a device, F0 the forward of micro-batch 0, R a recompute, B a backward,
         dots where the device stands idle; stage numbers follow (F0.4) where a device has several
  svg    the same as a picture, with arrows between devices in small graphs
  json   the task graph: tasks, and edges with their reasons
  dot    the task graph for Graphviz

examples:
  asyncpipe schedule show gpipe --stages 3 --microbatches 4 --checkpoint except_last
  asyncpipe schedule show 1f1b --stages 4 --microbatches 8 --costs F=1,B=2,C=0.5
  asyncpipe schedule show interleaved --stages 8 --virtual 2 --microbatches 8 --format svg --output step.svg
  asyncpipe schedule show gpipe --stages 3 --microbatches 4 --format dot | dot -Tpng > graph.png
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add ``schedule list`` and ``schedule show`` to the command's parser."""
    parser = subparsers.add_parser(
        "schedule",
        help="list schedules, or show the step of one",
        description="List schedules, or show what a step of one would look like.",
        epilog="example: asyncpipe schedule show 1f1b --stages 4 --microbatches 8",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    listing = commands.add_parser("list", help="list the known schedules", description="List the known schedules.")
    listing.set_defaults(run=_list)
    show = commands.add_parser(
        "show",
        help="simulate one step and show it",
        description=SHOW_DESCRIPTION,
        epilog=SHOW_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_show_arguments(show)
    show.set_defaults(run=_show)


def _add_show_arguments(show: argparse.ArgumentParser) -> None:
    show.add_argument("name", metavar="NAME", help="a schedule; 'asyncpipe schedule list' shows the known ones")
    show.add_argument("--stages", type=int, required=True, metavar="P", help="stages on all devices together")
    show.add_argument("--microbatches", type=int, required=True, metavar="M", help="micro-batches of the step")
    show.add_argument(
        "--virtual",
        type=int,
        metavar="V",
        help="stages per device (default: what the schedule is made for, where it divides P, else 1)",
    )
    show.add_argument(
        "--checkpoint",
        default="never",
        metavar="MODE",
        help="which micro-batches are recomputed before their backward: never (default), always or except_last",
    )
    show.add_argument("--forward-only", action="store_true", help="show a step without backward")
    show.add_argument(
        "--costs",
        default="",
        metavar="F=1,R=1,B=2,C=0",
        help="virtual time of a forward, recompute, backward and copy (default: F=1,R=1,B=2,C=0)",
    )
    show.add_argument("--format", choices=["text", "json", "dot", "svg"], default="text", help="default: text")
    show.add_argument("--output", type=Path, metavar="FILE", help="write to FILE instead of the standard output")


def _list(args: argparse.Namespace) -> int:
    names = known_schedules()
    width = max(map(len, names))
    for name in names:
        schedule = find_schedule(name)
        summary = (type(schedule).__doc__ or "").strip().partition("\n")[0]
        print(f"{name.ljust(width)}  {summary}".rstrip())
    return 0


def _show(args: argparse.Namespace) -> int:
    schedule = find_schedule(args.name)
    costs = _costs(args.costs)
    checkpoint = CheckpointMode.parse(args.checkpoint)
    phase = Phase.FORWARD if args.forward_only else Phase.STEP
    graph = lower(schedule, _shape(schedule, args), checkpoint=checkpoint, phase=phase)
    text = _rendered(args, graph, costs, checkpoint)
    if args.output is None:
        sys.stdout.write(text)
        return 0
    try:
        args.output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot write {args.output}: {error.strerror or error}") from error
    return 0


def _shape(schedule: Schedule, args: argparse.Namespace) -> Shape:
    """``--stages`` counts all stages, so the devices follow from how many of them share one."""
    virtual = args.virtual
    if virtual is None:
        virtual = schedule.virtual if args.stages % schedule.virtual == 0 else 1
    if virtual < 1 or args.stages % virtual:
        raise OptionError(f"--virtual must divide the number of stages, got {virtual} for {args.stages} stages")
    return Shape(args.stages, args.microbatches, args.stages // virtual)


def _costs(text: str) -> Costs:
    """The costs in ``F=1,R=1,B=2,C=0``; those left out keep their defaults."""
    given: dict[str, float] = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        kind, _, value = item.partition("=")
        try:
            given[COST_FIELDS[kind.strip()]] = cost = float(value)
        except (KeyError, ValueError):
            raise OptionError(f"--costs takes KIND=NUMBER with the kinds F, R, B and C, got {item!r}") from None
        if not 0 <= cost < float("inf"):
            raise OptionError(f"--costs must not be negative or infinite, got {item!r}")
    return Costs(**given)


def _rendered(args: argparse.Namespace, graph: TaskGraph, costs: Costs, checkpoint: CheckpointMode) -> str:
    if args.format == "json":
        return json.dumps(to_dict(graph)) + "\n"
    if args.format == "dot":
        return to_dot(graph)
    record = simulate(graph, costs)
    title = _title(graph, costs, checkpoint)
    if args.format == "svg":
        from asyncpipe.observe.svg import svg_timeline

        return svg_timeline(record, title=title, virtual=True)
    from asyncpipe.observe.timeline import text_timeline

    # A pipe or a file gets the exact timeline, however wide; only a terminal has an edge to fit into.
    to_terminal = args.output is None and sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if to_terminal else None
    return f"{title}\n\n{text_timeline(record, width, copies=costs.copy > 0, virtual=True)}"


def _title(graph: TaskGraph, costs: Costs, checkpoint: CheckpointMode) -> str:
    shape = graph.shape
    mode = f"checkpoint {checkpoint.value}" if graph.training else "forward only"
    shown = " ".join(f"{letter}={getattr(costs, name):g}" for letter, name in COST_FIELDS.items())
    return (
        f"{graph.schedule}: {_counted(shape.stages, 'stage')} on {_counted(shape.devices, 'device')}, "
        f"{_counted(shape.microbatches, 'micro-batch')}, {mode}, costs {shown}"
    )


def _counted(count: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{count} {noun if count == 1 else plural}"
