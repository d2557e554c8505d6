"""``pipe.save`` and ``pipe.load``: everything that a loop of one's own goes on from, in a folder.

::

    model.safetensors …   the weights; of a model of transformers what its save_pretrained writes
    weights.pt            of the model's state what these files have not bit by bit under the names of the unsplit model
    optimizer-0.pt …      what the optimizers of each stage remember, by name of the parameter
    pipeline.pt           generator of draws, step count, schedules, states of the caller's objects, extra
    snapshot.json         the manifest (``whole_folder.py``)

With ``format="dcp"`` the first three are in torch's distributed checkpoint (``ops/execute/dcp_files.py``). A save::

    caller      step 50 ─▶ copy ─▶ step 51 ─▶ step 52 ─▶ …     copies are made between two steps, in host memory
                             │
    a thread                 └─▶ 50.incomplete/ ─▶ 50/         by whoever has a stage; the manifest last

The next save, and closing, wait for the one that is being written.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, Protocol, TypeVar, get_args

import torch

from asyncpipe import __version__
from asyncpipe.errors import OptionError, StateDictError
from asyncpipe.ops.execute.optimizer_states import check_optimizer_states
from asyncpipe.ops.execute.stage_files import StoredStages, stored_model, stored_names
from asyncpipe.ops.model.shipping import state_names
from asyncpipe.ops.model.state_files import copied_to_cpu, read_state, write_state
from asyncpipe.ops.model.weight_files import SAFETENSORS, write_weights
from asyncpipe.pipeline.blocking import Blocking
from asyncpipe.pipeline.build import PipelineParts
from asyncpipe.pipeline.feeding import Feeding
from asyncpipe.pipeline.pool import Tenancy
from asyncpipe.pipeline.stages_here import StagesHere
from asyncpipe.runtime.thread_calls import call_for_future
from asyncpipe.runtime.turn import Turn
from asyncpipe.runtime.waits import Waiting
from asyncpipe.whole_folder import (
    MANIFEST,
    check_files,
    file_sum,
    new_folder,
    newest_of,
    read_about,
    sync_folder,
    write_about,
)

__all__ = ["NO_STATE", "Resumable", "SaveFormat", "Saves"]

_logger = logging.getLogger(__name__)

SaveFormat = Literal["safetensors", "dcp"]
_Folder = str | PathLike[str]
_T = TypeVar("_T")
_FORMAT: Final = 1
"""Another one is needed when a reader of this one would misread a folder."""
_REST: Final = "weights.pt"
_PIPELINE: Final = "pipeline.pt"


class Resumable(Protocol):
    """Anything whose state is saved and restored when training goes on, with PyTorch's usual methods."""

    def state_dict(self) -> dict[str, Any]:
        """Nested dicts, lists and tuples of tensors and plain values."""

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Continue from ``state``, whose tensors are on the CPU."""


NO_STATE: Final[Mapping[str, Resumable]] = MappingProxyType({})


@dataclass(eq=False, slots=True)
class Saves:
    """The saves and loads of one pipeline, one after the other, for both kinds of callers."""

    parts: PipelineParts
    tenancy: Tenancy
    feeding: Feeding
    stages: StagesHere
    line: Turn = field(default_factory=Turn)
    """Held from the copies of a save until it is on disk."""

    def save(
        self, folder: _Folder, state: Mapping[str, Resumable], extra: object, layout: SaveFormat, *, blocking: bool
    ) -> Waiting[Future[None]]:
        """As ``Pipeline.save`` in the background."""
        if layout not in get_args(SaveFormat):
            raise OptionError(f"format must be one of {', '.join(get_args(SaveFormat))}, got {layout!r}")
        if layout == "safetensors" and find_spec("safetensors") is None:
            raise OptionError("format='safetensors' needs the package safetensors; install it, or give format='dcp'")
        self.tenancy.check_caller(blocking=blocking)
        final = Path(folder).resolve()
        yield from self.line.acquired(nested=False)
        try:
            write = yield from self._between_steps(self._copied(final, layout, state, extra), blocking=blocking)
            thread = ThreadPoolExecutor(1, thread_name_prefix="asyncpipe-save")
            saving = thread.submit(call_for_future, write)
        except BaseException:
            self.line.release()
            raise
        saving.add_done_callback(partial(self._written, final))
        thread.shutdown(wait=False)
        return saving

    def _written(self, final: Path, saving: Future[None]) -> None:
        self.line.release()
        if not saving.cancelled() and (error := saving.exception()) is not None:
            _logger.error("nothing was saved to %s: %s", final, error)

    def load(self, folder: _Folder, state: Mapping[str, Resumable], *, blocking: bool) -> Waiting[Any]:
        """As ``Pipeline.load``."""
        self.tenancy.check_caller(blocking=blocking)
        yield from self.ended()
        return (
            yield from self._between_steps(self._loaded(newest_of(Path(folder).resolve()), state), blocking=blocking)
        )

    def ended(self) -> Waiting[None]:
        """Wait for the save that is being written, if any."""
        if self.tenancy.is_up:
            self.tenancy.check_process()  # The child of a fork has no thread that writes.
        yield from self.line.acquired(nested=False)
        self.line.release()

    def _between_steps(self, steps: Waiting[_T], *, blocking: bool) -> Waiting[_T]:
        yield from self.tenancy.turn.acquired(nested=blocking)
        try:
            self.tenancy.check()
            self.parts.check_between_steps()
            return (yield from steps)
        finally:
            self.tenancy.turn.release()

    @property
    def _generator(self) -> torch.Generator:
        return self.parts.options.generator or torch.default_generator

    # Saving

    def _copied(
        self, final: Path, layout: SaveFormat, state: Mapping[str, Resumable], extra: object
    ) -> Waiting[Callable[[], None]]:
        """What is left to do when everything is copied."""
        values, is_dcp = self.stages.values, layout == "dcp"
        about_run = {
            "generator": self._generator.get_state(),
            "steps": self.feeding.steps,
            "feed_step": self.feeding.step,
            "optimizers": self.parts.options.optimizer is not None,
            "state": {name: each.state_dict() for name, each in state.items()},
            "extra": extra,
        }
        run: dict[str, Any] = copied_to_cpu(about_run)

        def copy() -> dict[str, Any] | None:
            _check_replaceable(final)
            run["schedules"] = values.schedule_states()
            values.copy_stages(model=is_dcp)
            return None if is_dcp else values.copied_state()

        return partial(self._write, final, values, (yield Blocking(copy)), run)

    def _write(self, final: Path, values: StagesHere, state: dict[str, Any] | None, run: dict[str, Any]) -> None:
        """Write what is copied: ``state`` of the model, if it is not among what the ``values`` write."""
        with new_folder(final, replace=True) as folder:
            sums = values.write_copies(folder, dcp=state is None)
            written = set() if state is None else write_weights(self.parts.module, folder, state)
            run["is_adapter"] = (folder / "adapter_config.json").exists()
            run["names"] = self._needed(is_adapter=run["is_adapter"])
            if state is not None:
                named = state_names(self.parts.staged)
                has = {named[name].first for name in written}
                rest = {name: state[name] for name in run["names"] if named[name].first not in has}
                sums[_REST] = write_state(folder / _REST, rest)
            sums[_PIPELINE] = write_state(folder / _PIPELINE, run)
            for path in folder.rglob("*"):
                if path.is_dir():
                    sync_folder(path)
                elif (name := path.relative_to(folder).as_posix()) not in sums:
                    sums[name] = file_sum(path, sync=True)
            versions = {"asyncpipe": __version__, "torch": str(torch.__version__)}
            write_about(folder, {"format": _FORMAT, "is_dcp": state is None, "versions": versions, "sha256": sums})

    def _needed(self, *, is_adapter: bool) -> list[str]:
        """The names of what a folder must have of the model's state: of one with adapters, what trains and buffers."""
        module = self.parts.module
        names = list(module.state_dict())
        if not is_adapter:
            return names
        trained = {name for name, each in module.named_parameters(remove_duplicate=False) if each.requires_grad}
        return [name for name in names if name in trained | {name for name, _ in module.named_buffers()}]

    # Loading

    def _loaded(self, folder: Path, state: Mapping[str, Resumable]) -> Waiting[Any]:
        stored, run = yield Blocking(partial(self._checked, folder, state))
        # First: it checks that there are as many parameter groups.
        yield Blocking(partial(self.stages.values.load_schedule_states, run["schedules"]))
        yield Blocking(partial(self.stages.values.read_stages, stored))
        self.feeding.steps, self.feeding.step = run["steps"], run["feed_step"]
        for name, each in state.items():
            each.load_state_dict(run["state"][name])
        self._generator.set_state(run["generator"])  # Last: nothing may draw after it.
        return run["extra"]

    def _checked(self, folder: Path, state: Collection[str]) -> tuple[StoredStages, dict[str, Any]]:
        """Where the stages' states are, and the others, when all of it is verified and fits. Blocks."""
        about = read_about(folder, (_FORMAT,))
        sums = about["sha256"]
        if _PIPELINE not in sums:
            raise OptionError(f"{folder}: was not written by save(); a job goes on from its snapshots with --resume")
        check_files(folder, sums)
        weights = [folder / name for name in sorted(sums) if name.endswith(SAFETENSORS) or name == _REST]
        optimizers = [folder / name for name in sums if name.startswith("optimizer-")]
        stored = StoredStages(weights, optimizers, dcp=folder if about["is_dcp"] else None)
        named = state_names(self.parts.staged)
        try:
            run = read_state(folder / _PIPELINE)
            shapes, optimized = stored_model(stored, named, only_shapes=True), stored_names(stored)
        except pickle.UnpicklingError as error:
            raise OptionError(f"{folder}: is refused: it holds more than tensors and plain values") from error
        if missing := sorted(set(state) - run["state"].keys()):
            raise OptionError(f"{folder}: has no state of {', '.join(missing)}")
        if run["optimizers"] != (self.parts.options.optimizer is not None):
            which = "with" if run["optimizers"] else "without"
            raise StateDictError(f"{folder}: was saved {which} optimizer=, unlike this pipeline; give it the same")
        self.stages.check_schedules(run["schedules"])
        firsts = {named[name].first: value for name, value in shapes.items()}
        known, needed = self.parts.module.state_dict(), self._needed(is_adapter=run["is_adapter"])
        found = {name: firsts.get(named[name].first) if name in named else None for name in run["names"]}
        kept = {name: known[name] for name in known.keys() - needed}
        self.stages.check_state(kept | found | shapes, strict=True)
        check_optimizer_states({name: {} for name in optimized}, self.parts.module, tuple)
        return stored, run


def _check_replaceable(final: Path) -> None:
    """Raise ``OptionError`` if ``final`` has something that no save has written, and that a new one would remove."""
    if final.is_file():
        raise OptionError(f"{final} is a file; name a folder")
    if final.is_dir():
        sums = read_about(final, (_FORMAT,))["sha256"] if (final / MANIFEST).exists() else {}
        known = {MANIFEST, *sums} if _PIPELINE in sums else set()
        found = {path.relative_to(final).as_posix() for path in final.rglob("*") if not path.is_dir()}
        if more := sorted(found - known):
            raise OptionError(
                f"{final} has {more[0]}, which save() has not written and would remove; name another folder"
            )
