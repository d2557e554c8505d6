"""Every exception the package raises, in one place.

Each class says who made the mistake: the caller (``ValueError``/``TypeError`` subclasses, raised before
anything runs), a task (``TaskError``, raised by a step), or asyncpipe itself (``InvalidTransition``).
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "ArgumentTypeError",
    "AsyncpipeError",
    "BackwardError",
    "BalanceError",
    "BatchError",
    "DeviceError",
    "HungTaskError",
    "InvalidTransition",
    "JobFileError",
    "LossError",
    "MicrobatchError",
    "MoveError",
    "OptionError",
    "PipelineClosedError",
    "PlanError",
    "PolicyError",
    "ProfileError",
    "RecomputeError",
    "ScheduleError",
    "SharedParameterError",
    "SkipError",
    "SkipLayoutError",
    "StageError",
    "TaskError",
    "TooFewDevicesError",
    "TraceError",
    "UnknownScheduleError",
]


class AsyncpipeError(Exception):
    """Base of every error raised by asyncpipe."""


class OptionError(AsyncpipeError, ValueError):
    """An argument has a value outside what is allowed; the message lists what is allowed."""


class BalanceError(OptionError):
    """The balance does not describe a split of the model."""


class PlanError(OptionError):
    """No plan serves these devices, or none fits into the memory; the message says the smallest that was found."""


class ProfileError(AsyncpipeError, ValueError):
    """A profile cannot be read, or does not know what it is asked for; the message says what it knows."""


class MicrobatchError(OptionError):
    """The number of micro-batches is not a positive integer."""


class DeviceError(OptionError):
    """A device is not there, or the list of devices cannot hold the stages."""


class BatchError(OptionError):
    """The mini-batch or its target cannot be cut into micro-batches."""


class SharedParameterError(OptionError):
    """Two stages on different devices own the same parameter."""


class TooFewDevicesError(DeviceError, IndexError):
    """There are fewer devices than stages."""


class ArgumentTypeError(AsyncpipeError, TypeError):
    """An argument is of a type that cannot be used; the message says which can."""


class MoveError(AsyncpipeError, TypeError):
    """A pipeline was told to move to another device; its stages stay on theirs."""


class ScheduleError(OptionError):
    """A schedule yields lists of actions that cannot be run as a step."""


class UnknownScheduleError(ScheduleError):
    """No schedule has this name; the message lists the known ones."""


class StageError(AsyncpipeError, TypeError):
    """A stage took or returned something that cannot cross a stage border."""


class TraceError(AsyncpipeError, ValueError):
    """A module could not be traced, or its trace cannot be cut where it was told to be."""


class LossError(AsyncpipeError, ValueError):
    """The loss function did not return a scalar tensor that depends on the model."""


class SkipLayoutError(AsyncpipeError, TypeError):
    """Skips of a model have no counterpart; the message lists every one."""


class SkipError(AsyncpipeError, RuntimeError):
    """A skip connection is stashed or popped otherwise than it was declared."""


class RecomputeError(AsyncpipeError, RuntimeError):
    """A recomputation did not, or could not, repeat the forward that it stands for."""


class BackwardError(AsyncpipeError, RuntimeError):
    """Autograd was asked for a backward that a pipeline cannot give; the message says what it can."""


class PipelineClosedError(AsyncpipeError, RuntimeError):
    """The pipeline was used before ``async with`` entered it, or after its closing began."""


class JobFileError(AsyncpipeError, ValueError):
    """A job file is missing, is not TOML, or has a wrong key or value."""


class PolicyError(AsyncpipeError, RuntimeError):
    """A policy of a lane chose a task that is not ready there; every step of its device pool ends."""


class TaskError(AsyncpipeError, RuntimeError):
    """One task of a step failed; the original exception is the ``__cause__``.

    ``kind`` is the task's letter (``"F"``, ``"R"``, ``"B"``, ``"C"`` …), ``microbatch`` and ``stage`` count
    from 0 and ``device`` is the logical device whose thread ran the task.
    """

    def __init__(self, task_id: str, kind: str, microbatch: int, stage: int, device: str, cause: BaseException) -> None:
        super().__init__(
            f"{task_id} failed (kind {kind}, micro-batch {microbatch}, stage {stage}, device {device}): "
            f"{type(cause).__name__}: {cause}"
        )
        self.task_id = task_id
        self.kind = kind
        self.microbatch = microbatch
        self.stage = stage
        self.device = device
        self.__cause__ = cause

    def __reduce__(self) -> tuple[type[TaskError], tuple[str, str, int, int, str, BaseException | None]]:
        return type(self), (self.task_id, self.kind, self.microbatch, self.stage, self.device, self.__cause__)


class HungTaskError(AsyncpipeError, RuntimeError):
    """A task ran for so long that it was given up; the cause of its step's ``TaskError``.

    Nobody can end a thread, so the task may still run, on a thread that its device no longer uses, and what it computes
    goes nowhere; but until it returns it holds its tensors, and it may still write to those of the model. So the model
    must be made anew, from a snapshot. ``seconds`` it ran, ``expected`` are those that it took before (``None`` if that
    is not known).
    """

    def __init__(self, task_id: str, device: str, seconds: float, expected: float | None) -> None:
        usual = "it had not run before" if expected is None else f"usually it takes {expected:.3g} s"
        super().__init__(
            f"{task_id} on {device} did not end within {seconds:.3g} s, and was given up ({usual}); all stacks are in "
            "the log. Go on with a new model, from a snapshot: the task may still write to this one"
        )
        self.task_id = task_id
        self.device = device
        self.seconds = seconds
        self.expected = expected

    def __reduce__(self) -> tuple[type[HungTaskError], tuple[str, str, float, float | None]]:
        return type(self), (self.task_id, self.device, self.seconds, self.expected)


class InvalidTransition(AsyncpipeError, RuntimeError):
    """An event reached the scheduler that cannot follow what happened before; nothing was changed.

    ``story`` is the part of the step's journal that concerns the task, oldest first.
    """

    def __init__(self, message: str, story: Sequence[tuple[float, object]] = ()) -> None:
        lines = "".join(f"\n  {at:.6f} {event}" for at, event in story)
        super().__init__(f"{message}; its story:{lines or ' nothing yet'}")
        self.story = tuple(story)
