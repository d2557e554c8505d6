"""What a live page shows of workers: who is up, what each holds, and what they have sent each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncpipe.core.records.worker_notes import EdgeTraffic, WorkerChange, WorkerNotes, WorkerState
from asyncpipe.observe.live.step_data import rounded

__all__ = ["ShownWorker"]


@dataclass(frozen=True, slots=True)
class ShownWorker:
    """What is known of one worker. Nothing changes it: what is new makes another one, so any thread may read it."""

    state: WorkerState
    pid: int
    devices: tuple[str, ...]
    how: str = ""
    """How it was lost."""
    notes: WorkerNotes | None = None
    """Those of the last step."""
    sent: Mapping[str, EdgeTraffic] = field(default_factory=dict)
    """By receiver, since the run began."""

    def changed(self, change: WorkerChange) -> ShownWorker:
        """After it, or another in its place, has come up or was lost."""
        return ShownWorker(change.state, change.pid, change.devices, change.how, sent=self.sent)

    def noted(self, notes: WorkerNotes) -> ShownWorker:
        """With what a step's record tells."""
        sent = dict(self.sent)
        for receiver, more in notes.use.sent.items() if notes.use is not None else ():
            sent[receiver] = sent[receiver].plus(more) if receiver in sent else more
        how = self.how if self.pid == notes.pid else ""
        return ShownWorker(notes.state, notes.pid, notes.devices, how, notes, sent)

    def data(self, name: str) -> dict[str, Any]:
        """Its row, as plain data."""
        notes = self.notes
        return {
            "name": name,
            "state": self.state.value,
            "how": self.how,
            "pid": self.pid,
            "devices": self.devices,
            "resident": notes.use.resident_bytes if notes is not None and notes.use is not None else None,
            "round_trip": None if notes is None else rounded(notes.round_trip),
            "sent": [
                {"to": to, "messages": sent.messages, "bytes": sent.bytes, "waited": rounded(sent.waited_seconds)}
                for to, sent in self.sent.items()
            ],
        }
