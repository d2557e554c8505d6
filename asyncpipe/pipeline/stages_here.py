"""The two backends of a pipeline, besides its steps: ``StagesHere`` in this process, and ``RemoteStages`` in workers.

Who asks a backend does not ask which it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from asyncpipe.core.records.compilations import Compilation
from asyncpipe.core.schedules.protocol import Schedule
from asyncpipe.errors import PipelineClosedError, StateDictError
from asyncpipe.ops.execute.learning_rates import load_schedule_states, schedule_states
from asyncpipe.ops.execute.optimizer_states import load_optimizer_states, optimizer_states, with_whole_states
from asyncpipe.ops.execute.stage_files import StoredStages
from asyncpipe.ops.model.state_files import copied_to_cpu
from asyncpipe.pipeline.blocking import Blocking
from asyncpipe.pipeline.build import PipelineParts
from asyncpipe.pipeline.stage_states import StageStates
from asyncpipe.pipeline.step_inputs import CutInputs
from asyncpipe.runtime.waits import Waiting

__all__ = ["StagesHere", "StagesToCome"]


class StagesHere:
    """Stages in this process. Blocks; not for the pool's thread."""

    def __init__(self, parts: PipelineParts) -> None:
        self._parts = parts
        self._states = StageStates(parts, parts.check_between_steps)

    def refuse(self, what: str, instead: str) -> None:
        """Raise ``OptionError`` where ``what`` needs the stages in this process, and they are in workers."""

    def check_feed(self) -> None:
        """Raise ``OptionError`` if the feed cannot make mini-batches where the stages are."""

    def check_share(self) -> None:
        """Raise ``OptionError`` if the share of the devices cannot be changed any more."""

    def add_schedule(self, number: int, schedule: Schedule) -> None:
        """Know one that later steps may follow; raise what is in the way of it. ``parts`` have it already."""

    def made(self, number: int) -> Waiting[CutInputs]:
        """The mini-batch that the feed makes for step ``number``. Raises what the feed raises."""
        return (yield Blocking(partial(CutInputs.from_feed, self._parts, number)))  # type: ignore[no-any-return]

    @property
    def compilations(self) -> Iterable[Compilation]:
        """What was compiled of the stages so far."""
        compilers = [stage.compiler for stage in self._parts.resources.stages if stage.compiler is not None]
        return [each for compiler in compilers for each in tuple(compiler.compilations)]

    # Values

    @property
    def values(self) -> StagesHere:
        """Who has the values of model and optimizers now. Raises ``PipelineClosedError`` if they are nowhere."""
        return self

    def state(self) -> dict[str, Any]:
        """The state of the unsplit model, with its names in its order."""
        return self._parts.module.state_dict()

    def load_state(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Load a state of the unsplit model."""
        self._parts.module.load_state_dict(state, strict=strict)

    def optimizer_states(self) -> dict[str, dict[str, Any]]:
        """What the optimizers remember, by name of the parameter."""
        resources = self._parts.resources
        own = optimizer_states(resources.optimizers.values(), self._parts.module, resources.ties.twins)
        return with_whole_states([own], self._shapes())

    def _shapes(self) -> dict[str, torch.Size]:
        return {name: parameter.shape for name, parameter in self._parts.module.named_parameters()}

    def load_optimizer_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Give the optimizers what to remember, by name of the parameter."""
        resources = self._parts.resources
        load_optimizer_states(resources.optimizers.values(), self._parts.module, states, resources.ties.twins)

    def schedule_states(self) -> dict[str, Any]:
        """The state of the learning rate schedules, which all stages have alike; empty if there are none."""
        return schedule_states(self._parts.resources.schedules)

    def load_schedule_states(self, states: Mapping[str, Any]) -> None:
        """Have all schedules go on from it."""
        load_schedule_states(self._parts.resources.schedules, states)

    def check_schedules(self, states: Mapping[str, Any]) -> None:
        """Raise ``StateDictError`` if the pipeline has schedules and ``states`` is empty, or the other way round."""
        if bool(states) != (self._parts.options.lr_schedule is not None):
            has = "has an lr_schedule and the state has none" if not states else "has no lr_schedule, as the state has"
            raise StateDictError(f"the pipeline {has}; give lr_schedule= where the state was saved with one")

    def check_state(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Raise ``StateDictError`` if names or shapes are not those of the unsplit model."""
        known = self._parts.module.state_dict()
        if strict and known.keys() != state.keys():
            missing, more = sorted(known.keys() - state.keys()), sorted(state.keys() - known.keys())
            raise StateDictError(f"the state lacks {missing} and has unknown {more}; give strict=False to ignore that")
        for name, value in known.items():
            shape = getattr(state.get(name), "shape", None)
            if name in state and shape != getattr(value, "shape", None):
                raise StateDictError(f"{name!r} has the shape {shape} in the state, and {value.shape} in the model")

    # Files

    def copied_state(self) -> dict[str, Any]:
        """A copy of ``state()`` on the CPU. Between two steps, as is ``copy_stages``."""
        found: dict[str, Any] = copied_to_cpu(self.state())
        return found

    def copy_stages(self, *, model: bool = True) -> None:
        """Copy what the optimizers remember, and with ``model`` its state as well, for ``write_copies``."""
        stages = range(self._parts.stages_per_row)
        self._states.copy(stages if model else (), self._parts.stages_with_states)

    def write_copies(self, folder: Path, *, dcp: bool = False) -> dict[str, str]:
        """Write the copies to files in ``folder``; the SHA-256 of each, by name. Steps may go on meanwhile.

        ``dcp``: in the layout of torch's distributed checkpoint.
        """
        parts = self._written(folder, dcp=dcp)
        if dcp:
            from asyncpipe.ops.execute.dcp_files import write_dcp_metadata

            return write_dcp_metadata(folder, parts)
        return {name: sha256 for part in parts for name, sha256 in part.items()}

    def _written(self, folder: Path, *, dcp: bool) -> list[Any]:
        """What each process has written of the copies. Nobody writes any more when it ends."""
        return [self._states.write(folder, 0 if dcp else None)]

    def read_stages(self, stored: StoredStages) -> None:
        """Take over what is in files, whose names and shapes are checked."""
        self._states.read(stored)


class StagesToCome(StagesHere):
    """The model here, before its stages are sent to workers: its values are here, and no optimizers yet."""

    def load_optimizer_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        raise PipelineClosedError("optimizers are made in the workers when the pipeline opens; use 'async with' first")

    load_schedule_states = load_optimizer_states
