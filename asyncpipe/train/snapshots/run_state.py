"""What a run is beside its model and optimizer, so that it can go on as if it had never ended.

``run.pt`` of a snapshot after N steps::

    meter     steps, seconds, tokens, skipped updates, and the figures of the last steps, for means over them
    data      how many batches were taken, the generator's state behind the last one, the iterator's own if it has one
    random    the state of the run's generator, as "cpu"; of a run that is alone in its process, also those of the
              default generators of Python, of numpy and of each CUDA device

All of it is tensors and plain values. A step takes one number from the run's generator, from which all that the model
draws follows, so that one has to be right for dropout to be the same. The learning rate follows from the step and the
job's ``[training]``, which stands in ``snapshot.json``.
"""

from __future__ import annotations

import hashlib
from typing import Any

from asyncpipe.core.schedules.protocol import OrderedSchedule, RuledSchedule, Schedule, Shape, flat
from asyncpipe.train.batches import BatchPrefetcher
from asyncpipe.train.progress import Meter

__all__ = ["RunState", "schedule_sha256"]


class RunState:
    """Step, figures, data and random numbers of a run, as one state."""

    def __init__(self, meter: Meter, feed: BatchPrefetcher) -> None:
        self._meter = meter
        self._feed = feed

    def state_dict(self) -> dict[str, Any]:
        """As the module says; not on the loop."""
        return {"meter": self._meter.state_dict(), **self._feed.place()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, in the feed's thread. Load it behind everything else: nothing may draw after it.

        May block long.
        """
        self._meter.load_state_dict(state["meter"])
        self._feed.go_to(state)


def schedule_sha256(schedule: Schedule, shape: Shape) -> str:
    """The SHA-256 of what each device does at ``shape``, in its order: another one is another schedule."""
    assert isinstance(schedule, OrderedSchedule | RuledSchedule)
    sha256 = hashlib.sha256()
    for device in range(shape.devices):
        made = schedule.order if isinstance(schedule, OrderedSchedule) else schedule.actions
        sha256.update(" ".join(map(str, flat(made(device, shape)))).encode() + b"\n")
    return sha256.hexdigest()
