"""The CSV notation of torch.distributed.pipelining, read and written, so that schedules can be exchanged with torch.

A row is a device (a rank), a column is a clock cycle, a cell is empty or one action::

    0F0,0F1,,0B0,,0B1           STAGE TYPE MICROBATCH; the types are F, B, I and W
    ,1F0,1B0,1F1,1B1,           (0F8;3B1)OVERLAP_F_B is an Overlap

A stage is placed on the device whose row has its actions. Only the order in a row counts; empty cells show timing to
a reader and mean nothing. Torch also has a *lowered* form with communication (SEND_F, UNSHARD …); it is refused, since
here ``lower`` adds communication. Recomputation has no cell: the checkpoint mode adds it. Torch's own loader ignores
text after an action (``2F0junk``); here it is an error.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from io import StringIO

from asyncpipe.core.kinds import INPUT_GRADIENT_KINDS, SCHEDULED_KINDS, TaskKind
from asyncpipe.core.schedules.protocol import Action, OrderedSchedule, Overlap, Shape, flat
from asyncpipe.errors import ScheduleError

__all__ = ["CsvSchedule", "format_cell", "read_csv", "read_schedule"]

_F, _B, _I, _W = SCHEDULED_KINDS
_KINDS = {kind.value: kind for kind in SCHEDULED_KINDS}
_OVERLAP = "OVERLAP_F_B"
_LOWERED = re.compile("[0-9]*(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)[0-9]*")
_ACTION = re.compile("([0-9]{1,9})([FBIW])([0-9]{1,9})")
_PARTS = re.compile("(-?[0-9]*)([A-Za-z_]*)(-?[0-9]*)(.*)", re.DOTALL)
"""The parts of a malformed cell, for its message: stage, type, micro-batch and the rest."""
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
    and the column, both counted from 1, for a malformed cell, an action that occurs twice or before what it needs on
    its device, and a stage in two rows; with the row, for a row without actions; and if a stage or one of its actions
    is missing. Deadlocks between devices are found by ``lower``.
    """
    rows = _rows(text, name)
    filled = max((row for row, cells in enumerate(rows, start=1) if any(cells)), default=0)
    if not filled:
        raise ScheduleError(f"schedule {name!r} has no actions; give one row of actions per device")
    table = _CsvReader(name)
    for row, cells in enumerate(rows[:filled], start=1):
        table.add_row(row, cells)
    if text.count('"') % 2:
        # A quoted cell extends to the next quote or the end of the text, so an unclosed quote is in the last cell.
        raise ScheduleError(f"{_where(name, len(rows), len(rows[-1]))}: a quote is opened and never closed")
    return table.schedule()


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
        rows.extend(csv.reader(StringIO(text.removeprefix("\ufeff"), newline=""), skipinitialspace=True))
    except csv.Error as error:
        raise ScheduleError(f"schedule {name!r}, row {len(rows) + 1} (counted from 1) is not CSV: {error}") from error
    return [[cell.strip() for cell in cells] for cells in rows]


def _where(name: str, row: int, column: int) -> str:
    return f"schedule {name!r}, row {row}, column {column} (both counted from 1)"


def _parsed(cell: str) -> Action | Overlap:
    """The entry of a cell that is not empty; raises ``ValueError`` that says what is wrong with it."""
    if not cell.startswith("("):
        return _parsed_action(cell)
    inside, closed, word = cell[1:].rpartition(")")
    if not closed:
        raise ValueError(f"{_shown(cell)} has a parenthesis that is never closed")
    if word != _OVERLAP:
        raise ValueError(f"{_shown(cell)} has {_shown(word)} behind its parenthesis, not {_OVERLAP}")
    parts = [part.strip() for part in inside.split(";")]
    if len(parts) != 2:
        raise ValueError(f"{_shown(cell)} is an overlap of {len(parts)} actions, not of two")
    overlap = Overlap(*map(_parsed_action, parts))
    if not _can_overlap(overlap):
        raise ValueError(f"{_shown(cell)} is not an overlap of a forward and then a backward (B or I)")
    return overlap


def _parsed_action(text: str) -> Action:
    if match := _ACTION.fullmatch(text):
        stage, kind, microbatch = match.groups()
        return Action(_KINDS[kind], int(microbatch), int(stage))
    raise ValueError(f"{_shown(text)} {_fault(text)}")


def _fault(text: str) -> str:
    """Why ``text`` is not an action."""
    if _LOWERED.fullmatch(text):
        return "belongs to torch's lowered form, with communication; give the compute-only form"
    parts = _PARTS.fullmatch(text)
    stage, kind, microbatch, rest = parts.groups() if parts else ("", "", "", text)
    if stage.startswith("-") or microbatch.startswith("-"):
        return "has a negative number; stages and micro-batches count from 0"
    if not stage:
        return "names no stage"
    if kind == TaskKind.RECOMPUTE.value:
        return "is a recomputation, which has no cell; the checkpoint mode of the pipeline adds it"
    if kind not in _KINDS:
        return f"has the type {_shown(kind)}, which is none of F, B, I and W" if kind else "names no type"
    if not microbatch:
        return "names no micro-batch"
    return f"has {_shown(rest)} behind {stage}{kind}{microbatch}" if rest else "has a number of more than nine digits"


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")


class _CsvReader:
    """Collects the rows, and checks every action against those before it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._orders: list[tuple[Action | Overlap, ...]] = []
        self._column_of: dict[Action, int] = {}
        """The column of each action so far."""
        self._row_of: dict[int, int] = {}
        """The row of each stage so far."""

    def add_row(self, row: int, cells: Sequence[str]) -> None:
        """Add one row; raises ``ScheduleError`` for a malformed cell and for an action in a wrong place."""
        entries: list[Action | Overlap] = []
        for column, cell in enumerate(cells, start=1):
            if not cell:
                continue
            where = _where(self._name, row, column)
            try:
                entry = _parsed(cell)
            except ValueError as error:
                raise ScheduleError(f"{where}: {error}; {_ALLOWED}") from None
            entries.append(entry)
            for action in flat([entry]):
                if fault := self._misplaced(action, row):
                    raise ScheduleError(f"{where}: {format_cell(action, where)} {fault}")
                self._column_of[action] = column
        if not entries:
            raise ScheduleError(
                f"schedule {self._name!r}, row {row} (counted from 1) has no action; each row is a device and needs at "
                "least one stage"
            )
        self._orders.append(tuple(entries))

    def _misplaced(self, action: Action, row: int) -> str | None:
        """What is wrong with the place of ``action``, if anything."""
        kind, i, j = action
        if self._row_of.setdefault(j, row) != row:
            return f"cannot be: stage {j} is in row {self._row_of[j]} already; all actions of a stage are in one row"
        if action in self._column_of:
            return f"is there twice, first in column {self._column_of[action]}; each action must be there once"
        needed = action.prerequisite
        if needed is not None and needed not in self._column_of:
            return f"comes before {format_cell(needed, '')}, which must be to its left"
        other = Action(_I if kind is _B else _B, i, j)
        if kind in (_B, _I) and other in self._column_of:
            return f"cannot be beside {format_cell(other, '')}; a backward is B, or I and W"
        return None

    def schedule(self) -> CsvSchedule:
        """The schedule of all rows; raises ``ScheduleError`` if a stage or an action is missing."""
        stages = 1 + max(self._row_of)
        if len(self._row_of) < stages:
            missing = next(j for j in range(stages) if j not in self._row_of)
            raise ScheduleError(
                f"schedule {self._name!r}: stage {missing} is in no row, but stage {stages - 1} is in row "
                f"{self._row_of[stages - 1]} (counted from 1); stages count from 0 without a gap"
            )
        microbatches = 1 + max(action.microbatch for action in self._column_of)
        for action in self._missing(stages, microbatches):
            raise ScheduleError(
                f"schedule {self._name!r}, row {self._row_of[action.stage]} (counted from 1): "
                f"{format_cell(action, '')} is missing; each stage needs an F and a B, or an F, an I and a W, of the "
                f"micro-batches 0 to {microbatches - 1}"
            )
        return CsvSchedule(tuple(self._orders), Shape(stages, microbatches, len(self._orders)), self._name)

    def _missing(self, stages: int, microbatches: int) -> Iterator[Action]:
        """The missing actions, lazily: a mistyped index such as 0F100000000 leaves a huge number of gaps."""
        for stage in range(stages):
            for microbatch in range(microbatches):
                halves = (_I, _W) if Action(_I, microbatch, stage) in self._column_of else (_B,)
                for kind in (_F, *halves):
                    if Action(kind, microbatch, stage) not in self._column_of:
                        yield Action(kind, microbatch, stage)
