"""The states of model and optimizer of a run whose stages live in workers, which write and read them by themselves.

So no process holds more than its own stages, and the controller holds none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncpipe.ops.execute.stage_files import StoredStages
from asyncpipe.pipeline.remote_stages import RemoteStages
from asyncpipe.train.adamw import StagedAdamW
from asyncpipe.train.snapshots.format import BY_STAGE, NAMES, Snapshot

__all__ = ["StagesInWorkers"]


class StagesInWorkers:
    """Those of a pipeline with ``stages`` in workers and this optimizer. Blocks; not for the loop's thread."""

    def __init__(self, stages: RemoteStages, optimizer: StagedAdamW) -> None:
        self._stages = stages
        self._optimizer = optimizer

    @property
    def are_left(self) -> bool:
        """Whether workers that are not lost have the states of all stages."""
        return self._stages.who_has_states() is not None

    def copy(self) -> dict[str, Any]:
        """Copy what each worker has, for ``write``; returns the rest of the optimizer's state. Between two steps."""
        self._stages.copy_stages()
        return {**self._optimizer.settings_dict(), NAMES: self._optimizer.names()}

    def write(self, folder: Path) -> dict[str, str]:
        """Write the copies to files in ``folder``; their checksums. Steps may go on meanwhile."""
        return self._stages.write_copies(folder.absolute())

    def read(self, snapshot: Snapshot) -> None:
        """Go on from ``snapshot``, of whatever layout, whose tensors are mapped."""
        self._optimizer.check_settings(snapshot.states["optimizer"])
        model, optimizer = ([file.absolute() for file in snapshot.files(name)] for name in ("model", "optimizer"))
        if snapshot.manifest.format == BY_STAGE:
            stored = StoredStages(model, optimizer[1:])
        else:
            stored = StoredStages(model, (), optimizer[0], self._optimizer.names())
        self._stages.check_state(snapshot.states["model"], strict=True)
        self._stages.read_stages(stored)
