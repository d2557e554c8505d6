"""A case: a module of ``module_db`` with one of its inputs, and how its model is run; and the model.

``module_db`` is torch's list of its modules for its own tests. It has inputs of each: with and without a batch, several
tensors, nested ones, options. ``module_db.py`` of torch is not public, so this is all that reads it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock, patch

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

__all__ = ["MICROBATCHES", "Case", "Given", "build", "deterministic", "draw", "fixed", "given", "modules"]

MICROBATCHES = 3
FACES = ("step", "call", "gpipe")
"""``Pipeline.step``; ``pipe(x)`` with the caller's backward; the same by torchgpipe's class."""
SCHEDULES = ("gpipe", "1f1b", "zb-h1")
MODES = ("never", "except_last", "selective", "always")
CELLS = [cell for cell in product(FACES, SCHEDULES, MODES) if cell[0] != "gpipe" or cell[1] == "gpipe"]
DTYPES = (torch.float64, torch.complex128)
SAMPLED = 1_000_000
"""Cases with this number and more are drawn; those below are the fixed list."""
INPUTS = 8
"""So many inputs of each module are in the fixed list, over all that it has: one has 857. A draw may take any."""
SCALE = 0.9
SPREAD = 16


# torch's list


@lru_cache
def modules() -> list[Any]:
    """``module_db``."""
    name = "torch.testing._internal.common_methods_invocations"
    if name not in sys.modules:  # The list of all operators: seconds, for a class of decorators.
        sys.modules[name] = SimpleNamespace(DecorateInfo=Mock)  # type: ignore[assignment]
    from torch.testing._internal.common_modules import module_db

    if isinstance(sys.modules[name], SimpleNamespace):
        del sys.modules[name]
    return list(module_db)


@lru_cache
def _inputs(module: int) -> list[tuple[torch.dtype, Any]]:
    """The inputs of a module, the same at every call."""
    info, found = modules()[module], []
    for dtype in DTYPES:
        if dtype in info.dtypes:
            with torch.random.fork_rng(devices=()):
                torch.manual_seed(module)
                made = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=True)
            found += [(dtype, each) for each in made if each.forward_input is not None]
    return found


# Cases


@dataclass(frozen=True)
class Case:
    """All that the judge needs."""

    module: int
    """Its place in ``module_db``."""
    input: int
    face: str
    schedule: str
    checkpoint: str
    # What the judge of the differential campaign asks for.
    steps = ("train", "eval", "train")
    options = ()
    tags = frozenset[str]()

    @property
    def name(self) -> str:
        """The module's."""
        return str(modules()[self.module].name)

    def __str__(self) -> str:
        described = _inputs(self.module)[self.input][1].desc
        return f"{self.name}, input {self.input} ({described}), {self.face}, {self.schedule}, {self.checkpoint}"


@lru_cache
def fixed() -> list[Case]:
    """The fixed list: one input of every module, then another one, so that a part of it has all modules."""
    counts = [len(_inputs(module)) for module in range(len(modules()))]
    rounds = ((module, k, count) for k in range(INPUTS) for module, count in enumerate(counts))
    some = [(module, k * count // min(count, INPUTS)) for module, k, count in rounds if k < count]
    return [Case(*each, *cell) for each in some for cell in CELLS]


def draw(number: int) -> Case:
    """The case of a number. Cases that are drawn take the modules in turns."""
    if number < SAMPLED:
        return fixed()[number]
    module, random = number % len(modules()), Random(number)
    return Case(module, random.randrange(len(_inputs(module))), *random.choice(CELLS))


# The mini-batch


class Given(NamedTuple):
    """What the module is called with."""

    leaves: list[Any]
    """The leaves of its arguments; ``None`` for each tensor."""
    places: list[int]
    """Where its tensors are in ``leaves``."""
    structure: Any
    microbatches: list[list[Tensor]]
    """The tensors of each. Those to differentiate by differ between micro-batches."""
    trained: list[bool]
    """Which tensors those are."""
    form: str
    """How micro-batches make a mini-batch: ``rows`` (along dimension 0), ``ready-made``, or ``stacked``."""

    def arguments(self, tensors: list[Tensor] | tuple[Tensor, ...]) -> Any:
        """Arguments with these tensors, as (args, kwargs)."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return tree_unflatten(leaves, self.structure)

    @property
    def samples(self) -> int:
        """How many a micro-batch has."""
        return len(self.microbatches[0][0]) if self.form == "rows" else 1

    def batch(self) -> list[Tensor]:
        """The tensors of the mini-batch, unless micro-batches are ready-made."""
        joined = torch.cat if self.form == "rows" else torch.stack
        return [joined(column) for column in zip(*self.microbatches, strict=True)]

    def target(self) -> Tensor:
        """Of the mini-batch."""
        generator = torch.Generator().manual_seed(1)
        return torch.randn(MICROBATCHES * self.samples, generator=generator, dtype=torch.float64)


def given(case: Case) -> Given:
    """The mini-batch of a case, made anew."""
    call = _inputs(case.module)[case.input][1].forward_input
    leaves, structure = tree_flatten((call.args, call.kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[place] for place in places]
    trained = [tensor.requires_grad for tensor in tensors]
    microbatches = [
        [(t * (1 - k / SPREAD) if of else t).detach().clone() for t, of in zip(tensors, trained, strict=True)]
        for k in range(MICROBATCHES)
    ]
    sizes = {tensor.size(0) if tensor.dim() else 0 for tensor in tensors}
    form = "stacked" if 0 in sizes or (len(sizes) > 1 and case.face == "gpipe") else "ready-made"
    form = "rows" if len(sizes) == 1 and 0 not in sizes else form
    constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return Given(constants, places, structure, microbatches, trained, form)


# The model


class Front(nn.Module):
    """Scales the tensors to differentiate by."""

    def __init__(self, batch: Given) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(SCALE, dtype=torch.float64))
        self.trained, self.is_stacked = batch.trained, batch.form == "stacked"
        self.places, self.arguments = batch.places, batch._replace(microbatches=[]).arguments

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The arguments of the module. The drop-in gives the tensors alone, in a tuple unless it is one."""
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if self.is_stacked:
            leaves = [leaf.squeeze(0) for leaf in leaves]
        return self.arguments([t * self.scale if of else t for t, of in zip(leaves, self.trained, strict=True)])


class Middle(nn.Module):
    """Calls the module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, arguments: Any) -> Any:
        """Whatever the module returns."""
        args, kwargs = arguments
        return self.module(*args, **kwargs)


class Back(nn.Module):
    """One number of whatever the module has returned, in which each element counts differently."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(SCALE, dtype=torch.float64))

    def forward(self, output: Any) -> Tensor:
        """Of shape [1]."""
        total = self.scale.new_zeros(())
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                real = torch.view_as_real(leaf) if leaf.is_complex() else leaf.to(torch.float64)
                numbers = real.nan_to_num(posinf=1.0, neginf=-1.0).flatten()
                total = total + (numbers * torch.arange(len(numbers)).cos()).sum() / max(1, len(numbers))
        return (total * self.scale).reshape(1)


def build(case: Case, batch: Given) -> nn.Sequential:
    """The model of a case, the same at every call."""
    torch.manual_seed(case.module)
    dtype, made = _inputs(case.module)[case.input]
    constructor = deepcopy(made.constructor_input)
    module = modules()[case.module].module_cls(*constructor.args, **constructor.kwargs).to(dtype)
    return nn.Sequential(Front(batch), Middle(module), Back())


def _filled(module: nn.Module) -> None:
    with torch.no_grad():
        for p in module.parameters(recurse=False):
            p.copy_(torch.linspace(-1, 1, p.numel()).reshape(p.shape))


@contextmanager
def deterministic(case: Case) -> Iterator[None]:
    """Inside, a lazy module gets the same parameters in any thread: torch draws them in the first forward."""
    is_lazy = modules()[case.module].is_lazy
    with patch.object(nn.modules.conv._ConvNd, "reset_parameters", _filled) if is_lazy else nullcontext():
        yield
