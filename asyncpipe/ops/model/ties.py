"""Places stages on devices, and ties the parameters and buffers that stages on different devices share.

A parameter that stages on several devices use has one owner: the first of these stages. The optimizer and the state
dict see the owner's tensor. Every other stage uses a *replica* on its own device, in an image of its module
(``module_image.py``), so that the model itself does not change. Each step copies the owner's values to the replicas
before their first forward, and adds the replicas' gradients to the owner's after their last backward. Both are tasks
(``core/graph/lower.py``)::

    model      embedding.weight ═════════════════ head.weight        one nn.Parameter
    stage 0    owner ───C(0>3)──▶ replica        stage 3's image of head
                 ▲                   │
                S(0) ◀───C(3>0)──── .grad

Between CPU devices a replica shares its owner's memory, so these copies cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from asyncpipe.errors import SharedParameterError
from asyncpipe.ops.device.devices import Device
from asyncpipe.ops.model.buffers import StageBuffers, shared_buffers
from asyncpipe.ops.model.input_copies import InputCopies
from asyncpipe.ops.model.module_image import ModuleImage
from asyncpipe.ops.model.output_watch import OutputWatch
from asyncpipe.ops.model.parameter_watch import ParameterWatch
from asyncpipe.ops.model.stage import Stage, StagedModel, StageModule

__all__ = ["Replica", "Ties", "place"]


class _Slot(NamedTuple):
    """The place of a parameter or buffer: a module, and the name there."""

    module: nn.Module
    name: str

    @property
    def table(self) -> dict[str, Tensor | None]:
        parameters: dict[str, Tensor | None] = self.module._parameters  # type: ignore[assignment]
        return parameters if self.name in parameters else self.module._buffers

    @property
    def held(self) -> Tensor:
        tensor = self.table[self.name]
        assert tensor is not None
        return tensor


@dataclass(frozen=True, slots=True, eq=False)
class Replica:
    """A copy of one tensor of an owner stage, on the device of another stage."""

    slot: _Slot
    tensor: Tensor

    @property
    def owner(self) -> Tensor:
        """The owner's tensor; looked up each time, since casting a module can replace it."""
        return self.slot.held


class Ties:
    """All replicas, by owner and user stage, and the images of modules that use them."""

    def __init__(self) -> None:
        self._replicas: dict[tuple[int, int], list[Replica]] = {}
        self._images: list[ModuleImage] = []

    @property
    def links(self) -> tuple[tuple[int, int], ...]:
        """(owner, user) for each pair of stages with replicas."""
        return tuple(sorted(self._replicas))

    def between(self, owner: int, user: int) -> list[Replica]:
        """The replicas that ``user`` has of tensors of ``owner``."""
        return self._replicas[owner, user]

    def values(self, owner: int, user: int) -> list[Tensor | None]:
        """What ``user`` has replicas of, without a graph."""
        return [replica.owner.detach() for replica in self.between(owner, user)]

    def pop_gradients(self, owner: int, user: int) -> list[Tensor | None]:
        """The gradients of those replicas, which lose them."""
        replicas = self.between(owner, user)
        gradients = [replica.tensor.grad for replica in replicas]
        for replica in replicas:
            replica.tensor.grad = None
        return gradients

    def refresh(self) -> None:
        """Copy to the images what was changed on their modules: training mode, hooks, other attributes."""
        for image in self._images:
            image.refresh()
        for replica in self.all():
            replica.tensor.requires_grad_(replica.owner.requires_grad)

    def all(self) -> Iterable[Replica]:
        """Every replica."""
        return chain.from_iterable(self._replicas.values())

    def sum_gradients(self, owner: int, gradients: dict[tuple[int, int], list[Tensor | None]]) -> None:
        """Add the gradients of replicas, which ``gradients`` has by (user, owner), to the owner's, in stage order."""
        for user in (user for found, user in self.links if found == owner):
            for replica, gradient in zip(self.between(owner, user), gradients.pop((user, owner)), strict=True):
                if gradient is not None:
                    total = replica.owner.grad
                    replica.owner.grad = gradient if total is None else total.add_(gradient)

    def drop_gradients(self) -> None:
        """Drop the gradients that a failed step left at the replicas."""
        for replica in self.all():
            replica.tensor.grad = None

    def add(self, owner: int, user: int, slot: _Slot, device: torch.device) -> Tensor:
        """The replica for ``user`` of what is in ``slot`` of ``owner``; created by the first call."""
        replicas = self._replicas.setdefault((owner, user), [])
        tensor = slot.held
        for replica in replicas:
            if replica.owner is tensor:
                return replica.tensor
        # An owner that lives in another worker sends its values in each step, before the first use.
        copy = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach().to(device)
        if isinstance(tensor, nn.Parameter):
            copy = nn.Parameter(copy, requires_grad=tensor.requires_grad)
        replicas.append(Replica(slot, copy))
        return copy

    def image(
        self, module: nn.Module, replaced: dict[tuple[int, str], Tensor], made: dict[int, nn.Module]
    ) -> nn.Module:
        """``module`` with the tensors in ``replaced``, by (id of the module, name). Everything else is shared.

        ``made`` has the result for each module inside that was seen before, by id.
        """
        if id(module) in made:
            return made[id(module)]
        made[id(module)] = module
        children = {
            name: self.image(child, replaced, made) for name, child in module._modules.items() if child is not None
        }
        mine = {name: tensor for (owner, name), tensor in replaced.items() if owner == id(module)}
        if not mine and all(children[name] is module._modules[name] for name in children):
            return module
        image = ModuleImage(module, children, mine)
        self._images.append(image)
        made[id(module)] = image.copy
        return image.copy


def place(model: StagedModel, placement: Sequence[int], devices: Sequence[Device]) -> tuple[list[Stage], Ties]:
    """The stages of ``model`` on their devices, and the ties between them. Moves the modules in place.

    Parameters stay the same objects. Stages whose devices are elsewhere are left as they are. Raises
    ``SharedParameterError``, before anything moves, if stages on different devices share a layer with running
    statistics, which both would update.
    """
    users = _users(model.stages)
    tied = {key: stages for key, stages in users.items() if len({placement[stage] for stage, _ in stages}) > 1}
    for slots in tied.values():
        (first, slot), (last, _) = slots[0], slots[-1]
        if slot.name in ("running_mean", "running_var"):
            raise SharedParameterError(
                f"stage {first} and stage {last}, on different devices, both update the running statistics of one "
                f"{type(slot.module).__name__}; give each a layer of its own, or split where one stage has both"
            )
    _refuse_torch_script(tied.values(), placement)
    shared = shared_buffers(model.stages)
    # In reverse order, so that shared tensors end up on the device of their owner, the first stage that uses them.
    for index in reversed(range(len(model.stages))):
        device = devices[placement[index]]
        if not device.is_elsewhere:
            _move(model.stages[index], device.physical)
    ties = Ties()
    replaced: list[dict[tuple[int, str], Tensor]] = [{} for _ in model.stages]
    for slots in tied.values():
        owner, source = slots[0]
        for user, slot in slots[1:]:
            slot.table[slot.name] = source.held  # Moving a stage replaces its buffers, so each user had its own.
            if placement[user] != placement[owner]:
                replica = ties.add(owner, user, source, devices[placement[user]].physical)
                replaced[user][id(slot.module), slot.name] = replica
    modules = [
        cast(StageModule, ties.image(stage, slots, {})) for stage, slots in zip(model.stages, replaced, strict=True)
    ]
    return [
        Stage(
            index,
            module,
            devices[device],
            InputCopies(module.overwrites_input),
            StageBuffers(index, module, shared[index]),
            ParameterWatch(index, module),
            OutputWatch(index),
        )
        for index, (module, device) in enumerate(zip(modules, placement, strict=True))
    ], ties


def _move(stage: StageModule, device: torch.device) -> None:
    if any(tensor.is_meta for tensor in chain(stage.parameters(), stage.buffers())):
        # Tied to what another worker has, so its replica will take its place.
        stage._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # type: ignore[no-untyped-call]
    else:
        stage.to(device)


def _refuse_torch_script(tied: Iterable[Sequence[tuple[int, _Slot]]], placement: Sequence[int]) -> None:
    for slots in tied:
        owner = slots[0][0]
        for user, slot in slots[1:]:
            if placement[user] != placement[owner] and isinstance(slot.module, torch.jit.ScriptModule):
                raise SharedParameterError(
                    f"stage {owner} and stage {user}, on different devices, share {slot.name!r} of a TorchScript "
                    f"{slot.module.original_name}, which cannot have a replica there; put both on one device, or use "
                    "the module that was scripted"
                )


def _users(stages: Sequence[StageModule]) -> dict[int, list[tuple[int, _Slot]]]:
    """By id of each parameter and buffer: the stages that use it, in order, and where."""
    users: dict[int, list[tuple[int, _Slot]]] = {}
    for index, stage in enumerate(stages):
        for module in stage.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        users.setdefault(id(tensor), []).append((index, _Slot(module, name)))
    return users
