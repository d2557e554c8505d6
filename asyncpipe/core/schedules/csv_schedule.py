"""A schedule read from a CSV file, in the notation of torch.distributed.pipelining (see ``csv_notation.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncpipe.core.schedules.csv_notation import read_csv
from asyncpipe.core.schedules.protocol import Action, OrderedSchedule, Overlap, Shape, flat
from asyncpipe.errors import ScheduleError

__all__ = ["CsvSchedule", "read_schedule"]


@dataclass(frozen=True)
class CsvSchedule(OrderedSchedule):
    """Orders for one shape; each stage is placed on the device that has its actions.

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
    return CsvSchedule(*read_csv(text, name), name)
