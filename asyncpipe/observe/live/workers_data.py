"""What a live page shows of workers: who is up, what each holds, and what they have sent each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from asyncpipe.core.records.worker_notes import EdgeTraffic, WorkerChange, WorkerNotes, WorkerState
from asyncpipe.observe.live.step_data import rounded

__all__ = ["SeenWorkers"]


@dataclass(frozen=True, slots=True)
class _Seen:
    state: WorkerState
    pid: int
    devices: tuple[str, ...]
    how: str = ""
    notes: WorkerNotes | None = None


@dataclass(frozen=True, slots=True)
class SeenWorkers:
    """The workers of one run. Nothing changes it: what is new makes another one, so any thread may read it."""

    workers: Mapping[str, _Seen] = field(default_factory=dict)
    sent: Mapping[tuple[str, str], EdgeTraffic] = field(default_factory=dict)
    """By sender and receiver, since the run began."""
    changes: int = 0
    """How often a worker came up or was lost."""

    def changed(self, change: WorkerChange) -> SeenWorkers:
        """With a worker that has come up, or was lost."""
        seen = _Seen(change.state, change.pid, change.devices, change.how)
        return replace(self, workers={**self.workers, change.worker: seen}, changes=self.changes + 1)

    def noted(self, workers: Mapping[str, WorkerNotes]) -> SeenWorkers:
        """With what a step's record tells."""
        seen, sent = dict(self.workers), dict(self.sent)
        for name, notes in workers.items():
            before = seen.get(name)
            how = before.how if before is not None and before.pid == notes.pid else ""
            seen[name] = _Seen(notes.state, notes.pid, notes.devices, how, notes)
            for receiver, more in notes.use.sent.items() if notes.use is not None else ():
                ends = name, receiver
                sent[ends] = sent[ends].plus(more) if ends in sent else more
        return replace(self, workers=seen, sent=sent)

    def data(self) -> list[dict[str, Any]] | None:
        """A row for each worker, as plain data; ``None`` if there is none."""
        return [self._row(name, seen) for name, seen in self.workers.items()] or None

    def _row(self, name: str, seen: _Seen) -> dict[str, Any]:
        notes = seen.notes
        return {
            "name": name,
            "state": seen.state.value,
            "how": seen.how,
            "pid": seen.pid,
            "devices": list(seen.devices),
            "resident": notes.use.resident_bytes if notes is not None and notes.use is not None else None,
            "round_trip": None if notes is None else rounded(notes.round_trip),
            "sent": [
                {
                    "to": receiver,
                    "messages": sent.messages,
                    "bytes": sent.bytes,
                    "waited": rounded(sent.waited_seconds),
                }
                for (source, receiver), sent in self.sent.items()
                if source == name
            ],
        }
