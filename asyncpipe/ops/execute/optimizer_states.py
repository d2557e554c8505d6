"""The states of the stages' optimizers under the names that their parameters have in the unsplit model.

So they mean the same wherever the model is cut and whoever has the stages. What an optimizer knows besides its
parameters' states, its settings, stays its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from asyncpipe.errors import StateDictError
from asyncpipe.ops.execute.host_optimizer import original, updated_by
from asyncpipe.ops.execute.optimizer_shards import cut, joined, piece_of
from asyncpipe.ops.model.replicas import Twins
from asyncpipe.ops.model.sharded import sharded_as

__all__ = [
    "check_optimizer_states",
    "load_optimizer_states",
    "optimizer_states",
    "states_by_name",
    "with_whole_states",
]


def optimizer_states(
    optimizers: Iterable[torch.optim.Optimizer], module: nn.Module, twins: Twins
) -> dict[str, dict[Any, Any]]:
    """By name of a parameter of ``module``, in its order: what its optimizer remembers of it. Nothing is copied.

    Where replicas have pieces of it: what is remembered of each, by its first element (``with_whole_states``).
    ``twins``: the copies of the parameters in later rows.
    """
    found: dict[nn.Parameter, dict[Any, Any]] = {}
    originals = twins.of(dict.fromkeys(module.parameters()))
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            mine = original(parameter)
            if (piece := piece_of(mine)) is None:
                found.setdefault(originals.get(mine, mine), dict(state))
            else:
                found.setdefault(originals.get(piece.parameter, piece.parameter), {})[piece.start] = state
    return {name: found[each] for name, each in module.named_parameters() if each in found}


def with_whole_states(
    found: Iterable[Mapping[str, Mapping[Any, Any]]], shapes: Mapping[str, torch.Size]
) -> dict[str, dict[str, Any]]:
    """What several have told of their optimizers (``optimizer_states``), together, with pieces joined.

    ``shapes``: those of all parameters. Raises ``KeyError`` for another name.
    """
    together: dict[str, dict[Any, Any]] = {}
    for states in found:
        for name, state in states.items():
            together.setdefault(name, {}).update(state)
    return {
        name: joined(shapes[name], together[name]) if _is_in_pieces(together[name]) else together[name]
        for name in shapes
        if name in together
    }


def _is_in_pieces(state: Mapping[Any, Any]) -> bool:
    return any(isinstance(key, int) for key in state)


def load_optimizer_states(
    optimizers: Iterable[torch.optim.Optimizer],
    module: nn.Module,
    states: Mapping[str, Mapping[str, Any]],
    twins: Twins,
) -> None:
    """Give each optimizer copies of what ``states`` has of its parameters, and nothing else to remember.

    ``twins``: the copies of the parameters of ``module`` in later rows.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    names |= {twin: names[parameter] for twin, parameter in twins.of(names).items()}
    for optimizer in optimizers:
        # torch's own way, which casts and moves each value as its optimizer needs it.
        own = optimizer.state_dict()
        parameters = updated_by(optimizer)
        numbers = [number for group in own["param_groups"] for number in group["params"]]
        found = {}
        for number, parameter in zip(numbers, parameters, strict=True):
            piece = piece_of(parameter)
            owner = parameter if piece is None else piece.parameter
            if names.get(owner) in states:
                state = states[names[owner]]
                found[number] = {
                    key: _copied(
                        sharded_as(value, owner) if piece is None else cut(value, owner, piece.start, parameter.numel())
                    )
                    for key, value in state.items()
                }
        optimizer.load_state_dict({"state": found, "param_groups": own["param_groups"]})


def states_by_name(states: Mapping[str, Any], module: nn.Module) -> Mapping[str, Any]:
    """``states``; or, if that is the ``state_dict()`` of one torch optimizer over all parameters, what it has by name.

    Raises ``StateDictError`` if it cannot be told which parameter a number in it stands for.
    """
    if not {"state", "param_groups"} <= states.keys():
        return states
    groups = states["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    names = [name for group in groups for name in group.get("param_names", ())]
    if not names and len(groups) == 1:
        every = list(module.named_parameters())
        trained = [name for name, parameter in every if parameter.requires_grad]
        names = trained if len(numbers) == len(trained) else [name for name, _ in every]
    if len(names) != len(numbers):
        raise StateDictError(
            f"the state of this optimizer has {len(numbers)} parameters in {len(groups)} groups, and does not say "
            f"which of the model's {sum(1 for _ in module.parameters())} they are; give a state by the parameters' "
            "names, or of an optimizer that was made with model.named_parameters()"
        )
    return {names[numbers.index(number)]: state for number, state in states["state"].items()}


def check_optimizer_states(
    states: Mapping[str, Any], module: nn.Module, remembered: Callable[[], Iterable[str]]
) -> None:
    """Raise ``StateDictError`` unless ``states`` fits the trained parameters of ``module`` and erases nothing.

    ``remembered`` has the names of the parameters that optimizers remember something of.
    """
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if unknown := [name for name in states if name not in trained]:
        raise StateDictError(f"the model trains no parameter {unknown[0]!r}; names are those of named_parameters()")
    for name, state in states.items():
        if not isinstance(state, Mapping):
            raise StateDictError(f"the state of {name!r} must be a dict, got {type(state).__name__}")
        for key, value in state.items():
            if isinstance(value, Tensor) and not _fits(value.shape, trained[name].shape):
                have, want = tuple(value.shape), tuple(trained[name].shape)
                raise StateDictError(f"{key!r} of {name!r} has the shape {have}, and the parameter {want}")
    if len(states) < len(trained) and (lost := [name for name in remembered() if name not in states]):
        raise StateDictError(
            f"the states have nothing of {lost[0]!r} ({len(lost)} such parameters), which the optimizer would forget; "
            "give strict=False to have it forgotten"
        )


def _fits(shape: torch.Size, wanted: torch.Size) -> bool:
    """Whether a state's tensor may belong to a parameter: a number, or reduced over some of its dimensions."""
    if len(shape) != len(wanted):
        return len(shape) < len(wanted)
    return all(mine in (1, other) for mine, other in zip(shape, wanted, strict=True))


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
