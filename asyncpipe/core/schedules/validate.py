"""Checks of what a schedule yields, before it becomes a task graph.

Each error names the schedule, the device and the action. A schedule may be a user's code: an exception that it raises
becomes a ``ScheduleError``, with the original as its cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from asyncpipe.core.kinds import SCHEDULED_KINDS
from asyncpipe.core.schedules.protocol import Action, OrderedSchedule, RuledSchedule, Schedule, Shape, flat
from asyncpipe.errors import AsyncpipeError, ScheduleError

__all__ = ["blaming", "check_admission", "check_balanced_shape", "check_shape", "checked_actions", "checked_placement"]

_F, _B, _I, _W = SCHEDULED_KINDS


@contextmanager
def blaming(where: str | Callable[[], str]) -> Iterator[None]:
    """Turn exceptions in the block into a ``ScheduleError`` that begins with ``where``; our own errors pass."""
    try:
        yield
    except AsyncpipeError:
        raise
    except Exception as error:
        place = where if isinstance(where, str) else where()
        raise ScheduleError(f"{place} raised {type(error).__name__}: {error}") from error


def check_shape(schedule: Schedule, shape: Shape) -> None:
    """Raise ``ScheduleError`` unless ``schedule`` supports ``shape``."""
    with blaming(f"schedule {schedule.name!r}: check"):
        schedule.check(shape)


def check_balanced_shape(schedule: Schedule, shape: Shape, balance: str | Sequence[int]) -> None:
    """As ``check_shape``, for a model whose stages can be joined: the error says which balance would do.

    ``balance`` is the one that made ``shape``, or ``"auto"``.
    """
    try:
        check_shape(schedule, shape)
    except ScheduleError as error:
        given = f"balance {list(balance)} has {shape.stages} entries for {shape.devices} devices: "
        fewer = next((n for n in range(shape.stages - 1, 0, -1) if _serves(schedule, replace(shape, stages=n))), None)
        joins = f", or give a balance with {fewer} entries, which joins stages" if fewer else ""
        raise ScheduleError(f"{'' if isinstance(balance, str) else given}{error}{joins}") from None


def _serves(schedule: Schedule, shape: Shape) -> bool:
    try:
        check_shape(schedule, shape)
    except ScheduleError:
        return False
    return True


def checked_placement(schedule: Schedule, shape: Shape) -> tuple[int, ...]:
    """The device index of each stage, each in range."""
    with blaming(f"schedule {schedule.name!r}: placement"):
        placement = tuple(schedule.placement(shape))
    if len(placement) != shape.stages:
        raise ScheduleError(
            f"schedule {schedule.name!r} places {len(placement)} stages, on devices {list(placement)}; the step has "
            f"{shape.stages}; give one device index for each stage"
        )
    for stage, device in enumerate(placement):
        if device not in range(shape.devices):
            raise ScheduleError(
                f"schedule {schedule.name!r} places stage {stage} on device {device!r}, which is missing: there are "
                f"{shape.devices}; give indices from 0 to {shape.devices - 1}"
            )
    return placement


def checked_actions(schedule: Schedule, shape: Shape, placement: tuple[int, ...], device: int) -> list[Action]:
    """The actions of ``device``: complete, each once, and in an ordered schedule each after its prerequisite."""
    ordered = isinstance(schedule, OrderedSchedule)
    where = f"schedule {schedule.name!r}, device {device}"
    actions: dict[Action, None] = {}
    with blaming(lambda: f"{where}: after {next(reversed(actions))}" if actions else where):
        for action in _actions(schedule, shape, device):
            _check_action(action, shape, placement, device, where)
            if action in actions:
                raise ScheduleError(f"{where}: {action} is there twice; each action must be there once")
            needed = action.prerequisite if ordered else None
            if needed is not None and needed not in actions:
                raise ScheduleError(f"{where}: {action} comes before {needed} and would wait for ever")
            actions[action] = None
    _check_complete(actions, shape, placement, device, where)
    return list(actions)


def _actions(schedule: Schedule, shape: Shape, device: int) -> Iterator[Action]:
    if isinstance(schedule, OrderedSchedule):
        return flat(schedule.order(device, shape))
    if isinstance(schedule, RuledSchedule):
        return iter(schedule.actions(device, shape))
    raise ScheduleError(
        f"schedule {schedule.name!r} is neither an OrderedSchedule nor a RuledSchedule; derive it from one of them"
    )


def _check_action(action: Action, shape: Shape, placement: tuple[int, ...], device: int, where: str) -> None:
    if not isinstance(action, Action):
        raise ScheduleError(f"{where}: {action!r} is not an action; give F(i, j), B(i, j), I(i, j) or W(i, j)")
    kind, i, j = action
    if kind not in SCHEDULED_KINDS or not (0 <= i < shape.microbatches and 0 <= j < shape.stages):
        raise ScheduleError(
            f"{where}: {action} is not an action of {shape.microbatches} micro-batches and {shape.stages} stages; "
            "actions are F, B, I and W with indices from 0"
        )
    if placement[j] != device:
        raise ScheduleError(f"{where}: {action} belongs to device {placement[j]}, where stage {j} is placed")


def _check_complete(
    actions: dict[Action, None], shape: Shape, placement: tuple[int, ...], device: int, where: str
) -> None:
    for j in (j for j in range(shape.stages) if placement[j] == device):
        for i in range(shape.microbatches):
            halves = [half for half in (_I, _W) if (half, i, j) in actions]
            if halves and (_B, i, j) in actions:
                both = f"{Action(_B, i, j)} is there beside {Action(halves[0], i, j)}"
                raise ScheduleError(f"{where}: {both}; a backward is B, or I and W")
            for kind in (_F, *((_I, _W) if halves else (_B,))):
                if (kind, i, j) not in actions:
                    raise ScheduleError(f"{where}: {Action(kind, i, j)} is missing")


def check_admission(schedule: RuledSchedule, forwards: Iterable[Action], shape: Shape, device: int) -> None:
    """Raise ``ScheduleError`` unless ``device`` admits each of its forwards while it holds no micro-batch."""
    where = f"schedule {schedule.name!r}, device {device}"
    for action in forwards:
        with blaming(f"{where}: admit({action}, 0)"):
            admitted = schedule.admit(action, 0, shape)
        if not admitted:
            raise ScheduleError(
                f"{where}: {action} is refused by a device that holds no micro-batch, and would wait for ever; "
                "admit must be true for live = 0"
            )
