"""The states of stages in files of their own, written by whoever has the stage and read by whoever needs some of it.

::

    model-0.pt  model-1.pt  …            entries of the unsplit model's state; a tensor is with the stage that owns it
    optimizer-0.pt  optimizer-1.pt  …    what the stage's optimizer remembers, by name of the parameter

In a folder that a caller asked for, the model's entries may be in ``.safetensors``, or all is in torch's distributed
checkpoint (``dcp_files.py``). Names are those of the unsplit model, so files of any stages can be read by any others.
Replicas of a stage have the same, so one of them writes it. With shards each replica writes what its optimizer
remembers, as if it were a stage behind those of the first one, in pieces (``optimizer_shards.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from asyncpipe.ops.execute.optimizer_states import optimizer_states, with_whole_states
from asyncpipe.ops.model.replicas import Twins
from asyncpipe.ops.model.shipping import state_names
from asyncpipe.ops.model.stage import StagedModel
from asyncpipe.ops.model.state_files import copied_to_cpu, read_state
from asyncpipe.ops.model.weight_files import SAFETENSORS, safe_file

__all__ = ["StoredStages", "copied_stages", "stored_model", "stored_names", "stored_optimizers"]


@dataclass(frozen=True, slots=True)
class StoredStages:
    """Where the states of a whole model are."""

    model: Sequence[Path] = ()
    """Files that have all entries of its state together."""
    optimizers: Sequence[Path] = ()
    """Files of what optimizers remember, by name of the parameter."""
    whole_optimizer: Path | None = None
    """In place of these: a file with the state of one optimizer over all parameters."""
    parameters: Sequence[str] = ()
    """The names of the parameters, by their numbers in the state of that optimizer."""
    dcp: Path | None = None
    """In place of all these: a folder in the layout of torch's distributed checkpoint."""


def copied_stages(
    model: StagedModel, stages: Collection[int], optimizers: Mapping[int, torch.optim.Optimizer], twins: Twins
) -> dict[str, Any]:
    """Copies on the CPU of what ``stages`` have of the model, and of the ``optimizers``' states, by name of the file.

    A stage of a later row writes what its stage of row 0 would. ``twins``: the copies of the model's modules there.
    """
    # All are collected before the first is copied, so that no two tensors can have the same address in turn.
    whole, tensors = model.module.state_dict(), model.module.state_dict(keep_vars=True)
    names = state_names(model)
    states: dict[str, Any] = {}
    for stage in stages:
        row, position = divmod(stage, len(model.stages) // model.rows)
        twin_of = twins.in_row(row)
        mine = copy(whole)  # Keeps the versions of modules that are noted beside their state.
        for name, named in names.items():
            if named.stage != position:
                del mine[name]
            elif (twin := twin_of.get(id(tensors[name]))) is not None:
                mine[name] = twin.detach()
        states[f"model-{position}.pt"] = mine
    for stage, optimizer in optimizers.items():
        states[f"optimizer-{stage}.pt"] = optimizer_states([optimizer], model.module, twins)
    copied: dict[str, Any] = copied_to_cpu(states)
    return copied


def stored_model(stored: StoredStages, names: Collection[str], *, only_shapes: bool = False) -> dict[str, Any]:
    """The entries of these ``names``, as far as the files have them. Their values stay in the files until used.

    Those of torch's distributed checkpoint are read, unless ``only_shapes`` are wanted.
    """
    found: dict[str, Any] = {} if stored.dcp is None else _dcp(stored.dcp, "model", names, only_shapes)
    for path in stored.model:
        if path.suffix == SAFETENSORS:
            with safe_file(path) as file:
                found |= {name: file.get_tensor(name) for name in file.keys() if name in names}  # noqa: SIM118
        else:
            state = read_state(path, mapped=True)
            found.update((name, state[name]) for name in names if name in state)
    return found


def stored_names(stored: StoredStages) -> set[str]:
    """The names of the parameters of which optimizers have remembered something."""
    return {name for each in _stored_optimizers(stored, None) for name in each}


def stored_optimizers(stored: StoredStages, shapes: Mapping[str, torch.Size]) -> dict[str, dict[str, Any]]:
    """What optimizers remembered of the parameters of these names and ``shapes``. As ``stored_model``."""
    found = _stored_optimizers(stored, shapes)
    return with_whole_states([{name: each[name] for name in each if name in shapes} for each in found], shapes)


def _stored_optimizers(stored: StoredStages, names: Collection[str] | None) -> Iterator[Mapping[str, dict[Any, Any]]]:
    """What the files have, with values at least of these ``names``."""
    yield from (read_state(path, mapped=True) for path in stored.optimizers)
    if stored.whole_optimizer is not None:
        states = read_state(stored.whole_optimizer, mapped=True)["state"]
        yield {stored.parameters[number]: state for number, state in states.items()}
    if stored.dcp is not None:
        yield _dcp(stored.dcp, "optim", names, names is None)


def _dcp(
    folder: Path, part: Literal["model", "optim"], names: Collection[str] | None, only_shapes: bool
) -> dict[str, Any]:
    from asyncpipe.ops.execute.dcp_files import read_dcp

    return read_dcp(folder, part, names, only_shapes=only_shapes)
