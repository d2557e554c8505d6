"""A model as buffers for a worker that owns some of its stages: their tensors are in it, of the others only the shapes.

What arrives is the whole model again, with the names, ties and structure that it had. So a worker places it as a
pipeline does that has all stages (``ties.py``); what other workers own is on torch's ``meta`` device there and takes
no memory::

    model             worker a: stage 0       worker b: stage 1
    0.weight          0.weight                0.weight (meta)
    1.weight          1.weight (meta)         1.weight

A tensor that several stages use belongs to the first of them.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cloudpickle  # type: ignore[import-untyped]
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from asyncpipe.errors import OptionError
from asyncpipe.ops.device.wire import TensorPickler, from_buffers, not_sendable, to_buffers
from asyncpipe.ops.model.sequential import all_to_first
from asyncpipe.ops.model.stage import StagedModel
from asyncpipe.ops.model.tensor_uses import tensor_uses
from asyncpipe.ops.torch_internals import accumulated_hooks, gradient_hooks, refresh_flat_weights

__all__ = ["NamedState", "forget_values", "receive_model", "refuse_what_trains", "ship_model", "state_names"]


@dataclass(frozen=True, slots=True)
class _Shipped:
    """One parameter or buffer."""

    values: Tensor | None
    """``None`` if another worker has them."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    is_parameter: bool

    def tensor(self) -> Tensor:
        values = torch.empty(self.shape, dtype=self.dtype, device="meta") if self.values is None else self.values
        return nn.Parameter(values, self.requires_grad) if self.is_parameter else values


def ship_model(model: StagedModel, stages: Collection[int]) -> list[pickle.PickleBuffer]:
    """``model`` for the worker that owns ``stages``, as ``to_buffers``: it is not copied here.

    Raises ``OptionError`` for a model that cannot be pickled, or whose parameters have hooks, which pickling drops.
    """
    _refuse_hooks(model.module)
    owners = _owners(model)
    caller_values = all_to_first if model.caller_values is all_to_first else _no_caller_values
    file = io.BytesIO()
    pickler = _Pickler(file, owners, frozenset(stages))
    try:
        pickler.dump(replace(model, caller_values=caller_values, join=None))
    except Exception as error:
        raise not_sendable("the model", error) from error
    return to_buffers((file.getvalue(), pickler.shipped), "the model")


def receive_model(received: Sequence[Any]) -> StagedModel:
    """The model that ``ship_model`` has made bytes of; on the CPU, or on ``meta`` where another worker has the tensor.

    Its tensors use the memory of what was received. What several stages take of a caller, only the controller knows.
    Unpickles, so ``received`` must come from there.
    """
    skeleton, shipped = from_buffers(received)
    unpickler = _Unpickler(io.BytesIO(skeleton), [each.tensor() for each in shipped])
    model: StagedModel = unpickler.load()
    return model


def forget_values(module: nn.Module) -> None:
    """Leave nothing of ``module``'s parameters and buffers but their shapes: their values are elsewhere now.

    What was one tensor under several names still is. (``module.to("meta")`` would make several of it.)
    """
    forgotten: dict[int, Tensor] = {}
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, tensor in table.items():
                if tensor is not None and not is_lazy(tensor):
                    table[name] = forgotten.setdefault(id(tensor), _shipped(tensor, whole=False).tensor())  # type: ignore[assignment]
        refresh_flat_weights(part)


class NamedState(NamedTuple):
    """What a name in the state of an unsplit model stands for."""

    stage: int
    """The stage that owns it: of a tensor, the first that uses it; of a module's extra state, the first that has it."""
    first: str
    """The first name that it has there."""


def refuse_what_trains(value: object, name: str, instead: str) -> None:
    """Raise ``OptionError`` if ``value`` refers to a tensor that requires a gradient: its copies would be strangers.

    ``name`` is what the caller calls it, ``instead`` what to do. Looks where pickling would, and copies no tensors.
    """
    finder = _Finder(io.BytesIO(), protocol=5)
    # What cannot be pickled is told of when it is sent.
    with suppress(Exception):
        finder.dump(value)
    if (found := finder.found) is not None:
        raise OptionError(
            f"{name} refers to a tensor of shape {tuple(found.shape)} that requires a gradient, and workers would have "
            f"copies of it, which nobody trains; {instead}, or use workers='threads'"
        )


def state_names(model: StagedModel) -> dict[str, NamedState]:
    """All names in the state of the unsplit model, in its order."""
    owners = _owners(model)
    modules: dict[int, int] = {}
    for stage, part in enumerate(model.stages):
        for module in part.modules():
            modules.setdefault(id(module), stage)
    holders = {name: modules.get(id(each), 0) for name, each in model.module.named_modules(remove_duplicate=False)}
    first: dict[int, str] = {}
    # A module makes its extra state when it is asked for it, so that is no tensor of a stage, or none at all.
    return {
        name: NamedState(
            owners[id(value)] if id(value) in owners else holders.get(name.rpartition(".")[0], 0),
            first.setdefault(id(value), name) if id(value) in owners else name,
        )
        for name, value in model.module.state_dict(keep_vars=True).items()
    }


def _no_caller_values(_: object) -> dict[int, Any]:
    raise AssertionError("a worker gets what its stages take from the controller")


def _owners(model: StagedModel) -> dict[int, int]:
    """By ``id`` of every tensor, the first stage that uses it. What no stage uses belongs to stage 0."""
    # The model itself stands behind the stages, for what none of them uses.
    firsts = {key: uses[0] for key, uses in tensor_uses([*model.stages, model.module]).items()}
    return {key: use.stage % len(model.stages) for key, use in firsts.items() if not is_lazy(use.tensor)}


class _Pickler(TensorPickler):
    """Puts the model's tensors into a list of its own."""

    def __init__(self, file: io.BytesIO, owners: dict[int, int], stages: frozenset[int]) -> None:
        super().__init__(file)
        self.shipped: list[_Shipped] = []
        self._owners = owners
        self._stages = stages
        self._places: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        owner = self._owners.get(id(value))
        if owner is None or not _is_plain(value):
            return None
        if id(value) not in self._places:
            self._places[id(value)] = len(self.shipped)
            self.shipped.append(_shipped(value, whole=owner in self._stages))
        return self._places[id(value)]


class _Finder(cloudpickle.Pickler):  # type: ignore[misc]
    """Finds a tensor that requires a gradient."""

    found: Tensor | None = None

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        if value.requires_grad:
            self.found = value
            raise pickle.PicklingError
        return 0


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, place: int) -> Tensor:
        return self._tensors[place]


def _is_plain(value: Any) -> bool:
    """Whether a tensor is nothing but its values. Any other one is pickled as it is, whoever owns it."""
    return type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not vars(value)


def _shipped(tensor: Tensor, *, whole: bool) -> _Shipped:
    values = tensor.detach() if whole else None
    return _Shipped(values, tuple(tensor.shape), tensor.dtype, tensor.requires_grad, isinstance(tensor, nn.Parameter))


def _refuse_hooks(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if gradient_hooks(parameter) or accumulated_hooks(parameter):
            raise OptionError(
                f"parameter {name!r} has a hook, which would stay behind when the model is sent to a worker; register "
                "it in a factory that builds the stage there, or use workers='threads'"
            )
