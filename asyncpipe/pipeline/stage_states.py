"""The states of the stages in this process: given to the controller, taken over from it, written to files and read."""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncpipe.ops.device.wire import from_buffers, to_buffers
from asyncpipe.ops.execute.learning_rates import load_schedule_states, schedule_states
from asyncpipe.ops.execute.optimizer_states import load_optimizer_states, optimizer_states
from asyncpipe.ops.execute.stage_files import StoredStages, copied_stages, stored_model, stored_optimizers
from asyncpipe.ops.model.sharded import sharded_as, whole
from asyncpipe.ops.model.shipping import NamedState, state_names
from asyncpipe.ops.model.state_files import write_state
from asyncpipe.pipeline.build import PipelineParts
from asyncpipe.whole_folder import FolderError

if TYPE_CHECKING:
    from asyncpipe.ops.execute.dcp_files import DcpPart

__all__ = ["StageStates"]

_Given = list[pickle.PickleBuffer] | Awaitable[list[pickle.PickleBuffer]]


class StageStates:
    """In a worker used on its loop. ``Call`` names these methods, and its arguments are theirs."""

    def __init__(self, parts: PipelineParts, check_idle: Callable[[], None], rank: int | None = None) -> None:
        """``check_idle`` raises ``PipelineClosedError`` while a step is under way here.

        ``rank`` is the worker's in the group that has its stages together. Its members make states whole together, and
        the first of them gives them away.
        """
        self._rank = rank
        self._parts = parts
        self._check_idle = check_idle
        self._copies: dict[str, Any] = {}
        """Copies that are still to be written."""

    def model(self) -> _Given:
        """The own entries of the unsplit model's state, as ``to_buffers``; a tensor under its first name only.

        They are the stages' own memory, while no step runs.
        """
        self._check_idle()
        whole = self._parts.module.state_dict()
        state = {name: whole[name] for name, named in self._own_names().items() if named.first == name}
        return self._given(state, "the state of the model")

    def _given(self, state: dict[str, Any], what: str) -> _Given:
        if self._rank is None:
            return to_buffers(state, what)
        # Others of the group may still have to make it anew, for which messages come on this loop.
        return asyncio.to_thread(self._made_whole, state, what)

    def _made_whole(self, state: dict[str, Any], what: str) -> list[pickle.PickleBuffer]:
        found = whole(state)
        return to_buffers({} if self._rank else found, what)

    def load_model(self, buffers: Sequence[Any]) -> None:
        """Take over what concerns the own stages."""
        self._load_model(from_buffers(buffers))

    def _load_model(self, state: Mapping[str, Any]) -> None:
        self._check_idle()
        # What modules load depends on the versions that are noted beside their state. What other workers have goes
        # along as it is, since batch norms make up what they miss.
        own = self._parts.module.state_dict()
        own.update((name, sharded_as(state[name], own[name])) for name in self._own_names() if name in state)
        self._parts.module.load_state_dict(own)
        names = {parameter: name for name, parameter in self._parts.module.named_parameters()}
        for twin, parameter in self._parts.resources.ties.twins.of(names).items():
            if not twin.is_meta and names[parameter] in state:
                twin.data.copy_(state[names[parameter]])

    def optimizers(self) -> _Given:
        """What the own optimizers remember, as ``optimizer_states`` and ``to_buffers``; of replicas, once."""
        self._check_idle()
        resources = self._parts.resources
        stages = self._parts.stages_with_states
        own = [each for stage, each in resources.optimizers.items() if stage in stages]
        states = optimizer_states(own, self._parts.module, resources.ties.twins)
        return self._given(states, "the state of the optimizers")

    def load_optimizers(self, buffers: Sequence[Any]) -> None:
        """Take over those of the own stages."""
        self._load_optimizers(from_buffers(buffers))

    def _load_optimizers(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        self._check_idle()
        resources = self._parts.resources
        load_optimizer_states(resources.optimizers.values(), self._parts.module, states, resources.ties.twins)

    def schedules(self) -> list[pickle.PickleBuffer]:
        """The state of one schedule, if there are any, as ``to_buffers``."""
        self._check_idle()
        return to_buffers(schedule_states(self._parts.resources.schedules), "the state of the schedule")

    def load_schedules(self, buffers: Sequence[Any]) -> None:
        """Have the own schedules go on from it."""
        self._check_idle()
        load_schedule_states(self._parts.resources.schedules, from_buffers(buffers))

    def copy(self, stages: Collection[int], updated: Collection[int]) -> Awaitable[None] | None:
        """Copy what these own ``stages`` have of the model, and the states of the ``updated`` stages' optimizers."""
        self._check_idle()
        if self._rank is not None:
            return asyncio.to_thread(self._copy, stages, updated)
        self._copy(stages, updated)
        return None

    def _copy(self, stages: Collection[int], updated: Collection[int]) -> None:
        resources = self._parts.resources
        optimizers = {stage: each for stage, each in resources.optimizers.items() if stage in updated}
        copies = copied_stages(self._parts.staged, stages, optimizers, resources.ties.twins)
        self._copies = {} if self._rank else copies

    async def write_copies(self, folder: Path, number: int | None = None) -> dict[str, str] | DcpPart:
        """As ``write``, while steps go on."""
        return await asyncio.to_thread(self.write, folder, number)

    def write(self, folder: Path, number: int | None = None) -> dict[str, str] | DcpPart:
        """Write the copies to files in ``folder``; returns the SHA-256 of each, by name.

        ``number``: write them for torch's distributed checkpoint, as its process of that number. Blocks.
        """
        copies, self._copies = self._copies, {}
        if not folder.is_dir():
            raise FolderError(f"{socket.gethostname()} has no such folder; name one that all hosts share")
        if number is None:
            # Each is released when it is written.
            return {name: write_state(folder / name, copies.pop(name)) for name in tuple(copies)}
        from asyncpipe.ops.execute.dcp_files import write_dcp_part

        shapes = {name: each.shape for name, each in self._parts.module.named_parameters()}
        return write_dcp_part(folder, number, copies, shapes)

    def read(self, stored: StoredStages) -> None:
        """Take over what concerns the own stages of states in files."""
        names = self._own_names(any_row=True)
        shapes = {name: each.shape for name, each in self._parts.module.named_parameters() if name in names}
        found = stored_model(stored, names)
        # Of a tensor with several names, files may have it under one of them.
        firsts = {names[name].first: value for name, value in found.items() if name in names}
        self._load_model(
            {name: found.get(name, firsts[each.first]) for name, each in names.items() if each.first in firsts}
        )
        self._load_optimizers(stored_optimizers(stored, shapes))

    def _own_names(self, *, any_row: bool = False) -> dict[str, NamedState]:
        """Of what this worker's stages own in the unsplit model's state, or have in ``any_row``."""
        stages = self._parts.resources.stages
        own = {(stage.position if any_row else stage.index) for stage in stages if not stage.device.is_elsewhere}
        return {name: named for name, named in state_names(self._parts.staged).items() if named.stage in own}
