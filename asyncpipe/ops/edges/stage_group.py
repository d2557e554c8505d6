"""The process group of the workers that share a stage, which its collectives use: gloo's, made anew after each failure.

torch, DTensor and FSDP2 keep the object that they are given, so that one stays, and has a group of gloo inside. The
members find each other by values that the controller passes on from one to all others. So no port is opened for that;
gloo itself opens one for each group, where it does not ask who comes::

    worker a                       controller                       worker b
      StageGroup ── "0/rank 0" ───────▶ │ ───────────────────────────▶ Exchange
      Exchange ◀─────────────────────── │ ◀────────── "0/rank 1" ── StageGroup

Gloo cannot be interrupted. A member that waits in a collective waits until the others come, or go: who has failed, or
has stopped, drops its group, which breaks the connections to the others, and the collectives there raise. While a group
is made that is not so. So nobody begins to make it before all are there, and whoever has made it waits until all have;
whoever is not going to come in an epoch says that it is gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import Any

from torch import distributed
from torch.distributed import HashStore, ProcessGroup, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from asyncpipe.errors import EdgeError, OptionError
from asyncpipe.ops.torch_internals import GROUP_CALLS, gloo_group

__all__ = ["Exchange", "StageGroup"]

MEET_SECONDS = 60.0
GONE = "gone"
_numbers = count()


class Exchange:
    """What the members of a group tell each other while it is made, by epoch and key. From any thread."""

    def __init__(self) -> None:
        self._tell: Callable[[str, bytes], None] | None = None
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._has_failed = False

    def name(self, tell: Callable[[str, bytes], None]) -> None:
        """The members are known: ``tell`` has all others call ``put`` with a key and a value."""
        self._tell = tell

    def put(self, key: str, value: bytes) -> None:
        """Another member says this."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def say(self, key: str, value: bytes) -> None:
        """Say it to the others, and know it here."""
        assert self._tell is not None
        self.put(key, value)
        self._tell(key, value)

    def begin(self, epoch: int) -> None:
        """Forget older epochs."""
        with self._changed:
            self._values = {key: value for key, value in self._values.items() if int(key.partition("/")[0]) >= epoch}

    def fail(self) -> None:
        """A member is lost, or the pipeline is given up: nobody waits any more."""
        with self._changed:
            self._has_failed = True
            self._changed.notify_all()

    def has(self, keys: Sequence[str]) -> bool:
        """Whether all these were said."""
        return all(key in self._values for key in keys)

    def get(self, epoch: int, key: str, until: float) -> bytes:
        """What was said. Raises ``EdgeError`` if somebody is gone, and at the monotonic time ``until``."""
        wanted, gone = f"{epoch}/{key}", f"{epoch}/{GONE}"
        with self._changed:
            while wanted not in self._values:
                left = until - time.monotonic()
                if self._has_failed or gone in self._values or left <= 0:
                    why = "is gone or has failed" if left > 0 else "did not come"
                    raise EdgeError(f"the group of a stage could not be made: another worker of it {why}")
                self._changed.wait(left)
            return self._values[wanted]


class _EpochStore(Store):
    """The exchange in one epoch, as torch asks for it."""

    def __init__(self, exchange: Exchange, epoch: int) -> None:
        super().__init__()
        self._exchange = exchange
        self._epoch = epoch
        self._until = time.monotonic() + MEET_SECONDS

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._exchange.say(f"{self._epoch}/{key}", bytes(value))

    def meet(self, what: str, rank: int, size: int) -> None:
        """This member is here, or is made; wait until all are."""
        self.set(f"{what} {rank}", b"")
        self.wait([f"{what} {other}" for other in range(size)])

    def get(self, key: str) -> bytes:
        return self._exchange.get(self._epoch, key, self._until)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        return self._exchange.has([f"{self._epoch}/{key}" for key in keys])


class StageGroup(ProcessGroup):
    """The process's default group in torch.

    Its collectives wait on the host, so a failure is raised where it happens.
    """

    def __init__(self, worker: str, rank: int, size: int, address: str, exchange: Exchange) -> None:
        """``address`` is that at which the others reach this machine. Raises ``OptionError`` if there is a group."""
        if distributed.is_initialized():
            raise OptionError(
                f"worker {worker!r} has a default process group already, of another pipeline whose stages shard "
                "themselves or of the model's own code; give this pipeline a pool of its own, or close the other one"
            )
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._name = ""
        self._place = rank, size, address
        self.exchange = exchange
        self._epoch = 0
        self._inner: ProcessGroup | None = None
        self._is_dropped = False
        self._turn = threading.Lock()
        backend = f"asyncpipe{next(_numbers)}"
        distributed.Backend.register_backend(backend, lambda *_: self, devices=["cpu"])
        distributed.init_process_group(backend, store=HashStore(), rank=rank, world_size=size)
        self.mesh = DeviceMesh.from_group(self, "cpu", mesh_dim_names=("group",))
        """The group as a mesh of one dimension."""

    def advance(self, epoch: int) -> None:
        """Begin ``epoch``, if it is a later one, with a new group, which the first collective makes."""
        if epoch > self._epoch:
            self.drop(tells=False)
            self._epoch = epoch
            self._is_dropped = False
            self.exchange.begin(epoch)

    def drop(self, *, tells: bool = True) -> None:
        """Nothing runs here that uses the group, and it will not be used in this epoch: end what others do with it."""
        if tells and not self._is_dropped:
            self.exchange.say(f"{self._epoch}/{GONE}", b"")
        self._is_dropped = True
        self._inner = None

    def close(self) -> None:
        """Leave torch no group."""
        self.drop()
        with suppress(ValueError, AssertionError):
            distributed.destroy_process_group()

    def call(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Do a collective and wait for it. Raises ``EdgeError`` where another member is gone."""
        try:
            with self._turn:
                if self._is_dropped:
                    raise EdgeError("the group of a stage is not used any more: its step has failed or was stopped")
                if self._inner is None:
                    rank, size, address = self._place
                    store = _EpochStore(self.exchange, self._epoch)
                    store.meet("here", rank, size)
                    made = gloo_group(store, rank, size, address, MEET_SECONDS)
                    store.meet("made", rank, size)
                    self._inner = made
            work = getattr(self._inner, name)(*arguments, **options)
            if work is not None:
                work.wait()
            return work
        except RuntimeError as error:
            if isinstance(error, EdgeError):
                raise
            raise EdgeError(
                f"{name} failed, since another worker of the stage's group is gone or has failed"
            ) from error

    # What torch asks of a group besides collectives.

    def getBackendName(self) -> str:
        return "gloo"

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        return "the workers of a stage"

    def _set_group_desc(self, _: str) -> None:
        """It has one."""


def _forwarded(name: str) -> Any:
    def call(self: StageGroup, *arguments: Any, **options: Any) -> Any:
        return self.call(name, arguments, options)

    return call


for _name in GROUP_CALLS:
    setattr(StageGroup, _name, _forwarded(_name))
