"""What a run is beside its model and optimizer, so that it can go on as if it had never ended.

``run.pt`` of a snapshot after N steps::

    meter     steps, seconds, tokens, and the figures of the last steps, for means over them
    data      how many batches were taken, the generator's state behind the last one, the iterator's own if it has one
    random    the state of every default generator: torch's on the CPU and on each CUDA device, Python's, numpy's

All of it is tensors and plain values. A step takes one number from torch's CPU generator, from which all that the
model draws follows, so that one has to be right for dropout to be the same. The learning rate follows from the step
and the job's ``[training]``, which stands in ``snapshot.json``.
"""

from __future__ import annotations

import hashlib
import logging
import random
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Generator

from asyncpipe.core.schedule import OrderedSchedule, RuledSchedule, Schedule, Shape, flat
from asyncpipe.service.progress import Meter
from asyncpipe.service.settings import Training
from asyncpipe.service.workload import Batch, Workload

__all__ = ["Data", "RunState", "random_state", "schedule_sha256", "set_random_state"]

_logger = logging.getLogger(__name__)


class Data:
    """The job's batches one after the other, with a place in them that can be saved and gone back to.

    Not for two threads at once. What ``Workload.batches`` says is the rule by which the place is found again.
    """

    def __init__(self, workload: Workload, training: Training, stopping: Callable[[], bool] = lambda: False) -> None:
        self._generator = Generator().manual_seed(training.seed)
        self._source: Any = workload.batches(training.batch_size, self._generator)
        self._iterator: Iterator[Batch] | None = None
        self._memoryless = workload.memoryless
        self._stopping = stopping
        self._taken = 0

    def next(self) -> Batch | None:
        """The next batch; ``None`` behind the last one."""
        if self._iterator is None:
            # Not before: what has a state of its own makes its iterator from that.
            self._iterator = iter(self._source)
        batch = next(self._iterator, None)
        self._taken += batch is not None
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The place behind the batch that was taken last."""
        state = {"taken": self._taken, "generator": self._generator.get_state()}
        return {**state, "iterator": self._source.state_dict()} if self._has_state() else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to that place, from the first batch; skips all before it where there is no other way. May block long."""
        if self._has_state() and "iterator" in state:
            self._source.load_state_dict(state["iterator"])
            self._iterator = iter(self._source)
        elif not self._memoryless:
            self._skip(state["taken"], state["generator"])
            return
        self._generator.set_state(state["generator"])  # Last: to make an iterator may take a number from it.
        self._taken = state["taken"]

    def _has_state(self) -> bool:
        return hasattr(self._source, "state_dict") and hasattr(self._source, "load_state_dict")

    def _skip(self, batches: int, generator: torch.Tensor) -> None:
        while self._taken < batches and not self._stopping():
            if self.next() is None:
                break
        if not self._stopping() and not torch.equal(self._generator.get_state(), generator):
            _logger.warning(
                "the job's batches are not those of the snapshot's run (another seed, batch size, data or code, or "
                "randomness that is not the generator's): the run goes on behind %d of its own batches",
                self._taken,
            )


class RunState:
    """Step, figures, data and random numbers of a run, as one state."""

    def __init__(self, meter: Meter, data: Data) -> None:
        self._meter = meter
        self._data = data

    def state_dict(self) -> dict[str, Any]:
        """As the module says."""
        return {"meter": self._meter.state_dict(), "data": self._data.state_dict(), "random": random_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. Load it behind everything else: nothing may draw after it. May block long."""
        self._meter.load_state_dict(state["meter"])
        self._data.load_state_dict(state["data"])
        set_random_state(state["random"])


# Random numbers


def random_state() -> dict[str, Any]:
    """The state of the process's default generators: torch's, Python's, and numpy's where it is loaded."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    if (numpy := sys.modules.get("numpy")) is not None:
        state["numpy"] = _plain(numpy.random.get_state(legacy=False))
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Put the default generators into ``state``; of CUDA devices, those that there were and are."""
    torch.set_rng_state(state["cpu"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        for device, of_device in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(of_device, device)
    if "numpy" in state and find_spec("numpy") is not None:
        import_module("numpy").random.set_state(state["numpy"])


def _plain(value: Any) -> Any:
    """Numpy's state without arrays and numbers of its own: it takes lists as well."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


# The schedule


def schedule_sha256(schedule: Schedule, shape: Shape) -> str:
    """The SHA-256 of what each device does at ``shape``, in its order: another one is another schedule."""
    assert isinstance(schedule, OrderedSchedule | RuledSchedule)
    sha256 = hashlib.sha256()
    for device in range(shape.devices):
        made = schedule.order if isinstance(schedule, OrderedSchedule) else schedule.actions
        sha256.update(" ".join(map(str, flat(made(device, shape)))).encode() + b"\n")
    return sha256.hexdigest()
