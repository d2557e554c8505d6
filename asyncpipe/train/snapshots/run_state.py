"""The state of a run besides its model and optimizer, with which it continues as if it had never ended.

``run.pt`` of a snapshot after N steps::

    meter     steps, seconds, tokens, skipped updates, and the figures of the last steps, for their means
    data      how many batches were taken, the generator's state after the last one, the iterator's own state if any
    random    the state of the run's generator, as "cpu"; if the run is alone in its process, also the states of the
              default generators of Python, of numpy and of each CUDA device

All of it is tensors and plain values. Each step draws one number from the run's generator, and all random numbers of
the model follow from that, so dropout continues as it would have. The learning rate follows from the step number.
"""

from __future__ import annotations

import hashlib
from typing import Any

from asyncpipe.core.schedules.protocol import OrderedSchedule, RuledSchedule, Schedule, Shape, flat
from asyncpipe.train.batches import BatchPrefetcher, Mark
from asyncpipe.train.progress import Meter

__all__ = ["RunState", "schedule_sha256"]


class RunState:
    """Step count, figures, data position and random numbers of a run, as one state."""

    def __init__(self, meter: Meter, prefetcher: BatchPrefetcher, mark: Mark | None = None) -> None:
        """``mark``: that of the first batch that is not used yet, if the prefetcher has handed out others since."""
        self._meter = meter
        self._prefetcher = prefetcher
        self._mark = mark

    def state_dict(self) -> dict[str, Any]:
        """The state that the module describes. Blocks, so not for the loop."""
        return {"meter": self._meter.state_dict(), **self._prefetcher.position(self._mark)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``; on the prefetcher's thread, after all other states: nothing may draw after it.

        May block for a long time.
        """
        self._meter.load_state_dict(state["meter"])
        self._prefetcher.restore(state)


def schedule_sha256(schedule: Schedule, shape: Shape) -> str:
    """A SHA-256 that identifies the order of actions that ``schedule`` gives each device at ``shape``."""
    assert isinstance(schedule, OrderedSchedule | RuledSchedule)
    sha256 = hashlib.sha256()
    actions = schedule.order if isinstance(schedule, OrderedSchedule) else schedule.actions
    for device in range(shape.devices):
        sha256.update(" ".join(map(str, flat(actions(device, shape)))).encode() + b"\n")
    return sha256.hexdigest()
