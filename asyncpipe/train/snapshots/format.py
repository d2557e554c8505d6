"""The files of a snapshot: written as a whole or not at all, and verified when they are read.

::

    step-N/   model.pt        the model's state, with the keys of the unsplit model
              optimizer.pt    the optimizer's state, in the order of the unsplit model's parameters
              run.pt          step, random numbers, position in the data, recent losses (see ``run_state.py``)
              NAME.pt         further states, which the workload adds
              snapshot.json   the manifest: a description, the SHA-256 of each other file, and a checksum of itself

Where stages live in workers, each writes its own files, and readers put them together (format 2)::

    step-N/   model-0.pt  model-1.pt  …   each stage's part of the model's state, with the same keys
              optimizer-0.pt  …           what each stage's optimizer remembers, by name of the parameter
              optimizer.pt                the rest of its state, and the names of parameters by their numbers

The folder is written as a whole (``whole_folder.py``). Files are read by ``torch.load(weights_only=True)``, here and by
anyone else, which executes nothing that is pickled in them; a state that it could not load is not written.
"""

from __future__ import annotations

import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from asyncpipe.errors import OptionError
from asyncpipe.ops.execute.optimizer_states import with_whole_states
from asyncpipe.ops.model.state_files import read_state, write_state
from asyncpipe.whole_folder import (
    MANIFEST,
    FolderError,
    check_files,
    manifest_checksum,
    needs_intervention,
    new_folder,
    read_about,
    unreadable,
    write_about,
)

__all__ = [
    "INCOMPLETE_NAME",
    "NAMES",
    "SNAPSHOT_NAME",
    "STATE_NAME",
    "FolderError",
    "Manifest",
    "Snapshot",
    "manifest_checksum",
    "needs_intervention",
    "read_manifest",
    "read_snapshot",
    "write_snapshot",
]

WHOLE: Final = 1
BY_STAGE: Final = 2
"""Versions of the format: that of a file for each state, and that where stages have files of their own. Another one is
needed when a reader of these would misread a snapshot."""

SNAPSHOT_NAME = re.compile(r"step-(0|[1-9][0-9]*)")
INCOMPLETE_NAME = re.compile(r"step-[0-9]+\.incomplete")
FILE_NAME = re.compile(r"([A-Za-z][A-Za-z0-9_]*)(?:-(0|[1-9][0-9]*))?\.pt")
"""The allowed names of files of states: ``NAME.pt``, or ``NAME-3.pt`` for what is of stage 3."""
STATE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
"""The allowed names of states; the file of a state is ``NAME.pt``."""

NAMES: Final = "names"
"""The key in ``optimizer.pt`` of the names of parameters by their numbers, where stages have files of their own."""


class Manifest(BaseModel):
    """What ``snapshot.json`` says, without its checksum. Keys of other versions are ignored."""

    model_config = ConfigDict(strict=True, frozen=True)

    format: Literal[1, 2] = WHOLE
    step: int = Field(ge=0)
    """Number of finished steps."""
    number: int = Field(default=0, ge=0)
    """Number of the snapshot, from 1, counted over all processes of the run."""
    job: str | None = None
    schedule: str | None = None
    schedule_sha256: str | None = None
    """Identifies the order of tasks that the schedule gave each device; see ``run_state.schedule_sha256``."""
    parameters: dict[str, Any] = {}
    """The tables of the job file, as JSON, for comparison with the job that resumes."""
    versions: dict[str, str] = {}
    sha256: dict[Annotated[str, Field(pattern=rf"^{FILE_NAME.pattern}$")], str] = {}
    """The SHA-256 of each other file, by file name."""


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The content of a snapshot, in memory."""

    path: Path
    manifest: Manifest
    states: dict[str, Any] = field(repr=False)
    """The states by name, with tensors on the CPU."""

    def files(self, name: str) -> list[Path]:
        """Where the state of this name is: in one file, or one for each stage."""
        found = [(match, file) for file in self.manifest.sha256 if (match := FILE_NAME.fullmatch(file))]
        mine = [(int(match[2] or -1), file) for match, file in found if match[1] == name]
        return [self.path / file for _, file in sorted(mine)]

    @property
    def step(self) -> int:
        """Number of finished steps."""
        return self.manifest.step


def write_snapshot(
    final: Path,
    states: Mapping[str, Any],
    manifest: Manifest,
    write_stages: Callable[[Path], Mapping[str, str]] | None = None,
) -> Path:
    """Write a snapshot to ``final``: a file per state, and the manifest with their checksums; returns ``final``.

    ``write_stages`` writes files of the stages to a folder, and returns their checksums when nobody writes there any
    more, as it also raises only then.

    Blocks until everything is on disk. Raises ``OSError``, or ``TypeError`` for a state that could not be loaded
    safely; an incomplete snapshot is then removed.
    """
    with new_folder(final) as incomplete:
        sums = {f"{name}.pt": write_state(incomplete / f"{name}.pt", state) for name, state in states.items()}
        if write_stages is not None:
            sums.update(write_stages(incomplete))
        form = WHOLE if write_stages is None else BY_STAGE
        write_about(incomplete, manifest.model_copy(update={"format": form, "sha256": sums}).model_dump(mode="json"))
    return final


# Reading


def read_snapshot(path: Path, needed: Iterable[str] = (), *, mapped: bool = False) -> Snapshot:
    """The snapshot at ``path``, with all checksums verified. Blocks; executes no code from the files.

    ``mapped``: tensors take no memory, since their values stay in the files until they are used. Of a parameter whose
    optimizer's state is in pieces there is then one of them: workers read what they need.

    Raises ``OptionError`` with a line that says what is wrong: a file is missing, truncated or changed, holds more than
    tensors and plain values, one of the states ``needed`` is missing, or the format is another one. Raises
    ``FolderError`` if the system cannot read the files now, which says nothing about the snapshot.
    """
    manifest = read_manifest(path)
    there = {match[1] for name in manifest.sha256 if (match := FILE_NAME.fullmatch(name))}
    if missing := [f"{name}.pt" for name in needed if name not in there]:
        raise OptionError(f"{path}: has no {', '.join(missing)}")
    check_files(path, manifest.sha256)
    files = {name.removesuffix(".pt"): _read_state(path, name, mapped=mapped) for name in manifest.sha256}
    return Snapshot(path, manifest, files if manifest.format == WHOLE else _put_together(path, files, mapped=mapped))


def _put_together(path: Path, files: Mapping[str, Any], *, mapped: bool) -> dict[str, Any]:
    """The states of a snapshot whose stages have files of their own, as one file each would have them."""
    states = {name: state for name, state in files.items() if "-" not in name}
    model: Any = OrderedDict()
    try:
        optimizer = dict(states["optimizer"])
        numbers = {name: number for number, name in enumerate(optimizer.pop(NAMES))}
        for name, state in files.items():
            if name.startswith("model-"):
                model.update(state)
                model._metadata = state._metadata  # The versions of all modules.
        own = [state for name, state in files.items() if name.startswith("optimizer-")]
        told = {name: state for states in own for name, state in states.items()}
        unknown = told.keys() - numbers.keys()
        remembered = told if mapped else with_whole_states(own, {name: model[name].shape for name in numbers})
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise OptionError(f"{path}: the files of its stages do not belong together") from error
    if unknown:
        raise OptionError(f"{path}: the files of its stages do not belong together")
    optimizer["state"] = {number: remembered[name] for name, number in numbers.items() if name in remembered}
    return {**states, "model": model, "optimizer": optimizer}


def read_manifest(path: Path) -> Manifest:
    """The manifest of the snapshot at ``path``; raises what ``read_snapshot`` raises. Blocks."""
    about = read_about(path, (WHOLE, BY_STAGE))
    try:
        return Manifest.model_validate(about)
    except ValidationError as error:
        raise OptionError(f"{path}: {MANIFEST} does not describe a snapshot") from error


def _read_state(path: Path, name: str, *, mapped: bool) -> Any:
    try:
        return read_state(path / name, mapped=mapped)
    except MemoryError:
        raise
    except OSError as error:
        raise unreadable(path, name, error) from error
    except pickle.UnpicklingError as error:
        # The checksum was right, so somebody has written it like this; what it would execute is refused.
        raise OptionError(f"{path}: {name} is refused: it holds more than tensors and plain values") from error
    except Exception as error:
        raise OptionError(f"{path}: {name} is no file of torch.save: {type(error).__name__}") from error
