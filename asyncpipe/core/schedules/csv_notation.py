"""The CSV notation of torch.distributed.pipelining, read and written, so that schedules can be exchanged with torch.

A row is a device (a rank), a column is a clock cycle, a cell is empty or one action::

    0F0,0F1,,0B0,,0B1           STAGE TYPE MICROBATCH; the types are F, B, I and W
    ,1F0,1B0,1F1,1B1,           (0F8;3B1)OVERLAP_F_B is an Overlap

A stage is placed on the device whose row has its actions. Only the order in a row counts; empty cells show timing to
a reader and mean nothing. Torch also has a *lowered* form with communication (SEND_F, UNSHARD …); it is refused, since
here ``lower`` adds communication. Recomputation has no cell: the checkpoint mode adds it. Torch's own loader ignores
text after an action (``2F0junk``); here it is an error. Whether the actions are a step, ``lower`` checks, as of every
other schedule (``validate.py``).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import StringIO

from asyncpipe.core.kinds import INPUT_GRADIENT_KINDS, SCHEDULED_KINDS, TaskKind
from asyncpipe.core.schedules.protocol import Action, OrderedSchedule, Overlap, Shape, flat
from asyncpipe.errors import ScheduleError

__all__ = ["CsvSchedule", "format_cell", "read_csv", "read_schedule"]

_KINDS = {kind.value: kind for kind in SCHEDULED_KINDS}
_OVERLAP = "OVERLAP_F_B"
_PAIR = re.compile(rf"\(([^;]*);([^;]*)\){_OVERLAP}")
_ACTION = re.compile("([0-9]{1,6})([FBIW])([0-9]{1,6})")
_LOWERED = re.compile("[0-9]*(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)[0-9]*")
_ALLOWED = "a cell is empty, STAGE TYPE MICROBATCH such as 2F0 (types F, B, I, W), or such as (0F8;3B1)OVERLAP_F_B"
_SHOWN = 60
"""How many characters of a malformed cell a message shows."""


@dataclass(frozen=True)
class CsvSchedule(OrderedSchedule):
    """A schedule for one shape, as read from a CSV text; each stage is placed on the device that has its actions.

    ``virtual`` is the number of stages on each device.
    """

    orders: tuple[tuple[Action | Overlap, ...], ...] = field(repr=False)
    shape: Shape
    name: str = "csv"
    _placement: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        device_of = {action.stage: device for device, order in enumerate(self.orders) for action in flat(order)}
        places = tuple(device_of.get(stage, -1) for stage in range(self.shape.stages))
        object.__setattr__(self, "_placement", places)
        object.__setattr__(self, "virtual", max(1, self.shape.stages // self.shape.devices))

    def __hash__(self) -> int:
        """The hash of name and shape only: caches of graphs are keyed by schedule, and orders are long."""
        return hash((self.name, self.shape))

    def check(self, shape: Shape) -> None:
        """Raise ``ScheduleError`` unless ``shape`` is that of the file."""
        if shape != self.shape:
            raise ScheduleError(
                f"schedule {self.name!r} is for {_counted(self.shape)}, got {_counted(shape)}; use it for its own "
                "shape, or write a file for this one"
            )

    def placement(self, shape: Shape) -> Sequence[int]:
        """The device whose row has the actions of each stage."""
        return self._placement

    def order(self, device: int, shape: Shape) -> Sequence[Action | Overlap]:
        """The entries of row ``device`` (from 0)."""
        return self.orders[device]


def _counted(shape: Shape) -> str:
    return f"{shape.stages} stages, {shape.microbatches} micro-batches and {shape.devices} devices"


def format_cell(entry: Action | Overlap, where: str) -> str:
    """The cell of ``entry``; raises ``ScheduleError`` that begins with ``where`` if the notation has none for it."""
    if isinstance(entry, Overlap):
        if not _can_overlap(entry):
            raise ScheduleError(f"{where}: the CSV form has no overlap of {entry}; give a forward, then a B or an I")
        return f"({format_cell(entry.first, where)};{format_cell(entry.second, where)}){_OVERLAP}"
    return f"{entry.stage}{entry.kind.value}{entry.microbatch}"


def _can_overlap(overlap: Overlap) -> bool:
    return overlap.first.kind is TaskKind.FORWARD and overlap.second.kind in INPUT_GRADIENT_KINDS


def read_csv(text: str, name: str) -> CsvSchedule:
    """The schedule in ``text``, called ``name``.

    There are as many devices as rows; the highest indices give the numbers of stages and micro-batches. White space
    around cells, quotes, any line ends and blank rows at the end are accepted. Raises ``ScheduleError`` with the row
    and the column, both counted from 1, for a malformed cell, and for a text without actions or a stage without any.
    """
    rows = _rows(text, name)
    while rows and not any(rows[-1]):
        rows.pop()
    orders = tuple(
        tuple(_parsed(cell, _where(name, row, column)) for column, cell in enumerate(cells, start=1) if cell)
        for row, cells in enumerate(rows, start=1)
    )
    actions = [action for order in orders for action in flat(order)]
    if not actions:
        raise ScheduleError(f"schedule {name!r} has no actions; give one row of actions per device")
    found = {action.stage for action in actions}
    stages = 1 + max(found)
    if len(found) < stages:
        missing = next(stage for stage in range(stages) if stage not in found)
        raise ScheduleError(f"schedule {name!r}: stage {missing} is in no row; stages count from 0 without a gap")
    return CsvSchedule(orders, Shape(stages, 1 + max(action.microbatch for action in actions), len(rows)), name)


def read_schedule(path: str) -> CsvSchedule:
    """The schedule in the CSV file at ``path`` (UTF-8), called ``csv:`` and the path.

    Raises ``ScheduleError`` that names the file if it cannot be read, and the row and column of an error in its text.
    """
    name = f"csv:{path}"
    try:
        with open(path, encoding="utf-8", newline="") as file:
            text = file.read()
    except UnicodeDecodeError as error:
        raise ScheduleError(
            f"schedule {name!r}: the file is not UTF-8 text: {error.reason}; give a CSV file"
        ) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ScheduleError(f"schedule {name!r}: the file cannot be read: {reason}; give csv:FILE") from error
    return read_csv(text, name)


def _rows(text: str, name: str) -> list[list[str]]:
    """The cells of each row, without the space around them."""
    rows: list[list[str]] = []
    try:
        rows.extend(csv.reader(StringIO(text.removeprefix("\ufeff"), newline=""), skipinitialspace=True, strict=True))
    except csv.Error as error:
        raise ScheduleError(f"schedule {name!r}, row {len(rows) + 1} (counted from 1) is not CSV: {error}") from error
    return [[cell.strip() for cell in cells] for cells in rows]


def _where(name: str, row: int, column: int) -> str:
    return f"schedule {name!r}, row {row}, column {column} (both counted from 1)"


def _parsed(cell: str, where: str) -> Action | Overlap:
    """The entry of a cell that is not empty."""
    if pair := _PAIR.fullmatch(cell):
        overlap = Overlap(_parsed_action(pair[1].strip(), where), _parsed_action(pair[2].strip(), where))
        if _can_overlap(overlap):
            return overlap
    return _parsed_action(cell, where)


def _parsed_action(text: str, where: str) -> Action:
    if match := _ACTION.fullmatch(text):
        stage, kind, microbatch = match.groups()
        return Action(_KINDS[kind], int(microbatch), int(stage))
    shown = repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")
    fault = "is no action"
    if _LOWERED.fullmatch(text):
        fault = "belongs to torch's lowered form, with communication; give the compute-only form"
    raise ScheduleError(f"{where}: {shown} {fault}; {_ALLOWED}")
