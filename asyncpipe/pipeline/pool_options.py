"""The options of a device pool, and ``takes``: a constructor that takes the fields of a dataclass as its arguments.

Each option is declared, documented and checked here and nowhere else. Importing this module loads no torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Concatenate, Literal, ParamSpec, TypeAlias, TypeVar, get_args

from asyncpipe.core.checks import check_choice, check_positive
from asyncpipe.errors import ArgumentTypeError, OptionError

if TYPE_CHECKING:
    from asyncpipe.core.policies.policy import MakePolicy
    from asyncpipe.runtime.executor import Executor
    from asyncpipe.runtime.workers.launcher import Launcher

__all__ = ["CONTROLLERS_ONLY", "PoolOptions", "TransportName", "takes"]

CONTROLLERS_ONLY = "controllers_only"
"""In the metadata of an option: the pool of a worker does not have it."""

TransportName: TypeAlias = Literal["shared_memory", "host_memory", "connection", "nccl"]
"""The names of the transports, which ``ops/edges/connect.py`` implements."""

_Parameters = ParamSpec("_Parameters")
_Self = TypeVar("_Self")
_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """How a device pool runs tasks. Raises ``OptionError`` for a value that is not allowed."""

    in_flight: int = 16
    """How many tasks may be issued to the device and not completed yet. A device with a program (an ordered schedule on
    devices that no named jobs share) counts those of a step on all its lanes, and has fewer, at least 4, if those take
    more than 20 ms; otherwise each lane is counted by itself, and where jobs with names share it, each job. The
    scheduler checks it."""
    intra_op_threads: int = 1
    """torch's intra-op threads on the thread of each CPU device."""
    policy: MakePolicy | None = None
    """Makes the policy of a lane, which decides the ready task that runs there next; see ``asyncpipe.Policy``. By
    default one pipeline runs its schedule's order or rule, and several get fair shares."""
    workers: str | Mapping[str, str] | Launcher = field(default="threads", metadata={CONTROLLERS_ONLY: True})
    """Where the devices' threads are: ``"threads"`` of this process, or worker ``"processes"`` of this machine, one for
    each accelerator and each logical CPU device. ``"auto"`` chooses one of the two for a pipeline of its own: on
    accelerators, with a ``sample``, by how busy the interpreter's lock is in a measured step
    (``StepNotes.why_workers``); else threads. A mapping from device to the name of its worker makes other groups.
    ``"ray"`` and ``"torchrun"`` are ``RayWorkers()`` and ``TorchrunWorkers()``, and any launcher (``Launcher``) may be
    given."""
    transport: TransportName = field(default="shared_memory", metadata={CONTROLLERS_ONLY: True})
    """How tensors get from one worker to another, which changes no bit: by ``"shared_memory"`` on one machine, a GPU's
    between workers that have one each, and by the edge's own connection between two machines; by ``"host_memory"``,
    which is the same without memory of GPUs; by the ``"connection"`` everywhere; or by ``"nccl"`` from device to
    device, where each worker has one CUDA device, also between machines. By connections, and where a worker has
    several devices, tensors of CUDA devices travel through the host."""
    interface: str | None = field(default=None, metadata={CONTROLLERS_ONLY: True})
    """Where workers of other machines reach a worker: the name of a network interface (``"eth0"``), one of its
    addresses, or a network that it is in (``"10.1.0.0/16"``). By default where the controller
    reaches it."""
    hang_seconds: float | None = field(default=60.0, metadata={CONTROLLERS_ONLY: True})
    """A task hangs if it does not end within so many seconds, nor within ``hang_factor`` times what it usually takes
    (the first of its kind: within ten times these seconds). Its step fails with an error that names it; its worker is
    killed, or its thread given up, and then the pipeline takes no more steps. ``None``: tasks may take any time."""
    hang_factor: float = field(default=20.0, metadata={CONTROLLERS_ONLY: True})
    """How much longer than usually a task may take."""
    worker_path: Sequence[str] = field(default=(), metadata={CONTROLLERS_ONLY: True})
    """Folders in which workers look for modules before those of ``sys.path``."""
    executors: Callable[[str], Executor] | None = field(default=None, metadata={CONTROLLERS_ONLY: True})
    """Makes the executor of a device from the device's name; by default a thread (see also ``asyncpipe.testing``)."""

    def __post_init__(self) -> None:
        check_positive("intra_op_threads", self.intra_op_threads)
        if not isinstance(self.workers, Mapping):
            self._check_workers()
        check_choice("transport", self.transport, get_args(TransportName))
        if self.workers == "threads" and self.transport != "shared_memory":
            raise OptionError(f"transport={self.transport!r} is for workers; leave it out, or use workers='processes'")
        if self.has_workers and self.executors is not None:
            raise OptionError("executors run tasks in this process; leave them out, or use workers='threads'")

    def _check_workers(self) -> None:
        if isinstance(self.workers, str):
            check_choice("workers", self.workers, ("threads", "processes", "auto", "ray", "torchrun"))
        elif not all(callable(getattr(self.workers, name, None)) for name in ("prepare", "start", "close")):
            raise OptionError(
                "workers must be 'threads', 'processes', 'auto', 'ray', 'torchrun', a mapping, or a launcher with the "
                f"methods prepare, start and close, got {self.workers!r}"
            )

    @property
    def on_hosts(self) -> bool:
        """Whether workers may be on other machines, so that devices are looked for there."""
        if isinstance(self.workers, Mapping):
            return False
        return self.workers not in ("threads", "processes", "auto")

    @property
    def has_workers(self) -> bool:
        """Whether the devices are in worker processes."""
        return self.workers not in ("threads", "auto")


def takes(
    make: Callable[_Parameters, _Made],
) -> Callable[[Callable[[_Self, _Made], None]], Callable[Concatenate[_Self, _Parameters], None]]:
    """Decorator of an ``__init__``: callers give the arguments of ``make``, and ``__init__`` gets what it returns.

    The signature is that of ``make``, for type checkers, editors and ``inspect``.
    """

    def decorate(init: Callable[[_Self, _Made], None]) -> Callable[Concatenate[_Self, _Parameters], None]:
        def construct(self: _Self, /, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> None:
            _check_arguments(type(self).__name__, signature, args, kwargs)
            init(self, make(*args, **kwargs))

        receiver = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        signature = inspect.signature(make)
        parameters = signature.parameters.values()
        construct.__signature__ = inspect.Signature([receiver, *parameters])  # type: ignore[attr-defined]
        return construct

    return decorate


def _check_arguments(
    name: str, signature: inspect.Signature, args: Sequence[object], kwargs: Mapping[str, object]
) -> None:
    """Raise ``ArgumentTypeError`` if these are not the arguments of a call of ``name``."""
    for key in kwargs:
        if key not in (known := signature.parameters):
            close = get_close_matches(key, known, 1) or [each for each in known if each.startswith(f"{key}_")]
            meant = f"; did you mean {close[0]!r}?" if close else ""
            raise ArgumentTypeError(f"{name} has no argument {key!r}{meant}")
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentTypeError(f"{name}: {error}") from None
