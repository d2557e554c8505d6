"""The artifacts of a job, which clients download: its model, loss curve, log and trace.

::

    model.pt, model-N.pt          of a snapshot, the newest one unless a step is named: the snapshot's own file
    losses.jsonl, losses.csv      each step once, in order: from the store
    log.jsonl                     states, notes and snapshots: from the store
    trace.json, timeline.svg      the last steps of its last run, or of the one under way

A name is looked up among those that there are and becomes no path. An open artifact never changes: a
snapshot's file is never written again, and stays readable while its snapshot is removed; all else is written into a
file without a name, which ends with whoever reads it. So memory is bounded, parts that are read at different times fit
together, and each has its SHA-256, by which a reader knows whether it is still the same.

A model is a file of ``torch.save`` that holds tensors and plain values only, which was checked when it was written:
``torch.load(file, weights_only=True)`` reads it and executes nothing. Where stages live in workers, each has a file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO

from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.errors import AsyncpipeError
from asyncpipe.observe.pictures.svg import svg_timeline
from asyncpipe.observe.pictures.trace import to_chrome
from asyncpipe.service.store.job_records import JobEvent, LossRow
from asyncpipe.train.snapshots.format import Manifest, read_manifest
from asyncpipe.train.snapshots.resume import snapshots_in

__all__ = [
    "TIMELINE",
    "TRACE",
    "Artifact",
    "ArtifactError",
    "JobFiles",
    "OpenArtifact",
    "UnknownArtifactError",
    "event_lines",
    "loss_lines",
]

TRACE, TIMELINE = "trace.json", "timeline.svg"
MEDIA = {
    ".pt": "application/octet-stream",
    ".jsonl": "application/jsonl",
    ".csv": "text/csv",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}
MODEL = re.compile(r"model(?:-(0|[1-9][0-9]*))?\.pt")
"""The model's file, or those of its stages, as a snapshot's manifest names them."""
TRIES = 3
"""How often a snapshot is looked up that was removed before it could be opened."""


class UnknownArtifactError(AsyncpipeError, LookupError):
    """The job has no such artifact, or not yet, or no longer; the message says which there are."""


class ArtifactError(AsyncpipeError, OSError):
    """An artifact cannot be read or made now; the message says why."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """One artifact of a job."""

    name: str
    media_type: str
    size: int | None = None
    """In bytes; ``None`` for one that is made when it is opened."""
    sha256: str | None = None
    """Its SHA-256 in hexadecimal; ``None`` for one that is made when it is opened."""
    step: int | None = None
    """The snapshot's, of a model."""


@dataclass(frozen=True, slots=True)
class OpenArtifact:
    """An artifact that is open for reading, until somebody closes its ``file``. Its bytes do not change."""

    name: str
    media_type: str
    sha256: str
    file: BinaryIO


@dataclass(frozen=True)
class JobFiles:
    """The artifacts of the job in ``folder``. Every method blocks."""

    folder: Path
    records: Sequence[StepRecord] = ()
    """The last steps of the run under way."""
    title: str = ""
    """The job's name."""
    has_losses: bool = False
    """Whether the store has steps of it."""

    def found(self) -> list[Artifact]:
        """All artifacts, the models of all snapshots among them, newest first. Raises ``ArtifactError``."""
        models = [model for path in self._snapshots() for model in _models(path)]
        made = [name for name, there in self._there().items() if there]
        return [*models, *(Artifact(name, _media(name)) for name in made)]

    def open(
        self,
        name: str,
        step: int | None = None,
        parts: Iterable[bytes] = (),
    ) -> OpenArtifact:
        """The artifact ``name``; of a model, that of the snapshot after ``step``, by default the newest.

        ``parts`` are the content of one whose rows are in the store. Raises ``UnknownArtifactError``, and
        ``ArtifactError`` if the disk fails or is full.
        """
        try:
            if MODEL.fullmatch(name):
                return self._open_model(name, step)
            if step is None and self._there().get(name):
                return self._made(name, self._parts(name, parts))
        except FileNotFoundError:
            pass  # Deleted meanwhile.
        except OSError as error:
            raise ArtifactError(f"{name} cannot be read: {error.strerror}") from error
        there = list(dict.fromkeys(each.name for each in self.found()))
        which = name if step is None else f"{name} of step {step}"
        raise UnknownArtifactError(f"there is no {which[:100]}; there are {', '.join(there)}")

    def _there(self) -> Mapping[str, bool]:
        """The artifacts other than models, and whether they are there."""
        return {
            "losses.jsonl": self.has_losses,
            "losses.csv": self.has_losses,
            "log.jsonl": True,
            TRACE: bool(self.records) or (self.folder / TRACE).exists(),
            TIMELINE: bool(self.records) or (self.folder / TIMELINE).exists(),
        }

    # Models

    def _snapshots(self) -> list[Path]:
        try:
            return snapshots_in(self.folder / "snapshots")[::-1]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ArtifactError(f"the snapshots cannot be read: {error.strerror}") from error

    def _open_model(self, name: str, step: int | None) -> OpenArtifact:
        for _ in range(TRIES):  # A snapshot may be removed meanwhile; newer ones have taken its place.
            for path in self._snapshots():
                for model in _models(path):
                    if model.name == name and step in (None, model.step):
                        with suppress(FileNotFoundError):
                            file = (path / name).open("rb", buffering=0)
                            return OpenArtifact(name, model.media_type, str(model.sha256), file)
        raise FileNotFoundError

    # What is made

    def _parts(self, name: str, parts: Iterable[bytes]) -> Iterable[bytes]:
        if name.startswith(("losses", "log")):
            return parts
        if not self.records:
            return [(self.folder / name).read_bytes()]
        if name == TRACE:  # Piece by piece, since a call of json.dumps would hold the interpreter all the time.
            return map(str.encode, json.JSONEncoder().iterencode(to_chrome(self.records)))
        return [svg_timeline(self.records[-1], title=self.title).encode()]

    def _made(self, name: str, parts: Iterable[bytes]) -> OpenArtifact:
        # Without a name, so that a killed process leaves nothing.
        file = TemporaryFile(dir=self.folder)  # noqa: SIM115 - its reader closes it
        try:
            file.writelines(parts)
            file.seek(0)
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            file.seek(0)
            return OpenArtifact(name, _media(name), sha256, file)
        except BaseException:
            file.close()
            raise


def _media(name: str) -> str:
    return MEDIA[Path(name).suffix]


def _models(path: Path) -> Iterator[Artifact]:
    """The model's files in the snapshot at ``path``; none if it cannot be read, or is being removed."""
    try:
        manifest: Manifest = read_manifest(path)
        names = sorted((name for name in manifest.sha256 if MODEL.fullmatch(name)), key=_stage)
        found = [
            Artifact(name, _media(name), (path / name).stat().st_size, manifest.sha256[name], manifest.step)
            for name in names
        ]
    except (AsyncpipeError, OSError):
        return
    yield from found


def _stage(name: str) -> int:
    found = MODEL.fullmatch(name)
    return int(found[1] or 0) if found else 0


def loss_lines(rows: Sequence[LossRow], *, as_csv: bool) -> bytes:
    """Rows of ``losses.csv`` or lines of ``losses.jsonl``, in which infinite numbers and NaN are texts."""
    if as_csv:
        return "".join(f"{','.join(map(repr, row))}\r\n" for row in rows).encode()
    tables = ({key: value if isfinite(value) else repr(value) for key, value in row._asdict().items()} for row in rows)
    return "".join(f"{json.dumps(table)}\n" for table in tables).encode()


def event_lines(events: Sequence[JobEvent]) -> bytes:
    """Lines of ``log.jsonl``."""
    return "".join(f"{json.dumps(asdict(event), default=str)}\n" for event in events).encode()
