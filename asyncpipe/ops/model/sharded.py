"""Stages that are spread over a group of workers: what is sharded in them, and what leaves them plain.

::

    worker a    x ──▶ │ block: its heads ──┐                    │ ──▶ y        equal in both
                      │               all-reduce, all-gather …  │
    worker b    x ──▶ │ block: its heads ──┘                    │ ──▶ y

Their parameters are DTensors, which know the whole shape. Collectives run inside the stage's tasks, on the thread of
its device. Those of a group take them in the same order, since all of them run the same ordered schedule.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.kinds import TaskKind
from asyncpipe.errors import OptionError, ScheduleError, StageError
from asyncpipe.ops.torch_internals import norm_of_each, tree_flatten, tree_leaves, tree_unflatten

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "gradient_norm",
    "gradient_norms",
    "is_sharded",
    "refuse_split_backwards",
    "shard_stage",
    "sharded_as",
    "whole",
]

_T = TypeVar("_T")


def is_sharded(value: object) -> bool:
    """Whether it is a DTensor; who has none need not import them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def shard_stage(
    shard: Callable[[nn.Module, DeviceMesh], object], module: nn.Module, mesh: DeviceMesh, stage: int
) -> None:
    """Have ``shard`` spread ``module`` over ``mesh``, and have what passes its ends be plain tensors.

    Raises ``OptionError`` if parameters and buffers have not the names and whole shapes that they had.
    """
    before = _shapes(module)
    shard(module, mesh)
    after = _shapes(module)
    if before != after:
        name = next(name for name in {**before, **after} if before.get(name) != after.get(name))
        raise OptionError(
            f"the function that shards stage {stage} makes {name!r} of shape {before.get(name)} one of shape "
            f"{after.get(name)}, so nobody would know what of it is here; make it a DTensor, as parallelize_module and "
            "fully_shard do"
        )
    for part in module.modules():
        if callable(again := getattr(part, "set_reshard_after_forward", None)):
            again(
                True
            )  # Of FSDP2: between two steps the module must have its own parameters, after forwards alone too.

    def take(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return _mapped(_passed, (args, kwargs))

    def give(_: nn.Module, __: object, output: Any) -> Any:
        if any(map(is_sharded, tree_leaves(output))):
            raise StageError(
                f"stage {stage}, which shards itself, returns a DTensor, and stages exchange plain tensors; return its "
                "to_local(), or redistribute it to Replicate() before if it is sharded"
            )
        return _mapped(_passed, output)

    module.register_forward_pre_hook(take, prepend=True, with_kwargs=True)
    module.register_forward_hook(give)


def refuse_split_backwards(module: nn.Module, graph: TaskGraph) -> None:
    """Raise ``ScheduleError`` if ``graph`` splits backwards, and ``module`` frees its weights behind the first half."""
    if any(task.kind is TaskKind.WEIGHT_GRADIENT for task in graph.tasks) and any(
        hasattr(part, "set_reshard_after_forward") for part in module.modules()
    ):
        raise ScheduleError(
            "a stage is sharded by fully_shard, which frees its weights after the backward, and the schedule splits "
            "backwards into two; use one that does not, as '1f1b', or shard by parallelize_module"
        )


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(each.shape) for name, each in (*module.named_parameters(), *module.named_buffers())}


class _Passed(torch.autograd.Function):
    """The identity at the ends of a stage. What a collective has made is wrapped, and has no memory of its own."""

    @staticmethod
    def forward(_: Any, value: Tensor) -> Tensor:
        plain = _unwrapped(value)
        return plain.view_as(plain)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return _unwrapped(gradient)


def _passed(value: Any) -> Any:
    return _Passed.apply(value) if isinstance(value, Tensor) else value  # type: ignore[no-untyped-call]


def _unwrapped(value: Tensor) -> Tensor:
    """The tensor inside an ``AsyncCollectiveTensor``."""
    wait = None if type(value) in (Tensor, nn.Parameter) else getattr(value, "wait", None)
    plain: Tensor = value if wait is None else wait()
    return plain


def whole(values: _T) -> _T:
    """``values``, with whole tensors in place of DTensors. Collective: all of the group call it with the same."""
    return _mapped(lambda value: value.detach().full_tensor() if is_sharded(value) else value, values)


def _mapped(function: Callable[[Any], Any], values: _T) -> _T:
    """``values`` with what ``function`` makes of each leaf."""
    leaves, structure = tree_flatten(values)
    found: _T = tree_unflatten([function(leaf) for leaf in leaves], structure)
    return found


def sharded_as(value: Any, like: Tensor) -> Any:
    """What this process has of the whole tensor ``value``, if ``like`` is a DTensor of that shape. No collective."""
    if not (is_sharded(like) and isinstance(value, Tensor) and value.shape == like.shape):
        return value
    from torch.distributed.tensor import distribute_tensor  # Takes long, and is there already.

    sharded: Any = like
    return distribute_tensor(value.detach(), sharded.device_mesh, sharded.placements, src_data_rank=None)


def gradient_norms(gradients: Sequence[Tensor]) -> Tensor:
    """The norms of all ``gradients``, one at least, as a vector; collective, and one together, if some are DTensors."""
    if any(map(is_sharded, gradients)):
        return gradient_norm(gradients).reshape(1)
    return torch.stack(norm_of_each(gradients))


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The norm of all ``gradients``. Collective if some are DTensors."""
    sharded = [each for each in gradients if is_sharded(each)]
    if not sharded:
        return nn.utils.get_total_norm(gradients)
    parts: Iterable[Tensor] = (sharded, [each for each in gradients if not is_sharded(each)])  # type: ignore[assignment]
    norms = [whole(nn.utils.get_total_norm(part)) for part in parts if part]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total
