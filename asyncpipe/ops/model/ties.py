"""Placement, and what stages on different devices share: tied parameters and buffers.

A parameter that stages on several devices use has one owner, the first of them; it is what the optimizer and the
state dict see. The others work with a *replica* on their own device, inside a shadow of their module, so that the
model itself stays as it was built. A step brings the owner's values to the replicas before their first forward and
adds their gradients to the owner's behind their last backward, both as tasks (``core/graph/lower.py``)::

    model      embedding.weight ═════════════════ head.weight        one nn.Parameter
    stage 0    owner ───C(0>3)──▶ replica        stage 3's shadow of head
                 ▲                   │
                S(0) ◀───C(3>0)──── .grad

Between CPU devices a replica shares its owner's memory, so bringing it over costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from asyncpipe.errors import SharedParameterError
from asyncpipe.ops.device.devices import Device
from asyncpipe.ops.model.running_statistics import statistics_of
from asyncpipe.ops.model.stage import Stage, StagedModel, StageModule

__all__ = ["Replica", "Ties", "place"]


class _Slot(NamedTuple):
    """Where a module keeps a parameter or buffer."""

    module: nn.Module
    name: str

    @property
    def table(self) -> dict[str, Tensor | None]:
        parameters: dict[str, Tensor | None] = self.module._parameters  # type: ignore[assignment]
        return parameters if self.name in parameters else self.module._buffers


@dataclass(frozen=True, slots=True, eq=False)
class Replica:
    """One tensor of its owner stage, again on the device of another stage."""

    slot: _Slot
    tensor: Tensor

    @property
    def owner(self) -> Tensor:
        """The tensor itself, also after the owner's module was cast."""
        owner = self.slot.table[self.slot.name]
        assert owner is not None
        return owner

    def bring(self, values: Tensor) -> None:
        """Take over the owner's values, on the replica's device."""
        self.tensor.data = values


class Ties:
    """The replicas by (owner, user), and the shadow modules that hold them."""

    def __init__(self) -> None:
        self._replicas: dict[tuple[int, int], list[Replica]] = {}
        self._shadows: list[_Shadow] = []

    @property
    def links(self) -> tuple[tuple[int, int], ...]:
        """(owner, user) for each pair of stages with replicas."""
        return tuple(sorted(self._replicas))

    def between(self, owner: int, user: int) -> list[Replica]:
        """What ``user`` has replicas of."""
        return self._replicas[owner, user]

    def refresh(self) -> None:
        """Make the shadows follow their modules: training mode, hooks, and whatever else was set on them."""
        for shadow in self._shadows:
            shadow.refresh()
        for replica in self.all():
            replica.tensor.requires_grad_(replica.owner.requires_grad)

    def all(self) -> Iterable[Replica]:
        """Every replica."""
        return (replica for replicas in self._replicas.values() for replica in replicas)

    def drop_gradients(self) -> None:
        """Forget what a step that failed has left at the replicas."""
        for replica in self.all():
            replica.tensor.grad = None

    def add(self, owner: int, user: int, slot: _Slot, device: torch.device) -> Tensor:
        """A replica of what is in ``slot`` of ``owner``, for ``user``; always the same one."""
        replicas = self._replicas.setdefault((owner, user), [])
        tensor = slot.table[slot.name]
        assert tensor is not None
        for replica in replicas:
            if replica.owner is tensor:
                return replica.tensor
        copy = tensor.detach().to(device)
        if isinstance(tensor, nn.Parameter):
            copy = nn.Parameter(copy, requires_grad=tensor.requires_grad)
        replicas.append(Replica(slot, copy))
        return copy

    def shadow(self, module: StageModule, replaced: dict[tuple[int, str], Tensor]) -> StageModule:
        """``module`` with other tensors in the slots named by (id of the module, name); the rest is shared."""
        made: dict[int, nn.Module] = {}
        shadow = self._shadow(module, replaced, made)
        assert isinstance(shadow, StageModule)
        return shadow

    def _shadow(
        self, module: nn.Module, replaced: dict[tuple[int, str], Tensor], made: dict[int, nn.Module]
    ) -> nn.Module:
        if id(module) in made:
            return made[id(module)]
        children = {
            name: self._shadow(child, replaced, made) for name, child in module._modules.items() if child is not None
        }
        mine = {name: tensor for (owner, name), tensor in replaced.items() if owner == id(module)}
        if not mine and all(children[name] is module._modules[name] for name in children):
            made[id(module)] = module
            return module
        shadow = _Shadow(module, children, mine)
        shadow.refresh()
        self._shadows.append(shadow)
        made[id(module)] = shadow.copy
        return shadow.copy


class _Shadow:
    """A module's double: the same class and state, but other children and tensors in some places."""

    def __init__(self, module: nn.Module, children: dict[str, nn.Module], tensors: dict[str, Tensor]) -> None:
        self.copy: nn.Module = module.__class__.__new__(module.__class__)
        self._module = module
        self._children = children
        self._tensors = tensors

    def refresh(self) -> None:
        tables = {
            table: {name: self._tensors.get(name, value) for name, value in getattr(self._module, table).items()}
            for table in ("_parameters", "_buffers")
        }
        modules = {**self._module._modules, **self._children}
        self.copy.__dict__.update(self._module.__dict__, _modules=modules, **tables)
        if isinstance(self.copy, nn.RNNBase):
            # A recurrent layer keeps its parameters a second time, in a list.
            self.copy._flat_weights = [getattr(self.copy, name) for name in self.copy._flat_weights_names]


def place(model: StagedModel, placement: Sequence[int], devices: Sequence[Device]) -> tuple[list[Stage], Ties]:
    """Move each stage to its device, in place: parameters stay the same objects. And the replicas it takes.

    Raises ``SharedParameterError``, before anything moves, for a layer with running statistics in stages on
    different devices: it would update them in two places.
    """
    users = _users(model.stages)
    tied = {key: stages for key, stages in users.items() if len({placement[stage] for stage, _ in stages}) > 1}
    _check_statistics(tied.values())
    # Backwards, so that what is shared ends up where its owner, the first stage that uses it, is.
    for index in reversed(range(len(model.stages))):
        model.stages[index].to(devices[placement[index]].physical)
    ties = Ties()
    replaced: list[dict[tuple[int, str], Tensor]] = [{} for _ in model.stages]
    for slots in tied.values():
        owner, source = slots[0]
        tensor = source.table[source.name]
        assert tensor is not None
        for user, slot in slots[1:]:
            slot.table[slot.name] = tensor  # A buffer was moved by each of its users.
            if placement[user] != placement[owner]:
                replica = ties.add(owner, user, source, devices[placement[user]].physical)
                replaced[user][id(slot.module), slot.name] = replica
    modules = [ties.shadow(stage, slots) for stage, slots in zip(model.stages, replaced, strict=True)]
    return [
        Stage(index, module, devices[device], statistics_of(module))
        for index, (module, device) in enumerate(zip(modules, placement, strict=True))
    ], ties


def _users(stages: Sequence[StageModule]) -> dict[int, list[tuple[int, _Slot]]]:
    """Where each parameter and buffer is used: (stage, slot), in the order of the stages."""
    users: dict[int, list[tuple[int, _Slot]]] = {}
    for index, stage in enumerate(stages):
        for module in stage.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        users.setdefault(id(tensor), []).append((index, _Slot(module, name)))
    return users


def _check_statistics(tied: Iterable[list[tuple[int, _Slot]]]) -> None:
    for slots in tied:
        (first, slot), (last, _) = slots[0], slots[-1]
        if slot.name in ("running_mean", "running_var"):
            raise SharedParameterError(
                f"stage {first} and stage {last}, on different devices, both update the running statistics of one "
                f"{type(slot.module).__name__}; give each a layer of its own, or put both on one device"
            )
