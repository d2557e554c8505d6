"""The states of stages in files of their own, written by whoever has the stage and read by whoever needs some of it.

::

    model-0.pt  model-1.pt  …            entries of the unsplit model's state; a tensor is with the stage that owns it
    optimizer-0.pt  optimizer-1.pt  …    what the stage's optimizer remembers, by name of the parameter

Names are those of the unsplit model, so files of any stages can be read by any others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from asyncpipe.ops.execute.optimizer_states import optimizer_states
from asyncpipe.ops.model.replicas import Twins
from asyncpipe.ops.model.shipping import state_names
from asyncpipe.ops.model.stage import StagedModel
from asyncpipe.ops.model.state_files import copied_to_cpu, read_state

__all__ = ["StoredStages", "copied_stages", "stored_model", "stored_optimizers"]


@dataclass(frozen=True, slots=True)
class StoredStages:
    """Where the states of a whole model are."""

    model: Sequence[Path]
    """Files that have all entries of its state together."""
    optimizers: Sequence[Path]
    """Files of what optimizers remember, by name of the parameter."""
    whole_optimizer: Path | None = None
    """In place of these: a file with the state of one optimizer over all parameters."""
    parameters: Sequence[str] = ()
    """The names of the parameters, by their numbers in the state of that optimizer."""


def copied_stages(
    model: StagedModel, stages: Collection[int], optimizers: Mapping[int, torch.optim.Optimizer], twins: Twins
) -> dict[str, Any]:
    """Copies of the states of some ``stages`` on the CPU, by name of their files."""
    # All are collected before the first is copied, so that no two tensors can have the same address in turn.
    whole = model.module.state_dict()
    names = state_names(model)
    states: dict[str, Any] = {}
    for stage in stages:
        mine = copy(whole)  # Keeps the versions of modules that are noted beside their state.
        for name, named in names.items():
            if named.stage != stage:
                del mine[name]
        states[f"model-{stage}.pt"] = mine
        own = [optimizers[stage]] if stage in optimizers else []
        states[f"optimizer-{stage}.pt"] = optimizer_states(own, model.module, twins)
    copied: dict[str, Any] = copied_to_cpu(states)
    return copied


def stored_model(stored: StoredStages, names: Collection[str]) -> dict[str, Any]:
    """The entries of these ``names``, as far as the files have them. Their values stay in the files until used."""
    found: dict[str, Any] = {}
    for path in stored.model:
        state = read_state(path, mapped=True)
        found.update((name, state[name]) for name in names if name in state)
    return found


def stored_optimizers(stored: StoredStages, module: nn.Module) -> dict[str, dict[str, Any]]:
    """What optimizers remembered of the parameters of ``module`` that are here. As ``stored_model``."""
    here = {name for name, parameter in module.named_parameters() if not parameter.is_meta}
    return {name: state for name, state in _stored_optimizers(stored) if name in here}


def _stored_optimizers(stored: StoredStages) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in stored.optimizers:
        yield from read_state(path, mapped=True).items()
    if stored.whole_optimizer is not None:
        states = read_state(stored.whole_optimizer, mapped=True)["state"]
        yield from ((stored.parameters[number], state) for number, state in states.items())
