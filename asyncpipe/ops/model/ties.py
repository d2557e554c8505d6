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
from typing import cast

import torch
from torch import Tensor, nn

from asyncpipe.errors import OptionError, SharedParameterError
from asyncpipe.ops.device.devices import Device
from asyncpipe.ops.model.buffers import StageBuffers, shared_buffers
from asyncpipe.ops.model.input_copies import InputCopies
from asyncpipe.ops.model.module_image import ModuleImage
from asyncpipe.ops.model.output_watch import OutputWatch
from asyncpipe.ops.model.own_generators import OwnGenerators
from asyncpipe.ops.model.parameter_watch import ParameterWatch
from asyncpipe.ops.model.replicas import ReplicaStage, ReplicaStatistics, Twins, own_buffers
from asyncpipe.ops.model.stage import Stage, StagedModel, StageModule
from asyncpipe.ops.model.tensor_uses import TensorUse, tensor_uses
from asyncpipe.ops.torch_internals import sparse_parts

__all__ = ["Replica", "Ties", "accumulated", "place"]


@dataclass(frozen=True, slots=True, eq=False)
class Replica:
    """A copy of one tensor of an owner stage, on the device of another stage."""

    owned: TensorUse
    """Where the owner has the tensor."""
    tensor: Tensor

    @property
    def owner(self) -> Tensor:
        """The owner's tensor; looked up each time, since casting a module can replace it."""
        return self.owned.tensor


class Ties:
    """All replicas, by owner and user stage, and the images of modules that use them."""

    def __init__(self) -> None:
        self._replicas: dict[tuple[int, int], list[Replica]] = {}
        self.statistics_of: dict[tuple[int, int], ReplicaStatistics] = {}
        """By stage of row 0 and of a later row."""
        self._images: list[ModuleImage] = []
        self.twins = Twins()

    @property
    def links(self) -> tuple[tuple[int, int], ...]:
        """(owner, user) for each pair of stages with replicas."""
        return tuple(sorted(self._replicas.keys() | self.statistics_of.keys()))

    @property
    def statistics(self) -> tuple[tuple[int, int], ...]:
        """Those of ``links`` where the owner is told of buffers."""
        return tuple(sorted(self.statistics_of))

    def between(self, owner: int, user: int) -> Sequence[Replica]:
        """The replicas that ``user`` has of tensors of ``owner``."""
        return self._replicas.get((owner, user), ())

    def values(self, owner: int, user: int) -> list[Tensor | None]:
        """What ``user`` has replicas of, without a graph; then the buffers of a stage in row 0, for a later row."""
        values: list[Tensor | None] = [replica.owner.detach() for replica in self.between(owner, user)]
        return values + (self.statistics_of[owner, user].values() if (owner, user) in self.statistics_of else [])

    def take(self, owner: int, user: int, values: Sequence[Tensor | None]) -> None:
        """Let ``user`` compute with these values, which are on its device."""
        rest = iter(values)
        for replica in self.between(owner, user):
            value = next(rest)
            assert value is not None
            replica.tensor.data = value
        if (owner, user) in self.statistics_of:
            self.statistics_of[owner, user].load(rest)

    def pop_gradients(self, owner: int, user: int) -> list[Tensor | None]:
        """The gradients of those replicas, which lose them; then what forwards of a later row did to buffers.

        Each gradient is two tensors, since a sparse one has indices and values; they travel as others do.
        """
        replicas = self.between(owner, user)
        gradients = [replica.tensor.grad for replica in replicas]
        for replica in replicas:
            replica.tensor.grad = None
        parts = [part for gradient in gradients for part in _indices_and_values(gradient)]
        return parts + (self.statistics_of[owner, user].collect() if (owner, user) in self.statistics_of else [])

    def begin(self) -> None:
        """No step runs, and one is about to begin: have the modules of later rows as those of row 0."""
        self.twins.follow()
        for each in self.statistics_of.values():
            each.begin()

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
        for user in sorted(user for user, found in gradients if found == owner):
            rest = iter(gradients.pop((user, owner)))
            for replica in self.between(owner, user):
                parameter, indices, values = replica.owner, next(rest), next(rest)
                if values is not None and indices is not None:
                    values = torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
                if values is not None:
                    parameter.grad = values if parameter.grad is None else accumulated(parameter.grad, values)
            if (owner, user) in self.statistics_of:
                self.statistics_of[owner, user].join(rest)

    def follow(self, owner: Stage, user: Stage) -> None:
        """Have ``user``, in a later row, begin each step with the buffers of ``owner``, and tell it of its own."""
        if statistics := ReplicaStatistics(owner.module, getattr(user.module, "stage", user.module)):
            self.statistics_of[owner.index, user.index] = statistics

    def drop_gradients(self) -> None:
        """Drop the gradients that a failed step left at the replicas."""
        for replica in self.all():
            replica.tensor.grad = None

    def add(self, owned: TensorUse, user: int, device: torch.device) -> Tensor:
        """The replica for the stage ``user`` of what another one has; created by the first call."""
        replicas = self._replicas.setdefault((owned.stage, user), [])
        tensor = owned.tensor
        for replica in replicas:
            if replica.owner is tensor:
                return replica.tensor
        # An owner that lives in another worker sends its values in each step, before the first use.
        copy = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach().to(device)
        if isinstance(tensor, nn.Parameter):
            copy = nn.Parameter(copy, requires_grad=tensor.requires_grad)
        replicas.append(Replica(owned, copy))
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


def accumulated(total: Tensor, gradient: Tensor) -> Tensor:
    """``gradient`` added to ``total``, in place as autograd does it; a sum with a dense gradient is dense."""
    return gradient.add_(total) if total.is_sparse and not gradient.is_sparse else total.add_(gradient)


def _indices_and_values(gradient: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """A dense gradient has no indices."""
    if gradient is None or not gradient.is_sparse:
        return None, gradient
    return sparse_parts(gradient)


def place(model: StagedModel, placement: Sequence[int], devices: Sequence[Device]) -> tuple[list[Stage], Ties]:
    """The stages of ``model`` on their devices, and the ties between them. Moves the modules in place.

    Parameters stay the same objects. Stages whose devices are elsewhere are left as they are. Raises
    ``SharedParameterError``, before anything moves, if stages on different devices share a layer with running
    statistics, which both would update.
    """
    tied = [uses for uses in tensor_uses(model.stages).values() if len({placement[use.stage] for use in uses}) > 1]
    for first, *_, last in tied:
        if first.name in ("running_mean", "running_var"):
            raise SharedParameterError(
                f"stage {first.stage} and stage {last.stage}, on different devices, both update the running statistics "
                f"of one {type(first.module).__name__}; give each a layer of its own, or split where one stage has both"
            )
    _refuse_torch_script(tied, placement)
    shared = shared_buffers(model.stages)
    if model.rows > 1:
        own_buffers(model.stages, model.rows, shared)
    for index, each in enumerate(model.stages):
        _refuse_to_move_quantized(each, devices[placement[index]])
    # In reverse order, so that shared tensors end up on the device of their owner, the first stage that uses them.
    for index in reversed(range(len(model.stages))):
        device = devices[placement[index]]
        if not device.is_elsewhere:
            _move(model.stages[index], device.physical)
    ties = Ties()
    replaced: list[dict[tuple[int, str], Tensor]] = [{} for _ in model.stages]
    for owned, *others in tied:
        for use in others:
            use.table[use.name] = owned.tensor  # Moving a stage replaces its buffers, so each user had its own.
            if placement[use.stage] != placement[owned.stage]:
                replica = ties.add(owned, use.stage, devices[placement[use.stage]].physical)
                replaced[use.stage][id(use.module), use.name] = replica
    modules = [
        cast(StageModule, ties.image(stage, slots, {})) for stage, slots in zip(model.stages, replaced, strict=True)
    ]
    count = len(model.stages) // model.rows
    stages = [
        Stage(
            index,
            index % count,
            module,
            devices[device],
            InputCopies(module.overwrites_input),
            StageBuffers(index, module, shared[index], model.rows),
            ParameterWatch(index, module),
            OwnGenerators(module),
            OutputWatch(index),
        )
        for index, (module, device) in enumerate(zip(modules, placement, strict=True))
    ]
    pairs: list[tuple[int, nn.Module, nn.Module]] = []
    for stage in stages[count:]:
        twin = cast(ReplicaStage, model.stages[stage.index]).stage
        modules_of = zip(model.stages[stage.position].modules(), twin.modules(), strict=True)
        pairs += [(stage.index // count, one, other) for one, other in modules_of]
        ties.follow(stages[stage.position], stage)
    ties.twins = Twins(pairs)
    return stages, ties


def _refuse_to_move_quantized(stage: StageModule, device: Device) -> None:
    """Weights of bitsandbytes have scales beside them; those of 4 bits move with these, from device to device."""
    for name, parameter in stage.named_parameters():
        has_8_bits = hasattr(parameter, "SCB")
        if device.is_elsewhere and (has_8_bits or getattr(parameter, "quant_state", None) is not None):
            raise OptionError(
                f"{name!r} is in 4 or 8 bits, whose scales would not travel to a worker; use workers='threads', or "
                "load the model without quantization_config"
            )
        if has_8_bits and parameter.device != device.physical:
            raise OptionError(
                f"{name!r} is in 8 bits and stays on {parameter.device}, where it was loaded, and its stage would be "
                f"on {device.name}; load the model with a device_map that has it there, or in 4 bits"
            )


def _move(stage: StageModule, device: torch.device) -> None:
    if any(tensor.is_meta for tensor in chain(stage.parameters(), stage.buffers())):
        # Tied to what another worker has, so its replica will take its place.
        stage._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # type: ignore[no-untyped-call]
    else:
        stage.to(device)


def _refuse_torch_script(tied: Iterable[Sequence[TensorUse]], placement: Sequence[int]) -> None:
    for owned, *others in tied:
        for use in others:
            if placement[use.stage] != placement[owned.stage] and isinstance(use.module, torch.jit.ScriptModule):
                raise SharedParameterError(
                    f"stage {owned.stage} and stage {use.stage}, on different devices, share {use.name!r} of a "
                    f"TorchScript {use.module.original_name}, which cannot have a replica there; put both on one "
                    "device, or use the module that was scripted"
                )
