"""The model of a pipeline whose stages live in workers: its state is fetched, and its parameters are not here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncpipe.ops.execute.stage_files import StoredStages
from asyncpipe.pipeline.pool import DevicePool
from asyncpipe.pipeline.remote_stages import RemoteStages

__all__ = ["RemoteModel"]


class RemoteModel:
    """Blocks the calling thread until the workers have answered; the pool's loop is in a thread of its own."""

    def __init__(self, pool: DevicePool, stages: RemoteStages) -> None:
        self._pool = pool
        self._stages = stages

    @property
    def has_left(self) -> bool:
        """As ``RemoteStages.has_left``."""
        return self._stages.has_left

    def state_dict(self) -> dict[str, Any]:
        """The state of the unsplit model, on the CPU."""
        self._pool.check()
        return self._pool.call(self._stages.state())

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Load a state of the unsplit model."""
        self._pool.check()
        self._pool.call(self._stages.load_state(state, strict=strict))

    def optimizer_states(self) -> dict[str, dict[str, Any]]:
        """What the optimizers remember, by name of the parameter, on the CPU."""
        self._pool.check()
        return self._pool.call(self._stages.optimizer_states())

    def load_optimizer_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Give the optimizers what to remember, by name of the parameter."""
        self._pool.check()
        self._pool.call(self._stages.load_optimizer_states(states))

    # Files of stages (``ops/execute/stage_files.py``) in a folder that all workers see

    def copy_stages(self) -> None:
        """Have each worker copy the states of its stages and of their optimizers, for ``write_copies``."""
        self._pool.check()
        self._pool.call(self._stages.copy_stages())

    def write_copies(self, folder: Path) -> dict[str, str]:
        """Have each worker write its copies; the SHA-256 of each file, by name. Steps go on meanwhile.

        Returns when all are on disk. Raises the first error when nobody writes any more.
        """
        self._pool.check()
        return self._pool.call(self._stages.write_copies(folder))

    def read_stages(self, stored: StoredStages, state: Mapping[str, Any]) -> None:
        """Have each worker read what its stages need of files, whatever stages these were written for.

        ``state`` is that of the unsplit model in these files, of which only names and shapes are looked at here.
        """
        self._pool.check()
        self._pool.call(self._stages.read_stages(stored, state))

    def change_schedule(self) -> None:
        """Have the workers follow the schedule that the controller follows now."""
        if self._pool.is_open:
            self._pool.call(self._stages.change_schedule())
