"""Every exception that the package raises.

Subclasses of ``ValueError`` and ``TypeError`` are mistakes of the caller and are raised before anything runs.
``TaskError`` means that a task of a step failed. ``InvalidTransition`` is a bug in asyncpipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class AsyncpipeError(Exception):
    """Base class of all errors raised by asyncpipe. They travel between processes with their attributes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (type(self), self.args), self.__dict__


def _remade(kind: type[AsyncpipeError], args: tuple[Any, ...]) -> AsyncpipeError:
    """An error without a call of its constructor, whose arguments are others."""
    return kind.__new__(kind, *args)


class OptionError(AsyncpipeError, ValueError):
    """An argument has a value that is not allowed. The message lists the allowed values."""


class BalanceError(OptionError):
    """The balance is not a valid split of the model's layers into stages."""


class PlanError(OptionError):
    """No plan works for these devices, or none fits into memory. The message names the smallest plan that was found."""


class ProfileError(AsyncpipeError, ValueError):
    """A profile cannot be read, or lacks the requested measurement. The message says what it contains."""


class TopologyError(OptionError):
    """A topology of hosts, devices and links is not valid, or its file cannot be read."""


class MicrobatchError(OptionError):
    """The number of micro-batches is not a positive integer."""


class DeviceError(OptionError):
    """A device does not exist, or the stages cannot be placed on the list of devices."""


class BatchError(OptionError):
    """The mini-batch or its target cannot be cut into micro-batches."""


class SharedParameterError(OptionError):
    """Two stages on different devices own the same parameter."""


class TooFewDevicesError(DeviceError, IndexError):
    """There are fewer devices than stages."""


class ArgumentTypeError(AsyncpipeError, TypeError):
    """An argument has a type that is not supported. The message says which types are."""


class MoveError(AsyncpipeError, TypeError):
    """A pipeline was told to move to another device, which it cannot: its stages stay on their devices."""


class StateDictError(AsyncpipeError, RuntimeError):
    """The names in a state dict do not tell which layers its entries belong to. Nothing was loaded."""


class ScheduleError(OptionError):
    """A schedule's lists of actions are not a valid step."""


class UnknownScheduleError(ScheduleError):
    """No schedule has this name. The message lists the known names."""


class StageError(AsyncpipeError, TypeError):
    """A stage received or returned a value that cannot be passed between stages."""


class TraceError(AsyncpipeError, ValueError):
    """A module could not be traced, or its trace cannot be cut at the requested places."""


class LossError(AsyncpipeError, ValueError):
    """The loss function did not return a scalar tensor that depends on the model."""


class SkipLayoutError(AsyncpipeError, TypeError):
    """Skip connections of a model are stashed and not popped, or the reverse. The message lists all of them."""


class SkipError(AsyncpipeError, RuntimeError):
    """A skip connection is stashed or popped twice, not at all, or without being declared."""


class RecomputeError(AsyncpipeError, RuntimeError):
    """A recomputation differed from its forward, or could not repeat it."""


class BackwardError(AsyncpipeError, RuntimeError):
    """A derivative that a pipeline does not support was asked for. The message says what is supported."""


class PipelineClosedError(AsyncpipeError, RuntimeError):
    """The pipeline was used before it was opened, or after closing began."""


class NestedWaitError(AsyncpipeError, RuntimeError):
    """A task, or an observer, asked for something that would wait for it. The message says what to do instead."""


class OverlapError(AsyncpipeError, RuntimeError):
    """A pipeline was used between two results of ``steps``, while a later step computes. The message says how to."""


class JobFileError(AsyncpipeError, ValueError):
    """A job file is missing, is not TOML, or has a wrong key or value."""


class PolicyError(AsyncpipeError, RuntimeError):
    """A policy raised, chose a task that is not ready, or chooses nothing for ever; every step of its pool ends."""


class TaskError(AsyncpipeError, RuntimeError):
    """One task of a step failed; the original exception is the ``__cause__``.

    ``kind`` is the task's letter (``"F"``, ``"R"``, ``"B"``, ``"C"`` …). ``microbatch`` and ``stage`` count from 0.
    ``device`` is the logical device whose thread ran the task.
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

    def __reduce__(self) -> tuple[Any, ...]:
        return (*super().__reduce__()[:2], {**self.__dict__, "__cause__": self.__cause__})


class EdgeError(AsyncpipeError, RuntimeError):
    """An edge between two workers could not be made, or broke. ``peers`` are the numbers of the workers at fault.

    ``edge`` is set where one broke: the workers that it leads from and to, by name where the names are known.
    """

    def __init__(
        self, message: str, peers: Sequence[int] = (), edge: tuple[str, str] | tuple[int, int] | None = None
    ) -> None:
        super().__init__(message)
        self.peers = tuple(peers)
        self.edge = edge
        self.edges: tuple[tuple[str, str] | tuple[int, int], ...] = () if edge is None else (edge,)
        """All edges of the pipeline that broke at that time, as far as the controller has heard."""

    @classmethod
    def not_there(cls, me: int, pairs: Sequence[tuple[int, int]], seconds: float, more: str = "") -> EdgeError:
        """Worker ``me`` has waited so many seconds for those at the other ends of ``pairs``."""
        peers = sorted({sender if receiver == me else receiver for sender, receiver in pairs})
        names = ", ".join(f"worker {peer}" for peer in peers)
        edges = ", ".join(f"{sender} > {receiver}" for sender, receiver in pairs)
        return cls(f"{names} did not come within {seconds:g} s; waiting for the edges {edges}{more}", peers)


class PaddedLabelsWarning(UserWarning):
    """The loss of a step is another mean than that of the unsplit model, because micro-batches are padded unevenly."""


class HangError(AsyncpipeError, RuntimeError):
    """A step stood still, and this is why: the one task, worker or edge that everything else waits for.

    ``state`` is what it is at: ``"computing"``, ``"not answering"``, ``"waiting for an edge"`` … (``HangState``).
    ``worker`` should do something and does not; it is empty where devices are threads. ``task_id`` is the task that it
    is at on ``device``, if it is at one, ``seconds`` how long it has been, if that is known. If an edge is at the root,
    ``peer`` is the worker at its other end, and ``cut_off`` the worker that nothing gets through to or from, if it is
    known to be that one. ``waits`` are sentences, each of a task that waits for the next one's; the last one waits for
    the root. ``stack`` is what the thread in question is in, if it could be asked.
    """

    def __init__(
        self,
        message: str,
        state: str,
        *,
        worker: str = "",
        device: str = "",
        task_id: str = "",
        peer: str = "",
        cut_off: str | None = None,
        seconds: float = 0.0,
        waits: Sequence[str] = (),
        stack: str = "",
    ) -> None:
        super().__init__(message)
        self.state = state
        self.worker = worker
        self.device = device
        self.task_id = task_id
        self.peer = peer
        self.cut_off = cut_off
        self.seconds = seconds
        self.waits = tuple(waits)
        self.stack = stack

    @property
    def story(self) -> str:
        """The sentence, what leads there, and the stack, in lines."""
        lines = [str(self), *(f"  {wait}" for wait in self.waits)]
        return "\n".join([*lines, self.stack.rstrip()] if self.stack else lines)


class HungTaskError(HangError):
    """A task ran for so long that the watchdog gave it up; the cause of its step's ``TaskError``.

    Python cannot kill a thread, so the task may still run, on a thread that its device no longer uses. Its result is
    ignored, but until it returns it keeps its tensors alive and may write to those of the model. Therefore make a new
    model, from a snapshot. ``seconds`` is how long the task ran, ``expected`` its mean time in earlier steps (``None``
    if that is not known). In workers ``WorkerLostError`` and ``HangError`` say it, with the text of ``HangRoot``.
    """

    def __init__(
        self,
        task_id: str,
        device: str,
        seconds: float,
        expected: float | None,
        waits: Sequence[str] = (),
        stack: str = "",
    ) -> None:
        usual = "it had not run before" if expected is None else f"usually it takes {expected:.3g} s"
        super().__init__(
            f"{task_id} on {device} did not end within {seconds:.3g} s, and was given up ({usual}); all stacks are in "
            "the log. Go on with a new model, from a snapshot: the task may still write to this one",
            "computing",
            device=device,
            task_id=task_id,
            seconds=seconds,
            waits=waits,
            stack=stack,
        )
        self.expected = expected


class MessageError(AsyncpipeError, TypeError):
    """An object cannot travel to or from a worker, because it cannot be pickled here or unpickled there."""


class CompileError(AsyncpipeError, RuntimeError):
    """A stage cannot be compiled, or not as a whole. ``stage`` is its index, ``why`` what is in the way."""

    def __init__(self, stage: int, why: str) -> None:
        super().__init__(f"stage {stage} cannot be compiled as it is; leave compile out, or change this: {why}")
        self.stage = stage
        self.why = why


class RemoteError(AsyncpipeError, RuntimeError):
    """What an exception of a worker was, as text: the cause of that exception where it is raised again.

    It is raised itself where the exception cannot be pickled. ``text`` is the traceback in the worker.
    """

    def __init__(self, worker: str, text: str) -> None:
        super().__init__(f"in worker {worker!r}:\n{text}")
        self.worker = worker
        self.text = text


class LauncherError(AsyncpipeError, RuntimeError):
    """Whoever should start workers, or has room for them, does not. The message says what it lacks."""


class WorkerStartError(AsyncpipeError, RuntimeError):
    """A worker did not come up. ``how`` says what became of it, ``stderr`` is the end of what it wrote there."""

    def __init__(self, worker: str, how: str, stderr: str = "") -> None:
        super().__init__(f"worker {worker!r} did not start: it {how}{_last_words(stderr)}")
        self.worker = worker
        self.how = how
        self.stderr = stderr


class WorkerLostError(AsyncpipeError, RuntimeError):
    """A worker has ended, or does not answer any more, while it was needed. Its stages are gone with it.

    ``how`` says what became of it. ``exit_status`` is its status, or the negative number of the signal that ended it;
    ``None`` if that is not known. ``running`` is what ran there, and ``stderr`` the end of what it wrote there.
    ``hang`` is why the watchdog has killed it, if it has.
    """

    def __init__(
        self,
        worker: str,
        how: str,
        exit_status: int | None = None,
        running: Sequence[str] = (),
        stderr: str = "",
        hang: HangError | None = None,
    ) -> None:
        while_running = f", while it ran {', '.join(running)}" if running else ""
        super().__init__(f"worker {worker!r} {how}{while_running}{_last_words(stderr)}")
        self.worker = worker
        self.how = how
        self.exit_status = exit_status
        self.running = tuple(running)
        self.stderr = stderr
        self.hang = hang

    def while_running(self, running: Sequence[str], hang: HangError | None = None) -> WorkerLostError:
        """The same loss, with what ran in the worker, and how it hung."""
        return type(self)(self.worker, self.how, self.exit_status, running, self.stderr, hang or self.hang)


class HostLostError(AsyncpipeError, RuntimeError):
    """A job cannot go on without its lost ``units``: hosts, or workers that name none. ``how`` says why not."""

    def __init__(self, units: Sequence[str], how: str) -> None:
        super().__init__(f"the job has lost {', '.join(units)} and {how}")
        self.units = tuple(units)
        self.how = how


class InvalidTransition(AsyncpipeError, RuntimeError):
    """The scheduler got an event that is not valid in its state, and changed nothing.

    ``story`` is the part of the step's journal that concerns the task, oldest first.
    """

    def __init__(self, message: str, story: Sequence[tuple[float, object]] = ()) -> None:
        lines = "".join(f"\n  {at:.6f} {event}" for at, event in story)
        super().__init__(f"{message}; its journal:{lines or ' empty'}")
        self.story = tuple(story)


def _last_words(stderr: str) -> str:
    return f"; its stderr ends with:\n{stderr}" if stderr else ""


def missing_package(needs: str, extra: str) -> OptionError:
    """The error where a package is not installed: what ``needs`` which, and how the ``extra`` that has it is installed.

    From the checkout, because no index has this package, and pip's own has another project under its name.
    """
    return OptionError(f"{needs}; to install it, in a checkout of asyncpipe: pip install -e '.[{extra}]'")
