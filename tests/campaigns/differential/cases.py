"""A case: a model, how it is split and trained, as plain data; and how one is drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from tests.campaigns.differential.hooks import MODULE_HOOKS, PARAMETER_HOOKS
from tests.campaigns.models import layers as own
from tests.campaigns.models.items import CONTAINERS, Item, Layer, count, draw_items, draw_plain, layers_of, tags_of
from tests.campaigns.models.pieces import KINDS, TO_VECTOR

FACES = ("step", "sync step", "call", "gpipe", "trace", "trace call")
CALLS = ("call", "gpipe", "trace call")
"""The faces where the loss is the caller's."""
MODES = ("always", "except_last", "selective", "never")
ONE_STAGE_A_DEVICE = ("gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2")
LOOPS = ("interleaved", "looped-bfs", "interleaved-zb", "backward-first")
VS = ("zbv", "v-half", "v-min", "dualpipev", "hanayo")
OUTPUTS = ("dict", "list", "dataclass", "nested")


@dataclass(frozen=True)
class Case:
    """All that the judge needs."""

    seed: int
    kind: str
    items: tuple[Item, ...]
    output: str
    """The container of the model's output; none if empty."""
    cuts: tuple[float, ...]
    """Where stages end, as fractions of the model."""
    devices: int
    schedule: str
    checkpoint: str
    microbatches: int
    samples: int
    face: str
    steps: tuple[str, ...]
    """``train``, ``eval`` (forwards only) or ``eval backward``, each."""
    loss: str
    """``mean``, ``sum`` or ``counted``."""
    options: tuple[str, ...] = ()

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.cuts) + 1

    @property
    def tags(self) -> set[str]:
        """The tags of all pieces."""
        return tags_of(self.kind, self.items)

    @property
    def hooks(self) -> set[str]:
        """The hooks of all items."""
        return {hook for item in self.items for each in item.walk() for hook in each.hooks}


class Unbuildable(Exception):
    """A case that is none: fewer layers than stages."""


# Models


def build(case: Case) -> tuple[nn.Sequential, list[Layer]]:
    """The model of a case, the same at every call, and its layers; no hooks are installed yet."""
    torch.manual_seed(case.seed)
    layers = [layer for item in case.items for layer in layers_of(case.kind, item)]
    # Behind what needs no gradient, torch calls no backward hooks, and makes no gradients in a reentrant checkpoint.
    if "reentrant" in case.tags or case.hooks & {"backward", "backward pre"}:
        layers.insert(0, Layer("scale", own.fn(torch.asinh), ()))
    if case.kind in TO_VECTOR:
        layers.append(Layer("to vector", nn.Sequential(nn.Flatten(), nn.Linear(TO_VECTOR[case.kind], own.WIDTH)), ()))
    if case.output:
        layers.append(Layer(f"pack {case.output}", own.Pack(case.output), ()))
    if len(layers) < case.stages:
        raise Unbuildable(f"{len(layers)} layers for {case.stages} stages")
    model = nn.Sequential(*(layer.module for layer in layers))
    if "autocast" not in case.options:
        model.double()
    return model, layers


# Batches and losses


def batch(case: Case, step: int) -> tuple[Tensor, Tensor]:
    """The input and the target of a step."""
    generator = torch.Generator().manual_seed(case.seed * 10 + step)
    shape = {
        "vector": (own.WIDTH,),
        "sequence": (own.TIME, own.WIDTH),
        "image": (own.CHANNELS, own.SIDE, own.SIDE),
    }[case.kind]
    dtype = torch.float32 if "autocast" in case.options else torch.float64
    x = torch.randn(case.samples, *shape, generator=generator, dtype=dtype)
    target = torch.randn(case.samples, own.WIDTH, generator=generator, dtype=dtype)
    target[0, 0] = 1.0  # Counted: no step has a mean over nothing.
    return x, target


def sizes(case: Case) -> list[int]:
    """How many samples each micro-batch has: as evenly as can be, or ready-made ones of any size."""
    count = min(case.microbatches, case.samples)
    if "ready-made" in case.options:
        least = 2 if "batch" in case.tags else 1
        found = [least] * count
        random = Random(case.seed)
        for _ in range(case.samples - least * count):
            found[random.randrange(count)] += 1
        return found
    return [case.samples // count + (i < case.samples % count) for i in range(count)]


def loss_fn(case: Case) -> Any:
    """The loss of a model's output and a target."""

    def loss(output: Any, target: Tensor) -> Any:
        y = sum(tensors(output)).float() if "autocast" in case.options else sum(tensors(output))
        squares = (y - target).square()
        if case.loss == "mean":
            return squares.mean()
        if case.loss == "sum":
            return squares.sum()
        counted = target[:, 0] > -0.3
        count = counted.sum()
        return (squares.mean(-1) * counted).sum() / count.clamp(min=1), count

    return loss


def tensors(value: Any) -> list[Tensor]:
    """The floating point tensors in a nested value, dataclasses included."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, own.Bag | own.FrozenBag | own.Opaque):
        return tensors([value.x, value.rest])
    if isinstance(value, dict):
        return tensors(list(value.values()))
    return [tensor for item in value for tensor in tensors(item)] if isinstance(value, list | tuple) else []


# Drawing


def draw(seed: int) -> Case:
    """The case of a seed."""
    random = Random(seed)
    kind = random.choices(KINDS, (5, 4, 3))[0]
    draws = random.random() < 0.3
    face = random.choices(FACES, (6, 6, 6, 3, 1, 1))[0]
    schedule, devices, stages = _schedule(random, face)

    def plain() -> Item:
        name = draw_plain(random, kind, draws=draws)
        hooks = (random.choice((*MODULE_HOOKS, *PARAMETER_HOOKS)),) if random.random() < 0.12 else ()
        return Item(name, hooks=hooks)

    items = draw_items(random, plain, CONTAINERS)
    while count(items) + (kind != "vector") < stages:
        items.append(plain())
    microbatches = random.choice((1, 2, 2, 3, 4, 4, 5))
    if schedule == "dualpipev" and random.random() < 0.9:
        microbatches = stages + random.randrange(2)
    case = Case(
        seed=seed,
        kind=kind,
        items=tuple(items),
        output=random.choice(OUTPUTS) if random.random() < 0.15 else "",
        cuts=tuple(round(random.random(), 3) for _ in range(stages - 1)),
        devices=devices,
        schedule=schedule,
        checkpoint=random.choice(MODES),
        microbatches=microbatches,
        samples=2 * microbatches + random.randrange(microbatches + 2),
        face=face,
        steps=_steps(random, face),
        loss=random.choices(("mean", "counted", "sum"), (6, 2, 2))[0],
    )
    if random.random() < 0.05 and "batch" not in case.tags:
        case = replace(case, samples=random.randint(1, microbatches))  # Fewer samples than micro-batches.
    return replace(case, options=_options(random, case))


def _schedule(random: Random, face: str) -> tuple[str, int, int]:
    """A schedule's name, and how many devices and stages."""
    name = random.choice((*ONE_STAGE_A_DEVICE, *LOOPS, *VS, "csv"))
    if face == "gpipe" or name in ONE_STAGE_A_DEVICE or name == "csv":
        stages = random.choice((1, 2, 2, 3, 3, 4))
        return "gpipe" if face == "gpipe" else name, stages, stages
    if name in LOOPS:
        devices = random.choice((1, 2, 2))
        return name, devices, devices * random.choice((1, 2, 2))
    devices = random.choice((1, 2, 2))
    return name, devices, 2 * devices


def _steps(random: Random, face: str) -> tuple[str, ...]:
    steps = random.choice((("train",), ("train", "train"), ("train", "eval", "train"), ("train", "eval")))
    if face in CALLS and random.random() < 0.15:
        steps = (*steps, "eval backward")
    return steps


def _options(random: Random, case: Case) -> tuple[str, ...]:
    called, traced = case.face in CALLS, case.face.startswith("trace")
    by_pipeline = case.face in ("step", "sync step", "call")
    full = case.samples >= 2 * case.microbatches
    chances = {
        "accumulate": 0.3 * (len(case.steps) > 1),
        "optimizer": 0.2 * (not called),
        "deferred batch norm": 0.1 * (not traced),
        "autocast": 0.08 * (not case.tags & {"float", "draws"}),
        "input gradient": 0.4 * called,
        "ready-made": 0.1 * (by_pipeline and full),
        "list": 0.15 * by_pipeline,
        "inline": 0.1 * by_pipeline,
        "hint": 0.1 * (case.face != "gpipe" and case.schedule != "backward-first"),
        "no outputs": 0.1 * (not called),
    }
    return tuple(name for name, chance in chances.items() if random.random() < chance)
